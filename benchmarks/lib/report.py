"""Times to rows, rows to a table for people and a dated file for machines."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.lib.rounds import Timed

RESULTS = Path(__file__).parents[1] / "results"
MIB = 2**20
GB = 1e9
WIDTH = 150
"""Of tables that go to a file."""


@dataclass(frozen=True)
class Target:
    """A bound on one of a row's figures: at least, or at ``most``; ``text`` says it for people."""

    figure: Literal["of_reference", "ours_is", "seconds", "mib"]
    bound: float
    most: bool = False
    text: str = ""

    def met(self, row: Row) -> bool | None:
        value = getattr(row, self.figure)
        if value is None:
            return None
        return bool(value <= self.bound if self.most else value >= self.bound)

    def __str__(self) -> str:
        if self.text:
            return self.text
        unit = {"of_reference": "×", "ours_is": "×", "seconds": " s", "mib": " MiB"}[self.figure]
        return f"{'≤' if self.most else '≥'} {self.bound:g}{unit}"


@dataclass
class Row:
    """One contender's figures in answer to ``what``.

    Attributes:
        seconds: The median of ``rounds_s``, each of the slowest rank.
        of_reference: Its speed over the reference's, the median of the rounds' ratios.
        ours_is: Our speed over its, likewise.
        mib: Memory, where that is the question.
    """

    what: str
    contender: str
    seconds: float | None = None
    gb_per_s: float | None = None
    of_reference: float | None = None
    reference: str | None = None
    is_reference: bool = False
    ours_is: float | None = None
    mib: float | None = None
    target: Target | None = None
    note: str = ""
    rounds_s: list[float] = field(default_factory=list)

    @property
    def met(self) -> bool | None:
        return self.target.met(self) if self.target is not None else None


def compare(
    what: str,
    nbytes: int,
    timed: Timed,
    *,
    reference: str | Sequence[str],
    ours: str | None = None,
    targets: Mapping[str, Target] | None = None,
) -> list[Row]:
    """A row per contender; of several references each round's fastest counts."""
    names = [reference] if isinstance(reference, str) else list(reference)
    names = [name for name in names if name in timed.seconds]
    against = [min(times) for times in zip(*(timed.seconds[name] for name in names))]
    rows = []
    for name, times in timed.seconds.items():
        seconds = statistics.median(times)
        row = Row(what, name, seconds, nbytes / seconds / GB, is_reference=name in names, rounds_s=times)
        if against and [name] != names:
            row.of_reference = _median_ratio(against, times)
            row.reference = names[0] if len(names) == 1 else "the best of its kind"
        if ours is not None and ours in timed.seconds and name not in (ours, *names):
            row.ours_is = _median_ratio(times, timed.seconds[ours])
        row.target = (targets or {}).get(name)
        rows.append(row)
    return rows + [Row(what, name, note=reason.splitlines()[0]) for name, reason in timed.skipped.items()]


def _median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below))


# -- for people -------------------------------------------------------------------------------------------------------


def show(title: str, rows: Sequence[Row]) -> None:
    """Print a table of what the rows have."""
    figures: dict[str, Callable[[Row], str]] = {
        "seconds": lambda row: _number(row.seconds, 3),
        "GB/s": lambda row: _number(row.gb_per_s, 2),
        "of reference": lambda row: _number(row.of_reference, 2, "×"),
        "ours is": lambda row: _number(row.ours_is, 2, "×"),
        "MiB": lambda row: _number(row.mib, 0),
        "target": lambda row: str(row.target or ""),
        "": lambda row: {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[row.met],
    }
    figures = {heading: text for heading, text in figures.items() if any(map(text, rows))}
    table = Table("what", "contender", title=title)
    for heading in figures:
        table.add_column(heading, justify="right")
    for above, row in itertools.pairwise([None, *rows]):
        assert row is not None
        again = above is not None and above.what == row.what
        if above is not None and not again:
            table.add_section()
        contender = row.contender + (f" [dim]({escape(row.note)})[/dim]" if row.note else "")
        table.add_row("" if again else row.what, contender, *(text(row) for text in figures.values()))
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)


def _number(value: float | None, digits: int, unit: str = "") -> str:
    return "" if value is None else f"{value:,.{digits}f}{unit}"


# -- for machines -----------------------------------------------------------------------------------------------------


def write_result(name: str, rows: Sequence[Row], folder: Path, **more: Any) -> Path:
    """``<folder>/<name>-<date>.json``, with the machine and the command that it was measured with."""
    path = result_path(name, folder)
    result = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", *_relative(sys.argv)]),
        "machine": machine(),
        **more,
        "rows": [_to_json(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return path


def result_path(name: str, folder: Path) -> Path:
    """Today's."""
    return folder / f"{name}-{date.today().isoformat()}.json"


def machine() -> dict[str, Any]:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _to_json(row: Row) -> dict[str, Any]:
    entry = {key: value for key, value in dataclasses.asdict(row).items() if value not in (None, "", [], False)}
    if row.target is not None:
        entry |= {"target": str(row.target), "met": row.met}
    return entry


def _relative(arguments: Sequence[str]) -> list[str]:
    root = Path(__file__).parents[2]
    script = Path(arguments[0]).resolve()
    return [str(script.relative_to(root)) if script.is_relative_to(root) else script.name, *arguments[1:]]
