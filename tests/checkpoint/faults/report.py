"""docs/reliability.md from a ledger: ``python tests/checkpoint/faults/report.py LEDGER_FOLDER PAGE COMMAND``."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

GROUPS = (
    "Crash",
    "Power loss",
    "Damage",
    "Stores that fail",
    "Ranks that fail",
    "Races",
    "Preemption",
    "Malicious checkpoints",
)
"""The order of the page; others follow."""

_KINDS = (
    re.compile(r".+: (?P<kind>.+) (?:at|from) one request.*"),
    re.compile(r".+, (?P<kind>all|rank \d) killed"),
    re.compile(r"(?P<kind>\w+) fails in a save, .+"),
    re.compile(r"fuzzing of (?P<kind>.+)"),
    re.compile(r"one of three ranks .+ in a (?P<kind>\w+)"),
)
"""Faults that are alike but for the kind."""

INTRODUCTION = """\
# Reliability

<!-- Written by `make reliability` from the tests' own counts. Change tests/checkpoint/faults/, not this page. -->

1. **A committed checkpoint stays loadable whatever happens during a later save.** A save that fails, is killed or loses
   power leaves the earlier checkpoint or the new one, whole; never a mixture, and never neither.
2. **Damage is never loaded silently.** What is loaded is what was saved, or an error names the file.
3. **Loading a checkpoint from a stranger runs no code, and reads and writes nowhere else.**
4. **No rank waits for ever.** When one fails, dies or stops, the others stop within a deadline with the first cause.

*Points tried* are separate trials: calls at which a process was killed, images of a disk after a power cut, bytes
flipped, answers of a store spoiled. *Lost* are those after which a promise didn't hold; one fails the tests. On
2026-11-29 torch.distributed.checkpoint by its defaults, which promises none of it, lost a checkpoint in saves over it
by 21 of 23 kills, 218 of 223 power cuts and 13 of 15 errors of the disk, and in saves to a new path by none of 22 kills
and 14 of 139 power cuts; it loaded 961 of 10,064 flipped bytes.

Not promised:

- With `fsync=False`, a power cut may take the new checkpoint and the one that it replaces; a killed process takes none.
- With `digests=False`, or `verify=False` in a load, damaged tensors are loaded as they are.
- A disk that says that it has synced and hasn't, and a store that forgets what it acknowledged, lose data.
- What a killed save leaves, or one that failed on its way from a local folder, uploads on S3 too, is removed by a later
  save to the same path once it is an hour old. Uploads of a killed `gather`, or doubled ones, stay: let a lifecycle
  rule of the bucket abort them.
"""


@dataclass
class Row:
    """A fault: how many points were tried, and lost."""

    tried: int = 0
    lost: int = 0
    notes: list[str] = field(default_factory=list)

    def add(self, entry: dict[str, object]) -> None:
        self.tried += int(str(entry["tried"]))
        self.lost += int(str(entry["lost"]))
        if (note := str(entry["note"])) and note not in self.notes:
            self.notes.append(note)


def read(folder: Path) -> list[dict[str, object]]:
    """All entries of a ledger.

    Raises:
        FileNotFoundError: There are none.
    """
    entries = [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]
    if not entries:
        raise FileNotFoundError(f"{folder} holds no ledger: run the tests of faults with RELIABILITY_LEDGER={folder}")
    return entries


def collect(entries: Iterable[dict[str, object]]) -> dict[str, dict[str, Row]]:
    """Rows by group and fault. A fault that several tests tried is one row; a sample of it counts for nothing where
    all points were tried.
    """

    def key(entry: dict[str, object]) -> tuple[str, str]:
        return str(entry["group"]), str(entry["fault"])

    entries = list(entries)
    whole = {key(entry) for entry in entries if not entry.get("sample")}
    groups: dict[str, dict[str, Row]] = {}
    for entry in entries:
        if not (entry.get("sample") and key(entry) in whole):
            group, fault = key(entry)
            groups.setdefault(group, {}).setdefault(fault, Row()).add(entry)
    order = {group: place for place, group in enumerate(GROUPS)}
    return dict(sorted(groups.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def joined(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows that differ in the kind of fault alone as one, unless something was lost."""
    found: dict[str, Row] = {}
    alike: dict[tuple[str, str], dict[str, Row]] = {}
    for fault, row in rows.items():
        match = next(filter(None, (kind.fullmatch(fault) for kind in _KINDS)), None)
        if match is None or row.lost or row.notes:
            found[fault] = row
        else:
            begin, end = match.span("kind")
            alike.setdefault((fault[:begin], fault[end:]), {})[match["kind"]] = row
    for (before, after), kinds in alike.items():
        tried = sum(row.tried for row in kinds.values())
        names = ", ".join(sorted(kinds))
        found[f"{before}{f'({names})' if len(kinds) > 1 else names}{after}"] = Row(tried)
    return found


def page(entries: Iterable[dict[str, object]], *, command: str) -> str:
    """The page of all entries, with today's date and this machine."""
    groups = collect(entries)
    every = [row for rows in groups.values() for row in rows.values()]
    tried, lost = sum(row.tried for row in every), sum(row.lost for row in every)
    parts = [INTRODUCTION, f"**{tried:,} points were tried, and {lost:,} lost.** {_circumstances(command)}\n"]
    for group, rows in groups.items():
        parts.append(f"## {group}\n\n{_table(joined(rows))}")
    return "\n".join(parts)


def _circumstances(command: str) -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    day = datetime.now(UTC).date().isoformat()
    return (
        f"{day}, {cores} cores, {platform.system()} {platform.release().partition('-')[0]}, Python"
        f" {platform.python_version()}, torch {version('torch')}. Command: `{command}`"
    )


def _table(rows: dict[str, Row]) -> str:
    lines = ["| fault | points tried | lost | note |", "|---|--:|--:|---|"]
    for fault, row in sorted(rows.items()):
        cells = [fault, f"{row.tried:,}", f"{row.lost:,}", *(["; ".join(row.notes)] if row.notes else [])]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    ledger, target, command = sys.argv[1:]
    Path(target).write_text(page(read(Path(ledger)), command=command))
    print(f"{target} is written")
