"""Run the tests that need CUDA devices, and note what came of each with the date and the machine.

    python benchmarks/gpu_tests.py          # writes benchmarks/results/gpu-tests-<date>.json; wants two devices
    python benchmarks/gpu_tests.py tests/ranks/test_parity.py   # and tests of ranks that run on the CPU otherwise

One device is enough with NCCL 2.31 or newer, which lets ranks share it: see tests/on_gpu.py. Else what needs two is
skipped, and so it is noted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.on_gpu import EVERYWHERE, SHARED  # noqa: E402


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "tests/gpu", *sys.argv[1:], "-q", f"--junitxml={report}"]
        ended = subprocess.run(command, cwd=ROOT, env={**os.environ, EVERYWHERE: "1"}, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    outcomes = {}
    for case in cases:
        [outcome] = [kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None] or ["passed"]
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = {
            "outcome": outcome,
            "seconds": float(case.get("time", 0)),
        }
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    result = {
        "date": date.today().isoformat(),
        "devices": devices,
        "ranks share a device": os.environ.get(SHARED) == "1",
        "torch": torch.__version__,
        "nccl": torch.cuda.nccl.version() if devices else None,
        "tests": outcomes,
    }
    path = ROOT / "benchmarks" / "results" / f"gpu-tests-{result['date']}.json"
    path.write_text(json.dumps(result, indent=2) + "\n")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
