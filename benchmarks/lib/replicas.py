"""Loading two replicas of a sharded state from an S3 server: do they share the reading, and is that worth it?

Through a network of this machine alone, and through one that carries only so much: that of a cluster is shared by many.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from benchmarks.lib import s3
from benchmarks.lib.options import Options
from benchmarks.lib.report import Row, compare
from benchmarks.lib.rounds import TIMEOUT_S, Contender, Task, Timed, everyone, in_turn, quiet
from benchmarks.lib.state import State, gpt_shapes, replicas
from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks

RANKS = 4
SHARED, APART = "lightning_shard", "lightning_shard, each replica by itself"
NETWORKS = {"this machine's": (), "200 MB/s": ("--bwlimit", "200M")}


def measure(options: Options) -> Iterator[Row]:
    from servers import serve  # of the tests

    for network, flags in NETWORKS.items():
        with serve("s3", options.folder / f"s3-replicas-{len(flags)}", "--etag-hash", "", *flags) as server:
            arguments = (options, server.url, s3.for_other_servers(server.options))
            loads, nbytes = run_ranks(_on_rank, RANKS, *arguments, timeout_s=TIMEOUT_S)[0]
        what = f"load 2 replicas × {RANKS // 2} shards from S3, network of {network}"
        yield from compare(what, nbytes, loads, reference=APART, ours=SHARED)


def _on_rank(options: Options, url: str, storage_options: dict[str, Any]) -> tuple[Timed, int]:
    quiet()
    shapes, layout = gpt_shapes(options.s3_bytes // 2), replicas(dist.get_world_size())
    state = State.of(shapes, layout)
    checkpoint.save(state.model, f"{url}/ours", optimizer=state.optimizer, storage_options=storage_options)
    dcp.save(state.tree, storage_writer=FsspecWriter(f"{url}/dcp", sync_files=False, **storage_options))
    contenders: dict[str, Contender] = {
        SHARED: s3.ours_load,
        APART: functools.partial(s3.ours_load, share_reads=False),
        s3.DCP_READ: s3.dcp_load,
    }

    def task_of(name: str) -> Task:
        return Task(state, f"{url}/{'dcp' if name == s3.DCP_READ else 'ours'}", storage_options=storage_options)

    def first_task_of(name: str) -> Task:
        state.clear()
        return task_of(name)

    def check(name: str, task: Task) -> None:
        wrong = state.differences(State.of(shapes, layout))
        assert not wrong, f"{len(wrong)} tensors differ from what was saved, such as {wrong[0]}"

    loads = in_turn(contenders, options.rounds, task_of, task_of_first=first_task_of, check=check)
    return loads, sum(everyone(state.local_bytes))
