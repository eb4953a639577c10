"""The page of a tiny ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.faults.report import Row, collect, joined, page, read


def entry(group: str, fault: str, tried: int, **more: Any) -> dict[str, Any]:
    return {"group": group, "fault": fault, "tried": tried, "lost": 0, "note": "", "test": "t", **more}


ENTRIES = [
    entry("Races", "two saves", 40),
    entry("Crash", "a save | killed", 30, note="at calls"),
    entry("Crash", "a save | killed", 12, note="at calls"),
    entry("Crash", "a save | killed", 5, sample=True),
    entry("Crash", "only sampled", 7, sample=True),
]


def test_entries_of_one_fault_are_one_row_and_samples_count_only_by_themselves() -> None:
    rows = collect(ENTRIES)
    assert list(rows) == ["Crash", "Races"]
    assert {fault: row.tried for fault, row in rows["Crash"].items()} == {"a save | killed": 42, "only sampled": 7}


def test_the_page_counts_each_fault_and_names_no_path(tmp_path: Path) -> None:
    text = page(ENTRIES, command="make reliability")
    assert "| a save \\| killed | 42 | 0 | at calls |\n" in text
    assert "| only sampled | 7 | 0 |\n" in text
    assert "| two saves | 40 | 0 |\n" in text
    assert "**89 points were tried, and 0 lost.**" in text
    assert str(tmp_path.home()) not in text


def test_a_ledger_is_read_from_all_its_files_and_an_empty_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="RELIABILITY_LEDGER"):
        read(tmp_path)
    for number, one in enumerate(ENTRIES):
        (tmp_path / f"{number % 2}.jsonl").open("a").write(json.dumps(one) + "\n")
    assert sorted(map(str, read(tmp_path))) == sorted(map(str, ENTRIES))


def test_kinds_of_faults_of_one_operation_are_one_row_unless_something_was_lost() -> None:
    rows = {f"S3, a save: {kind} at one request": Row(5) for kind in ("cut", "403")}
    lost = {"S3, a save: 500 at one request": Row(5, 1)}
    assert joined({**rows, **lost}) == {**lost, "S3, a save: (403, cut) at one request": Row(10)}
