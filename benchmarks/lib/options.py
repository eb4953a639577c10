"""What a run of ``benchmarks/checkpoint.py`` measures, and how large."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.report import MIB, RESULTS

DEFAULT_BYTES = 1024 * MIB

QUICK = {"mib": 64, "s3_mib": 32, "gather_mib": [32, 64], "ranks": [1, 2], "rounds": 1, "results": None, "fsync": False}


@dataclass(frozen=True)
class Options:
    """Sizes are of the whole state, of all ranks together."""

    only: tuple[str, ...]
    state_bytes: int
    s3_bytes: int
    gather_bytes: tuple[int, ...]
    ranks: tuple[int, ...]
    rounds: int
    folder: Path
    fsync: tuple[bool, ...]
    """Whether to measure without, with, or both."""
    cold: bool
    results: Path | None
    bare: bool = False
    """Only this package and the bare disk take part in saves and loads."""

    @property
    def caching(self) -> str:
        return "cold page cache" if self.cold else "warm page cache"


def parse(questions: Sequence[str], description: str, arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=questions, default=list(questions), help="these questions")
    add("--quick", action="store_true", help="small and once, to try; no result is written unless --results is given")
    add(
        "--mib",
        type=int,
        default=DEFAULT_BYTES // MIB,
        help="model and AdamW state of all ranks together (%(default)s)",
    )
    add("--s3-mib", type=int, default=1024, help="the same against the S3 server (%(default)s)")
    add("--gather-mib", type=int, nargs="+", default=[1024, 4096], help="the same for gather (1024 4096)")
    add("--big", action="store_true", help="gather 16 GiB too, which needs 35 GB of disk")
    add("--ranks", type=int, nargs="+", default=[1, 4], help="processes (1 4)")
    add("--rounds", type=int, default=5, help="after one that isn't counted (%(default)s)")
    add("--folder", type=Path, help="on the disk to measure (the system's for temporary files)")
    add("--fsync", action=argparse.BooleanOptionalAction, help="only with, or only without (both)")
    add("--cold", action="store_true", help="drop what is loaded from the page cache before")
    add("--bare", action="store_true", help="of saves and loads, only this package and the bare disk")
    add("--results", type=Path, default=RESULTS, help="where the result goes (benchmarks/results)")
    if parser.parse_known_args(arguments)[0].quick:
        parser.set_defaults(**QUICK)
    given = parser.parse_args(arguments)
    return Options(
        only=tuple(given.only),
        state_bytes=given.mib * MIB,
        s3_bytes=given.s3_mib * MIB,
        gather_bytes=tuple(mib * MIB for mib in [*given.gather_mib, *([16 * 1024] if given.big else [])]),
        ranks=tuple(given.ranks),
        rounds=given.rounds,
        folder=given.folder,
        fsync=(False, True) if given.fsync is None else (given.fsync,),
        cold=given.cold,
        results=given.results,
        bare=given.bare,
    )
