"""Replicas share the reading: each byte is read by one of them and passed on to the others; nobody waits in vain."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CorruptCheckpointError
from lightning_shard.testing import ranks
from tests.checkpoint.manifests import flip
from tests.counting import reads

KINDS = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)
LAYOUTS: dict[str, tuple[tuple[int, ...], list[Placement]]] = {
    "plain": ((4,), []),
    "replicated": ((4,), [Replicate()]),
    "hsdp": ((2, 2), [Replicate(), Shard(0)]),
    "columns, replicated over the second axis": ((2, 2), [Shard(1), Replicate()]),
    "sharded": ((4,), [Shard(0)]),
}
COPIES = {"plain": 4, "replicated": 4, "sharded": 1}
"""How many ranks hold each element; elsewhere two do."""


def full_state() -> dict[str, Tensor]:
    """Above a MiB, with uneven sizes, of all kinds of dtypes, with a scalar and nothing."""
    generator = torch.Generator().manual_seed(0)
    state = {str(dtype): (torch.randn(317, 250, generator=generator) * 9).to(dtype) for dtype in KINDS}
    return {
        **state,
        "large": torch.randn(1031, 1024, generator=generator),
        "step": torch.tensor(7),
        "none": torch.empty(0, 3),
    }


def laid_out(layout: str) -> dict[str, Tensor]:
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    return {
        name: distribute_tensor(tensor, mesh, placements, src_data_rank=None)
        if placements and tensor.ndim == 2
        else tensor
        for name, tensor in full_state().items()
    }


def emptied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def same(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    def memory(tensor: Any) -> Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.contiguous().view(-1).view(torch.uint8)

    return all(torch.equal(memory(state[name]), memory(tensor)) for name, tensor in expected.items())


def load_and_count(path: Path, into: dict[str, Tensor], **options: Any) -> int:
    """Loads, and counts the bytes of tensors that this rank has read."""
    with reads() as counted:
        checkpoint.load(path, into, **options)
    return sum(counted)


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@ranks(4, timeout_s=120)
def test_each_byte_is_read_once_and_every_replica_has_it(tmp_path: Path) -> None:
    total = sum(tensor.nbytes for tensor in full_state().values())
    for source in ("hsdp", "sharded"):
        checkpoint.save(laid_out(source), tmp_path / source, digests=source == "hsdp")
    for layout in LAYOUTS:
        expected = laid_out(layout)
        for source in ("hsdp", "sharded"):
            into = emptied(expected)
            read = everywhere(load_and_count(tmp_path / source, into, share_reads=True))
            assert same(into, expected), layout
            apart = everywhere(load_and_count(tmp_path / source, into, share_reads=False))
            copies = COPIES.get(layout, 2)
            if (source == "sharded" and "columns" not in layout) or layout == source:
                # what is needed and no more; the scalar, which is too little to share, by every rank
                assert sum(read) - total <= 3 * 8, layout
                assert sum(apart) - copies * total <= 3 * 8, layout
                assert max(read) <= 1.1 * min(read), layout
            else:  # the digests' whole blocks, and what lies between parts of rows
                assert sum(read) < (1.01 if copies == 1 else 0.8) * sum(apart), layout


@ranks(4)
def test_ranks_that_ask_for_different_tensors_read_by_themselves(tmp_path: Path) -> None:
    full = full_state()
    checkpoint.save(full, tmp_path / "c")
    missed = sorted(full)[dist.get_rank()]
    into = {name: torch.zeros_like(tensor) for name, tensor in full.items() if name != missed}
    read = load_and_count(tmp_path / "c", into, share_reads=True)
    assert read == sum(tensor.nbytes for tensor in into.values())
    assert same(into, {name: full[name] for name in into})
    # as stages of a pipeline do: pairs that hold the same
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "replica"))
    large = {f"large{stage}": full["large"] + stage for stage in range(2)}
    checkpoint.save(large, tmp_path / "d")
    own = f"large{mesh.get_local_rank('stage')}"
    stage = {own: distribute_tensor(torch.zeros(1031, 1024), mesh["replica"], [Replicate()], src_data_rank=None)}
    read = everywhere(load_and_count(tmp_path / "d", stage, share_reads=True))
    assert torch.equal(stage[own].to_local(), large[own])  # type: ignore[attr-defined]
    assert sum(read) < 1.1 * 2 * full["large"].nbytes


@ranks(4)
def test_what_is_meant_is_told_by_more_than_names_and_never_by_order(tmp_path: Path) -> None:
    """One name in two sections of two checkpoints: the ranks ask in different orders, or for different ones."""
    shape = (600, 700)
    for number, path in enumerate(("a", "b")):
        checkpoint.save(
            {"w": torch.full(shape, 1.0 + number)}, tmp_path / path, optimizer={"w": torch.full(shape, 3.0 + number)}
        )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    opened = [checkpoint.read(tmp_path / path) for path in ("a", "b")]
    for stored in opened:
        stored.share_reads = True
    sources = [opened[0]["w"], opened[1]["w"], opened[0].optimizer["w"], opened[1].optimizer["w"]]
    for placements in ([], [Replicate(), Shard(0)], [Shard(0), Replicate()]):
        targets: list[Any] = [torch.zeros(shape) for _ in sources]
        if placements:
            targets = [distribute_tensor(target, mesh, placements, src_data_rank=None) for target in targets]
        pairs = list(zip(sources, targets))
        random.Random(dist.get_rank()).shuffle(pairs)
        with reads() as counted:
            checkpoint.load_together(lambda pairs=pairs: pairs)
        for number, target in enumerate(targets):
            local = target.to_local() if placements else target
            assert torch.equal(local, torch.full_like(local, 1.0 + number))
        assert sum(counted) < 0.6 * sum(tensor.to_local().nbytes if placements else tensor.nbytes for tensor in targets)
    own = torch.zeros(shape)
    checkpoint.load_together(lambda: [(sources[dist.get_rank()], own)])
    assert torch.equal(own, torch.full(shape, 1.0 + dist.get_rank()))


@pytest.mark.long
@ranks(2)
def test_many_small_tensors_are_passed_on_together(tmp_path: Path) -> None:
    state = {str(i): torch.full((i % 7, 33), i % 50, dtype=KINDS[i % len(KINDS)]) for i in range(3000)}
    checkpoint.save({**state, "large": full_state()["large"]}, tmp_path / "c")
    into = emptied({**state, "large": full_state()["large"]})
    with mock.patch.object(dist, "broadcast", side_effect=dist.broadcast) as broadcast:
        checkpoint.load(tmp_path / "c", into, share_reads=True)
    assert same(into, {**state, "large": full_state()["large"]})
    assert broadcast.call_count <= 8


@ranks(4)
def test_a_part_of_the_ranks_loads_without_the_others(tmp_path: Path) -> None:
    full = full_state()
    checkpoint.save(full, tmp_path / "c")
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        into = emptied(full)
        read = load_and_count(tmp_path / "c", into, share_reads=True, group=group)
        assert same(into, full)
        assert read < 0.8 * sum(tensor.nbytes for tensor in full.values())
    dist.barrier()


@ranks(4)
def test_what_one_replica_cannot_read_fails_on_all_and_nobody_waits(tmp_path: Path) -> None:
    checkpoint.save(laid_out("hsdp"), tmp_path / "c")
    if dist.get_rank() == 0:
        file = max((tmp_path / "c" / "model").iterdir())
        flip(file, file.stat().st_size // 2)
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match="differ from their digest"):
        checkpoint.load(tmp_path / "c", emptied(laid_out("hsdp")), share_reads=True)


@ranks(2)
def test_the_local_disk_is_read_by_each_and_what_is_reached_through_a_network_by_one(tmp_path: Path) -> None:
    full = full_state()
    total = sum(tensor.nbytes for tensor in full.values())
    checkpoint.save(full, tmp_path / "c")
    assert load_and_count(tmp_path / "c", emptied(full)) == total
    with mock.patch.object(LocalStore, "is_remote", True):
        assert load_and_count(tmp_path / "c", emptied(full)) < 0.6 * total
