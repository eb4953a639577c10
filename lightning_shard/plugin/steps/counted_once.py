"""Finds a weight that several stages hold among the tensors of a total norm, so that it counts on one stage only.

Gradients and weights themselves are known by identity. Hooks also pass copies of them (in 32 bits, divided by a loss
scale), which are known by their values or their places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.parallel.clip import is_counted_elsewhere
from lightning_shard.sharding import full_tensor, local_tensor

_PIECE = 1 << 20
"""Elements that are in 64 bits at a time."""
_ROUNDING = 1e-3
"""Of a cosine; that of a copy rounded to 16 bits is about 1e-5 less than 1."""


def counted_once(
    given: Sequence[Tensor], named: Mapping[str, Tensor], stage_mesh: DeviceMesh, device: torch.device
) -> list[Tensor]:
    """Leave out what is of parameters that other stages count. Collective over the stage's ranks.

    A given tensor is of such a parameter if it is a multiple of its gradient or of its values, up to rounding.
    Otherwise, if as many tensors are given as this stage has parameters, or gradients, of the same shapes or each a
    number, their order is taken to be the same.

    Args:
        named: This stage's parameters, by name.
        device: Where ``stage_mesh`` reduces.

    Raises:
        StepError: For a tensor, neither tells.
    """
    elsewhere = {name: p for name, p in named.items() if is_counted_elsewhere(p)}
    counted = _without(given, [tensor for p in elsewhere.values() for tensor in _of(p)])
    sought = {name: p for name, p in elsewhere.items() if not any(t is own for t in given for own in _of(p))}
    copies = _without(counted, [tensor for p in named.values() for tensor in _of(p)])
    if not sought or not copies:
        return counted
    values = _Values(stage_mesh, device)
    for name, p in list(sought.items()):
        alike = [tensor for tensor in copies if values.is_made_of(tensor, p)]
        if len(alike) == 1:
            counted, copies = _without(counted, alike), _without(copies, alike)
            del sought[name]
    places = _in_order(given, list(named.values())) if sought else None
    if places is not None:
        return _without(counted, [tensor for tensor, p in zip(given, places) if is_counted_elsewhere(p)])
    others = [p for name, p in named.items() if name not in elsewhere]
    for tensor in copies:
        name = next((name for name, p in sought.items() if _may_be(tensor, p, others, values)), "")
        if name:
            raise StepError(
                f"A total norm is given a tensor of shape {tuple(tensor.shape)} that is no parameter's gradient. It may"
                f" be computed from that of {name}, which another stage holds too, and counts: pass the gradients"
                " themselves, get_total_norm([p.grad for p in …]), and scale the norm."
            )
    return counted


def _of(parameter: Tensor) -> list[Tensor]:
    return [parameter] if parameter.grad is None else [parameter, parameter.grad]


def _without(tensors: Iterable[Tensor], left_out: Iterable[Tensor]) -> list[Tensor]:
    gone = {id(tensor) for tensor in left_out}
    return [tensor for tensor in tensors if id(tensor) not in gone]


def _in_order(given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The parameter that each tensor is of, by its place; ``None``: not known."""
    with_gradients = [p for p in parameters if p.grad is not None]
    for alike in (with_gradients, [p for p in parameters if p.requires_grad], list(parameters)):
        shapes = [tensor.shape for tensor in given]
        if len(alike) == len(given) and (shapes == [p.shape for p in alike] or not any(shapes)):
            return alike
    return None


def _may_be(tensor: Tensor, sought: Tensor, others: Sequence[Tensor], values: _Values) -> bool:
    """Whether a tensor may be computed from a parameter, and not only from others, and matters to a norm."""
    if values.is_zero_or_infinite(tensor):
        return False
    if values.is_made_of(tensor, sought):
        return True
    alike = [p for p in others if p.shape == tensor.shape]
    if tensor.shape != sought.shape and alike:
        return False
    return not any(values.is_made_of(tensor, p) for p in alike)


class _Values:
    """Compares tensors by the values of all ranks of a stage, on each of them with the same result."""

    def __init__(self, stage_mesh: DeviceMesh, device: torch.device) -> None:
        self._mesh = stage_mesh
        self._device = device

    def is_made_of(self, tensor: Tensor, parameter: Tensor) -> bool:
        """Whether a tensor is a multiple, neither zero nor infinite, of a parameter's gradient or values."""
        return any(self._are_multiples(tensor, own) for own in _of(parameter))

    def is_zero_or_infinite(self, tensor: Tensor) -> bool:
        square = self._products(local_tensor(tensor), local_tensor(tensor))[0]
        return not 0 < square < math.inf

    def _are_multiples(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or one.is_complex() != other.is_complex():
            return False
        square, product, square_of_other = self._products(*_comparable(one, other))
        lengths = math.sqrt(square) * math.sqrt(square_of_other)
        return 0 < lengths < math.inf and abs(product) >= (1 - _ROUNDING) * lengths

    def _products(self, one: Tensor, other: Tensor) -> list[float]:
        """``one · one``, ``one · other`` and ``other · other``; as many times as each part is held by several ranks."""
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        for piece, piece_of_other in zip(_flat(one).split(_PIECE), _flat(other).split(_PIECE)):
            a, b = piece.to(self._device).double(), piece_of_other.to(self._device).double()
            total += torch.stack([a @ a, a @ b, b @ b])
        for axis in range(self._mesh.ndim):
            dist.all_reduce(total, group=self._mesh.get_group(axis))
        return total.tolist()  # type: ignore[no-any-return]


def _flat(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _comparable(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of two tensors at the same places of them."""

    def layout(tensor: Tensor) -> Any:
        return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None

    if layout(one) == layout(other):
        return local_tensor(one), local_tensor(other)
    return full_tensor(one), full_tensor(other)
