"""Run tests that CI doesn't, and note what came of each with the date, the commit and the machine.

::

    python -m tests.house.record long            # all long tests but faults' and the survey of models, on CPU processes
    python -m tests.house.record gpu             # tests/gpu, on CUDA devices; wants two
    python -m tests.house.record gpu tests/training/whole  # and tests of ranks that run on the CPU otherwise
    python -m tests.house.record long -n 2 --dist worksteal        # what follows is pytest's

Writes ``benchmarks/results/<long or gpu>-tests-<date>.json``, also if some fail. Faults have ``make reliability`` and
docs/reliability.md, the survey has docs/models.md.

One CUDA device is enough with NCCL 2.31 or newer, which lets ranks share it: see tests/on_gpu.py. Else what needs two
is skipped, and so it is noted.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.lib.report import RESULTS, machine
from tests.on_gpu import EVERYWHERE, SHARED
from tests.paths import ROOT

ARGUMENTS = {
    "long": ["tests", "--ignore=tests/checkpoint/faults", "-m", "long"],
    "gpu": ["tests/gpu", "-m", "long or not long"],
}


def outcomes(report: Path) -> dict[str, dict[str, Any]]:
    """By file and by test: what came of it, in how many seconds; paths in names are relative to the repository."""
    by_file: dict[str, dict[str, Any]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        found = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None] or ["passed"]
        by_file[str(case.get("classname"))][str(case.get("name")).replace(f"{ROOT}/", "")] = {
            "outcome": found[0],
            "seconds": round(float(case.get("time", 0)), 1),
        }
    return by_file


def devices() -> dict[str, Any]:
    count = torch.cuda.device_count()
    return {
        "devices": [torch.cuda.get_device_name(index) for index in range(count)],
        "ranks share a device": os.environ.get(SHARED) == "1",
        "nccl": torch.cuda.nccl.version() if count else None,
    }


def commit() -> str:
    """The commit that is run, and whether the tree differs from it."""
    describe = ["git", "describe", "--always", "--abbrev=12", "--dirty"]
    return subprocess.check_output(describe, cwd=ROOT, text=True).strip()


def main(kind: str, *more: str) -> int:
    on_gpu = kind == "gpu"
    tested, began = commit(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", *ARGUMENTS[kind], *more, "-q", f"--junitxml={report}"]
        env = {**os.environ, **({EVERYWHERE: "1"} if on_gpu else {})}
        ended = subprocess.run(command, cwd=ROOT, env=env, check=False)
        by_file = outcomes(report)
    result = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "tests.house.record", kind, *more]),
        "commit": tested,
        "machine": machine() | (devices() if on_gpu else {}),
        "seconds": round(time.time() - began),
        "counts": Counter(test["outcome"] for tests in by_file.values() for test in tests.values()),
        "tests": by_file,
    }
    path = RESULTS / f"{kind}-tests-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return ended.returncode


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ARGUMENTS:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
