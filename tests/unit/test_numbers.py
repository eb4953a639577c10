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
