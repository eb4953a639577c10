"""How fast are checkpoints: next to the bare disk, and next to what else there is?

The state of a GPT and AdamW is saved, loaded (on the same layout and on others), saved asynchronously, gathered to one
file, and all that matters of it against an S3 server that this script starts. All contenders of a question take turns
in the same processes; a ratio is the median of the rounds' ratios.

    python benchmarks/checkpoint.py                  # about ten minutes; results/checkpoint-<date>.json and .png
    python benchmarks/checkpoint.py --mib 8192 --ranks 4 --rounds 3 --only save load      # 8 GiB; checkpoint-8192-mib-…
    python benchmarks/checkpoint.py --quick --only save load
"""

from __future__ import annotations

# ruff: noqa: E402
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from benchmarks.lib import gathering, loading, picture, replicas, report, s3, saving, stall
from benchmarks.lib.options import DEFAULT_BYTES, Options, parse
from lightning_shard.testing import RanksFailed, preload

QUESTIONS: dict[str, Callable[[Options], Iterator[report.Row]]] = {
    "save": saving.measure,
    "load": loading.measure,
    "stall": stall.measure,
    "memory": stall.measure_memory,
    "gather": gathering.measure,
    "s3": s3.measure,
    "replicas": replicas.measure,
}


def main() -> None:
    options = parse(list(QUESTIONS), __doc__)
    # a thread per rank, here as in the ranks
    torch.set_num_threads(1)
    # once, instead of in every rank
    preload("torch.distributed.checkpoint", "torch.distributed.checkpoint._fsspec_filesystem", "safetensors.torch")
    start = time.monotonic()
    rows: list[report.Row] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="checkpoint-bench-", dir=options.folder) as folder:
        options = replace(options, folder=Path(folder))
        for question in options.only:
            begun = time.monotonic()
            found: list[report.Row] = []
            try:
                found += QUESTIONS[question](options)
            except RanksFailed as error:
                failed[question] = str(error)
            report.show(f"{question} ({time.monotonic() - begun:.0f} s)", found)
            rows += found
    took_s = round(time.monotonic() - start)
    print(f"{took_s} s in all, state of {options.state_bytes / 2**30:.3g} GiB, {options.caching}")
    if options.results is not None:
        path = report.write_result(
            "checkpoint" if options.state_bytes <= DEFAULT_BYTES else f"checkpoint-{options.state_bytes // 2**20}-mib",
            rows,
            options.results,
            state_bytes=options.state_bytes,
            s3_state_bytes=options.s3_bytes,
            page_cache=options.caching,
            rounds=options.rounds,
            took_s=took_s,
        )
        print(path)
        picture.draw(rows, path.with_suffix(".png"))
    if failed:
        sys.exit("\n\n".join(f"{question} is without an answer: {error}" for question, error in failed.items()))


if __name__ == "__main__":
    main()
