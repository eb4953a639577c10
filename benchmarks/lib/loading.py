"""How this package and others fill a live state from what they wrote themselves."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from benchmarks.lib import saving
from benchmarks.lib.options import Options
from benchmarks.lib.report import Row, Target, compare
from benchmarks.lib.rounds import TIMEOUT_S, Contender, Task, Timed, count, everyone, in_turn, quiet
from benchmarks.lib.saving import memory, own_file
from benchmarks.lib.state import Layout, State, columns, gpt_shapes, grid, rows
from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks

RAW = "raw preadv"
OURS = "lightning_shard"
OURS_UNCHECKED = "lightning_shard, digests not checked"
SAFETENSORS = "safetensors load_file per rank, copied"
DCP = "torch DCP FileSystemReader"


def raw_preadv(task: Task) -> None:
    descriptor = os.open(own_file(task), os.O_RDONLY)
    try:
        position = 0
        for tensor in task.state.local().values():
            view = memory(tensor)
            while view:
                got = os.preadv(descriptor, [view], position)
                assert got, "the file is too short"
                position, view = position + got, view[got:]
    finally:
        os.close(descriptor)


def ours(task: Task, verify: bool = True) -> None:
    checkpoint.load(task.folder, task.state.model, optimizer=task.state.optimizer, verify=verify)


def safetensors(task: Task) -> None:
    loaded = load_file(own_file(task))
    for name, tensor in task.state.local().items():
        tensor.copy_(loaded[name])


def torch_dcp(task: Task) -> None:
    dcp.load(task.state.tree, storage_reader=dcp.FileSystemReader(task.folder))


def torch_dcp_safetensors(task: Task) -> None:
    dcp.load(task.state.flat, storage_reader=dcp.HuggingFaceStorageReader(task.folder))


def torch_checkpointing(task: Task) -> None:
    saving.torch_checkpointing_manager().load(task.folder, into=task.state.tree)


@dataclass(frozen=True)
class Reading:
    """What is read, by the name of who writes it; how; and onto which layout, having been written by rows."""

    source: str
    load: Contender
    layout: Callable[[int], Layout] = rows


SAME_LAYOUT = {
    RAW: Reading(saving.RAW, raw_preadv),
    OURS: Reading(saving.OURS, ours),
    OURS_UNCHECKED: Reading(saving.OURS, functools.partial(ours, verify=False)),
    SAFETENSORS: Reading(saving.SAFETENSORS, safetensors),
    DCP: Reading(saving.DCP, torch_dcp),
    "torch DCP HuggingFaceStorageReader": Reading(saving.DCP_SAFETENSORS, torch_dcp_safetensors),
    saving.TORCH_CHECKPOINTING: Reading(saving.TORCH_CHECKPOINTING, torch_checkpointing),
}
OTHER_LAYOUT = {
    f"{OURS}, onto data × tensor": Reading(saving.OURS, ours, grid),
    f"{OURS}, onto columns": Reading(saving.OURS, ours, columns),
    f"{DCP}, onto data × tensor": Reading(saving.DCP, torch_dcp, grid),
    f"{DCP}, onto columns": Reading(saving.DCP, torch_dcp, columns),
}

# -- the question -----------------------------------------------------------------------------------------------------

OTHER_LAYOUT_TARGETS = {name: Target("of_reference", 0.7) for name in OTHER_LAYOUT if name.startswith(OURS)}


def measure(options: Options) -> Iterator[Row]:
    for ranks in options.ranks:
        timed, nbytes = run_ranks(_on_rank, ranks, options, timeout_s=TIMEOUT_S)[0]
        what = f"load, {count(ranks)}, {options.caching}"
        targets = {OURS: Target("of_reference", 1.3 if ranks == 1 else 0.75), DCP: Target("ours_is", 3)}
        yield from compare(what, nbytes, timed.only(SAME_LAYOUT), reference=RAW, ours=OURS, targets=targets)
        if ranks > 1:
            what = f"load what rows wrote, {count(ranks)}, {options.caching}"
            part = timed.only([OURS, *OTHER_LAYOUT])
            yield from compare(what, nbytes, part, reference=OURS, targets=OTHER_LAYOUT_TARGETS)


def _on_rank(options: Options) -> tuple[Timed, int]:
    quiet()
    ranks = dist.get_world_size()
    readings = SAME_LAYOUT | (OTHER_LAYOUT if ranks > 1 else {})
    if options.bare:
        readings = {name: reading for name, reading in readings.items() if reading.source in (saving.RAW, saving.OURS)}
    shapes = gpt_shapes(options.state_bytes)
    states = {layout: State.of(shapes, layout) for layout in {reading.layout(ranks) for reading in readings.values()}}
    root = Path(options.folder, f"load-{ranks}")
    sources = list(dict.fromkeys(reading.source for reading in readings.values()))
    folders = {source: str(root / str(number)) for number, source in enumerate(sources)}
    written = in_turn(
        {source: saving.CONTENDERS[source] for source in sources},
        0,
        lambda source: Task(states[rows(ranks)], _made(folders[source])),
    )
    if dist.get_rank() == 0:
        os.sync()

    def task_of(name: str) -> Task:
        reading = readings[name]
        if options.cold:
            _drop_from_cache(Path(folders[reading.source]))
        return Task(states[reading.layout(ranks)], folders[reading.source])

    def task_of_first(name: str) -> Task:
        states[readings[name].layout(ranks)].clear()
        return task_of(name)

    def check(name: str, task: Task) -> None:
        wrong = task.state.differences(State.of(shapes, readings[name].layout(ranks)))
        assert not wrong, f"{len(wrong)} tensors differ from what was saved, such as {wrong[0]}"

    possible = {name: reading.load for name, reading in readings.items() if reading.source not in written.skipped}
    timed = in_turn(possible, options.rounds, task_of, check=check, task_of_first=task_of_first)
    timed.skipped.update({name: written.skipped[r.source] for name, r in readings.items() if name not in possible})
    return timed, sum(everyone(states[rows(ranks)].local_bytes))


def _made(folder: str) -> str:
    os.makedirs(folder, exist_ok=True)
    dist.barrier()
    return folder


def _drop_from_cache(folder: Path) -> None:
    """What has reached the disk, as it has after the sync above."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
