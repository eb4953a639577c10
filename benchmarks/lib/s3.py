"""Saving to and loading from an S3 server on this machine, against s3fs used directly and against torch DCP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter  # what dcp.save picks for a URL

from benchmarks.lib import saving
from benchmarks.lib.options import Options
from benchmarks.lib.report import MIB, Row, Target, compare
from benchmarks.lib.rounds import TIMEOUT_S, Contender, Task, Timed, count, everyone, in_turn, quiet
from benchmarks.lib.state import State, gpt_shapes, rows
from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks

PIPE = "s3fs pipe_file per rank"
PUT = "s3fs put_file per rank, from a local file"
DCP = "torch DCP FsspecWriter"
RANGES = {
    f"s3fs, {number} ranges of {mib} MiB at a time": (number, mib * MIB) for number, mib in ((8, 8), (16, 4), (16, 16))
}
DCP_READ = "torch DCP FsspecReader"
LOAD_TARGET = Target("of_reference", 0.95)


def measure(options: Options) -> Iterator[Row]:
    from servers import BUCKET, serve  # of the tests

    for ranks in options.ranks:
        # else it would hash the whole object for each request of a part of it, as no real store does
        with serve("s3", options.folder / f"s3-{ranks}", "--etag-hash", "") as server:
            arguments = (options, server.url, str(server.folder / BUCKET), for_other_servers(server.options))
            saves, loads, nbytes = run_ranks(_on_rank, ranks, *arguments, timeout_s=TIMEOUT_S)[0]
        where = f"S3 server on this machine, {count(ranks)}"
        yield from compare(f"save, {where}", nbytes, saves, reference=PIPE, ours=saving.OURS)
        yield from compare(
            f"load, {where}",
            nbytes,
            loads,
            reference=list(RANGES),
            ours=saving.OURS,
            targets={saving.OURS: LOAD_TARGET},
        )


def for_other_servers(options: dict[str, Any]) -> dict[str, Any]:
    """No checksums, which botocore expects to be of a range where a server that isn't AWS sends the object's."""
    config = {"request_checksum_calculation": "when_required", "response_checksum_validation": "when_required"}
    return {**options, "use_listings_cache": False, "config_kwargs": {**options["config_kwargs"], **config}}


# -- contenders -------------------------------------------------------------------------------------------------------


def _ours_save(task: Task) -> None:
    checkpoint.save(task.state.model, task.folder, optimizer=task.state.optimizer, storage_options=task.storage_options)


def ours_load(task: Task, share_reads: bool | None = None) -> None:
    checkpoint.load(
        task.folder,
        task.state.model,
        optimizer=task.state.optimizer,
        storage_options=task.storage_options,
        share_reads=share_reads,
    )


def _dcp_save(task: Task) -> None:
    # sync_files would sync this whole machine
    dcp.save(task.state.tree, storage_writer=FsspecWriter(task.folder, sync_files=False, **task.storage_options))


def dcp_load(task: Task) -> None:
    dcp.load(task.state.tree, storage_reader=FsspecReader(task.folder, **task.storage_options))


def _pipe(data: bytes) -> Contender:
    return lambda task: _filesystem(task).pipe_file(_raw_path(task), data)


def _put(path: str) -> Contender:
    return lambda task: _filesystem(task).put_file(path, _raw_path(task))


def _ranges(number: int, range_bytes: int, total_bytes: int) -> Contender:
    """Receives this rank's bytes and lets go of them."""

    def read(task: Task) -> None:
        starts = range(0, total_bytes, range_bytes)
        for first in range(0, len(starts), number):
            batch = starts[first : first + number]
            stops = [min(start + range_bytes, total_bytes) for start in batch]
            parts = _filesystem(task).cat_ranges(
                [_raw_path(task)] * len(batch), list(batch), stops, on_error="raise", batch_size=number
            )
            assert sum(map(len, parts)) == stops[-1] - batch[0]

    return read


def _filesystem(task: Task) -> Any:
    import fsspec

    return fsspec.core.url_to_fs(task.folder, **task.storage_options)[0]


def _raw_path(task: Task) -> str:
    return f"{task.folder}/rank-{dist.get_rank()}.bin"


# -- on each rank -----------------------------------------------------------------------------------------------------


def _on_rank(options: Options, url: str, served: str, storage_options: dict[str, Any]) -> tuple[Timed, Timed, int]:
    quiet()
    layout = rows(dist.get_world_size())
    shapes = gpt_shapes(options.s3_bytes)
    state = State.of(shapes, layout)
    data = b"".join(saving.memory(tensor) for tensor in state.local().values())
    local_file = options.folder / f"s3-raw-{dist.get_rank()}.bin"
    local_file.write_bytes(data)

    def save_task(name: str) -> Task:
        where = f"save/{names.index(name)}"
        dist.barrier()
        if dist.get_rank() == 0:
            # behind the server's back: its answer to a request that deletes several objects never comes
            shutil.rmtree(Path(served, where), ignore_errors=True)
        dist.barrier()
        return Task(state, f"{url}/{where}", storage_options=storage_options)

    savers = {saving.OURS: _ours_save, PIPE: _pipe(data), PUT: _put(str(local_file)), DCP: _dcp_save}
    names = list(savers)
    saves = in_turn(savers, options.rounds, save_task)
    local_file.unlink()

    folders = {name: f"{url}/save/{names.index(name)}" for name in names}
    loaders: dict[str, Contender] = {saving.OURS: ours_load, DCP_READ: dcp_load}
    loaders |= {name: _ranges(number, nbytes, len(data)) for name, (number, nbytes) in RANGES.items()}
    sources = {saving.OURS: saving.OURS, DCP_READ: DCP}

    def load_task(name: str) -> Task:
        return Task(state, folders[sources.get(name, PIPE)], storage_options=storage_options)

    def first_load_task(name: str) -> Task:
        if name in sources:
            state.clear()
        return load_task(name)

    def check(name: str, task: Task) -> None:
        wrong = state.differences(State.of(shapes, layout)) if name in sources else []
        assert not wrong, f"{len(wrong)} tensors differ from what was saved, such as {wrong[0]}"

    possible = {name: load for name, load in loaders.items() if sources.get(name, PIPE) in saves.seconds}
    loads = in_turn(possible, options.rounds, load_task, task_of_first=first_load_task, check=check)
    return saves, loads, sum(everyone(state.local_bytes))
