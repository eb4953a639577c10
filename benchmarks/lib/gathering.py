"""A checkpoint to one file, against ``cat`` of the checkpoint's files: time, and memory for a small and a large one."""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open

from benchmarks.lib import saving
from benchmarks.lib.memory import growth_of
from benchmarks.lib.options import Options
from benchmarks.lib.report import MIB, Row, Target, compare
from benchmarks.lib.rounds import TIMEOUT_S, Task, Timed, count, quiet
from benchmarks.lib.state import State, gpt_shapes, overlapping, rows
from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks

CAT = "cat files > out"
OURS = "lightning_shard gather"
TARGET = Target("of_reference", 1)
MEMORY = Target("mib", 256, most=True)
LARGE_BYTES = 8 * 2**30
"""From here on once is enough."""


def measure(options: Options) -> Iterator[Row]:
    fsync = options.fsync[-1] and len(options.fsync) == 1
    for nbytes in options.gather_bytes:
        folder = Path(options.folder, "gather")
        what = f"gather {nbytes / 2**30:.3g} GiB of {count(max(options.ranks))}, {'with' if fsync else 'no'} fsync"
        if shutil.disk_usage(options.folder).free < 2.2 * nbytes:
            yield Row(what, OURS, note="not enough room on the disk")
            continue
        written = run_ranks(_write, max(options.ranks), nbytes, str(folder), timeout_s=TIMEOUT_S)[0]
        timed, grown = _rounds(folder, 1 if nbytes >= LARGE_BYTES else options.rounds, fsync)
        ours, *others = compare(what, written, timed.only([OURS, CAT]), reference=CAT, targets={OURS: TARGET})
        yield from (ours, *others)
        yield Row(f"{what}: memory over the start", OURS, mib=statistics.median(grown) / MIB, target=MEMORY)
        shutil.rmtree(folder)


def _write(nbytes: int, folder: str) -> int:
    """Write a checkpoint that takes more room on the disk than in memory."""
    quiet()
    shapes = gpt_shapes(nbytes)
    state = State.of(shapes, rows(dist.get_world_size()), overlapping(shapes))
    saving.ours(Task(state, folder))
    if dist.get_rank() == 0:
        os.sync()
    return sum(tensor.nbytes for tensor in state.flat.values())


def _rounds(folder: Path, rounds: int, fsync: bool) -> tuple[Timed, list[int]]:
    files = sorted(folder.glob("*/rank-*.safetensors"))
    assert files, f"no files in {folder}"
    out = folder.parent / "gathered.safetensors"
    timed, grown = Timed({CAT: [], OURS: []}, {}), []
    for number in range(rounds + 1):
        ours_s, growth = run_ranks(_gather, 1, str(folder), str(out), fsync, init=False, timeout_s=TIMEOUT_S)[0]
        if number == 0:
            _check(files, out)
        out.unlink()
        cat_s = _timed(lambda: _cat(files, out, fsync))
        out.unlink()
        if number:
            timed.seconds[OURS].append(ours_s)
            timed.seconds[CAT].append(cat_s)
            grown.append(growth)
    return timed, grown


def _gather(folder: str, out: str, fsync: bool) -> tuple[float, int]:
    """In a process of its own, whose memory nothing else has used before."""
    seconds = [0.0]

    def gather() -> None:
        seconds[0] = _timed(lambda: checkpoint.gather(folder, out, optimizer=True, fsync=fsync))

    growth = growth_of(gather)
    return seconds[0], growth


def _cat(files: list[Path], out: Path, fsync: bool) -> None:
    with out.open("wb") as file:
        subprocess.run(["cat", *files], stdout=file, check=True)
        if fsync:
            os.fsync(file.fileno())


def _timed(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _check(files: list[Path], out: Path) -> None:
    """Of each section, one tensor that the ranks hold rows of, joined by plain means."""
    with safe_open(out, "pt") as gathered, contextlib.ExitStack() as stack:
        for section, prefix in (("model", ""), ("optimizer", "optimizer.")):
            parts = [stack.enter_context(safe_open(file, "pt")) for file in files if file.parent.name == section]
            name = next(key for key in parts[0].keys() if len(parts[0].get_slice(key).get_shape()) > 1)  # noqa: SIM118
            joined = torch.cat([part.get_tensor(name) for part in parts])
            assert torch.equal(gathered.get_tensor(prefix + name), joined), f"{name} was gathered wrongly"
