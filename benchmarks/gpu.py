"""What do a step and a checkpoint cost on one CUDA device, and where does a step wait for it?

    python benchmarks/gpu.py           # about five minutes; writes benchmarks/results/gpu-<date>.json
    python benchmarks/gpu.py --quick   # small and once, to try

`step`: the same fully sharded step by hand in plain torch, under Lightning's ModelParallelStrategy and under ours, of
a GPT that keeps the device busy, and of one of many small launches, where every microsecond of the host counts.
`waits`: the lines that make the host wait for the device in a step, by torch's sync debug mode, and how often.
`checkpoint`: save and load next to bare copies and files, and how long an asynchronous save holds up the program.

That a CUDA device computes, saves and loads what it should is tested by `pytest tests/gpu`.
"""

from __future__ import annotations

# ruff: noqa: E402
import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch

from benchmarks.lib import device_checkpoints, device_steps, report
from benchmarks.lib.report import MIB, RESULTS, Row
from lightning_shard.testing import run_ranks

QUESTIONS = ("checkpoint", "step", "waits")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=list(QUESTIONS), help="these questions")
    parser.add_argument("--quick", action="store_true", help="small and once, to try; writes to --results only")
    parser.add_argument("--mib", type=int, default=4096, help="of the state that is saved (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (the system's for temporary files)")
    parser.add_argument("--results", type=Path, help="where the result goes (benchmarks/results)")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("There is no CUDA device: nothing is measured.")
        return
    if given.quick:
        given.mib, given.rounds = 64, 1
    sizes = (device_steps.SMALL,) if given.quick else device_steps.SIZES
    # each on a process of its own, which the driver's state is fresh in: it doesn't survive a fork
    alone: dict[str, Any] = {"start_method": "spawn", "timeout_s": 900}
    rows: list[Row] = []
    more: dict[str, Any] = {}
    results = given.results or (None if given.quick else RESULTS)
    for question in given.only:
        found: list[Row] = []
        if question == "step":
            found += run_ranks(device_steps.measure, 1, sizes, given.rounds, elastic=True, **alone)[0]
        elif question == "waits":
            waits = more["waits_per_step"] = run_ranks(device_steps.waits, 1, sizes[-1], elastic=True, **alone)[0]
            for name, places in waits.items():
                print(name, "waits at", places or "nothing", flush=True)
        else:
            with tempfile.TemporaryDirectory(prefix="gpu-bench-", dir=given.folder) as folder:
                asked = given.mib * MIB, given.rounds, Path(folder)
                found += run_ranks(device_checkpoints.measure, 1, *asked, **alone)[0]
        if found:
            report.show(f"{question}, one {torch.cuda.get_device_name()}", found)
        rows += found
        if results is not None:  # after each question, as the next one may be interrupted
            about = {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "rounds": given.rounds}
            about |= {"state_bytes": given.mib * MIB, "sizes": [vars(size) for size in sizes], **more}
            path = report.write_result("gpu", rows, results, **about)
    if results is not None:
        print(path)


if __name__ == "__main__":
    main()
