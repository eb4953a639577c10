"""Ranks load by the manifest and the table that the first of them reads, and fail together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from lightning_shard import checkpoint
from lightning_shard.checkpoint import ranks as collectives
from lightning_shard.checkpoint.format import table
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME
from lightning_shard.checkpoint.loading import load as loading
from lightning_shard.checkpoint.loading import open as opening
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.checkpoint.store.protocol import Reader, Segment
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, StateMismatchError
from lightning_shard.testing import ranks
from tests.checkpoint.laid_out import assert_same, full_state, laid_out


def emptied() -> dict[str, Any]:
    return laid_out("two axes", fill=0)[0]


def save(path: Path, fill: float | None = None) -> None:
    state, _ = laid_out("shards", fill)
    of_rank = {"seed": torch.tensor(dist.get_rank())}
    checkpoint.save(state, path, optimizer={"m": state["uneven"]}, rank_state=of_rank, trainer_state={"n": 1})


def load_in_all_ways(path: Path, rank: int) -> None:
    """In one group, and by leaders."""
    for size in (64, 1):
        state, moment = emptied(), emptied()["uneven"]
        with mock.patch.object(collectives, "GROUP_RANKS", size):
            assert checkpoint.load(path, state, optimizer={"m": moment}) == ([], [])
        assert_same({**state, "m": moment}, {**full_state(), "m": full_state()["uneven"]})
    stored = checkpoint.read_together(path)
    assert stored.rank_state(rank) == {"seed": torch.tensor(rank)}
    assert stored.trainer_state() == {"n": 1}
    assert_same(stored.full(), full_state())
    checkpoint.gather(path, path.parent / "whole.safetensors")
    assert_same(checkpoint.read(path.parent / "whole.safetensors").full(), full_state())

    # names that only some ask for are joined by leaders too
    without = {name: tensor for name, tensor in emptied().items() if name != "plain"}
    everything = emptied()
    with mock.patch.object(collectives, "GROUP_RANKS", 1):
        assert checkpoint.load(path, everything if rank == 1 else without) == ([], [])
        with pytest.raises(StateMismatchError, match="Not in the state \\(1\\)"):
            checkpoint.load(path, without)


def fail_together(path: Path, rank: int) -> None:
    """What the first rank can't read, or reads damaged, fails on all, and nothing has been written."""
    reading, state = LocalStore.reading, emptied()

    @contextlib.contextmanager
    def damaged(self: LocalStore, name: str) -> Iterator[Reader]:
        def read(segments: Sequence[Segment]) -> None:
            inner(segments)
            for _, buffer in segments if name.startswith("table-") else ():
                buffer[-1] ^= 1

        with reading(self, name) as inner:
            yield read

    def failing(self: LocalStore, name: str) -> Any:
        if name.startswith("table-"):
            raise OSError(5, "Input/output error")
        return reading(self, name)

    for change, error in ((damaged, CorruptCheckpointError), (failing, CheckpointError)):
        with mock.patch.object(LocalStore, "reading", change), pytest.raises(error, match="table-"):
            checkpoint.load(path, state)
    assert all(not getattr(t, "to_local", lambda t=t: t)().any() for t in state.values())

    # another save that replaces it after the first rank has read it: all begin anew, and have the other
    replaced: list[int] = []

    def replacing(*args: Any) -> Any:
        if not replaced:
            replaced.append(1)
            save(path, fill=1)
        return opening.open_found(*args)

    state = emptied()
    with mock.patch.object(loading, "open_found", replacing):
        assert checkpoint.load(path, state) == ([], [])
    assert_same(state, full_state(fill=1))

    dist.barrier()
    if rank == 0:
        data = (path / MANIFEST_NAME).read_bytes()
        (path / MANIFEST_NAME).write_bytes(data.replace(b'"chunks":[0', b'"chunks":[1', 1))
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match="differs from its own digest"):
        checkpoint.load(path, emptied())


@ranks(4, timeout_s=120)
def test_ranks_load_alike_and_fail_together(tmp_path: Path) -> None:
    with mock.patch.object(table, "BLOCK_BYTES", 1024):  # of the table, several
        save(tmp_path / "c")
        load_in_all_ways(tmp_path / "c", dist.get_rank())
        fail_together(tmp_path / "c", dist.get_rank())
