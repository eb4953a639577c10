"""The tables of numbers are those of the newest results."""

from __future__ import annotations

import pytest

from benchmarks.lib import numbers


@pytest.mark.parametrize(
    ("page", "table"), [(numbers.README, numbers.headlines), (numbers.PAGE, numbers.table)], ids=["README", "numbers"]
)
def test_the_pages_say_what_was_measured(page: numbers.Path, table: object) -> None:
    assert callable(table)
    assert numbers.renewed(page, table()) == page.read_text(), "write it: python -m benchmarks.lib.numbers"


def test_the_first_screen_has_the_number_of_two_pipeline_stages() -> None:
    [speed] = [
        one.speed
        for machine, group in numbers.comparisons().items()
        for one in group
        if machine.startswith("CPU") and (one.what, one.against) == ("a training step, pp2", "plain torch, by hand")
    ]
    assert f"two pipeline stages runs at **{speed:.2f}×**" in numbers.README.read_text()
