"""The same tensors on four ranks in several layouts, of uneven sizes and several dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

KINDS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "uneven": ((37, 8), torch.float32),
    "wide": ((3, 5, 7), torch.bfloat16),
    "tall": ((700, 300), torch.float32),
    "flags": ((11, 3), torch.bool),
    "short": ((2, 4), torch.int64),
    "plain": ((9,), torch.float64),
    "scale": ((), torch.float32),
    "none": ((0, 4), torch.float32),
}
LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "shards": ((4,), {name: [Shard(0)] for name in ("uneven", "wide", "tall", "flags", "short", "none")}),
    "hsdp": ((2, 2), {name: [Replicate(), Shard(0)] for name in ("uneven", "wide", "tall", "flags")}),
    "two axes": (
        (2, 2),
        {
            "uneven": [Shard(0), Shard(1)],
            "wide": [Shard(2), Shard(1)],
            "tall": [Shard(1), Replicate()],
            "short": [Shard(0), Shard(0)],
        },
    ),
    "replicated": ((4,), {name: [Replicate()] for name in KINDS}),
    "one axis of two": (
        (2, 2),
        {"tall": ("a", [Shard(0)]), "uneven": ("b", [Shard(0)]), "plain": ("a", [Replicate()])},
    ),
}
"""A mesh, and the placements of those that are DTensors, which may be over one axis of it."""


def full_state(fill: float | None = None) -> dict[str, Tensor]:
    """The same tensors on every rank and in every process; with ``fill``, other values."""
    state = {}
    for index, (name, (shape, dtype)) in enumerate(KINDS.items()):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(index)) * 100
        values = values > 0 if dtype is torch.bool else values
        state[name] = torch.full(shape, fill, dtype=dtype) if fill is not None else values.to(dtype)
    return state


def laid_out(layout: str, fill: float | None = None) -> tuple[dict[str, Tensor], DeviceMesh]:
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    state = full_state(fill)
    for name, where in placements.items():
        axes, each = (mesh[where[0]], where[1]) if isinstance(where, tuple) else (mesh, where)
        state[name] = distribute_tensor(state[name], axes, each, src_data_rank=None)
    return state, mesh


def assert_same(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Byte for byte, however they are laid out."""
    assert set(state) == set(expected)
    for name, tensor in expected.items():
        assert _raw(state[name]) == _raw(tensor), name


def _raw(tensor: Tensor) -> bytes:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return bytes(whole.contiguous().reshape(-1).view(torch.uint8).numpy())
