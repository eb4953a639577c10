"""The README's table of numbers is that of the newest results."""

from benchmarks.lib import numbers


def test_the_readme_says_what_was_measured() -> None:
    assert numbers.readme() == numbers.README.read_text(), "write it: python -m benchmarks.lib.numbers"
