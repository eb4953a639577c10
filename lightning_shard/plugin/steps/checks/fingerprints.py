"""Fingerprints of tensors, by which ranks compare them: a few numbers that differ where the tensors do."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_shard.sharding import local_tensor

_MOST = 1 << 20
"""The most elements of a tensor that are used, evenly spaced."""

Outline = tuple[tuple[int, ...], float, float]
"""Shape, norm, and a weighted sum: the plain sum of attention weights is always the same."""


@torch.no_grad()
def outline(tensor: Tensor) -> Outline:
    """The outline of this rank's part; waits for the device."""
    values = local_tensor(tensor).detach().to_dense()
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    values = values[:: 1 + len(values) // _MOST].double()
    weights = torch.arange(len(values), dtype=torch.float64, device=values.device).cos()
    return tuple(tensor.shape), float(torch.linalg.vector_norm(values)), float(values @ weights)


def are_alike(one: Outline, other: Outline, rounding: float, least: float = 0.0) -> bool:
    """Whether two outlines are equal, but for the rounding of sums taken in different orders.

    Args:
        rounding: Relative to the larger norm, or to ``least`` if that is larger. What is infinite or NaN in both
            outlines counts as equal.
    """
    (shape, *numbers), (other_shape, *others) = one, other
    if shape != other_shape or [*map(math.isfinite, numbers)] != [*map(math.isfinite, others)]:
        return False
    known = [(a, b) for a, b in zip(numbers, others) if math.isfinite(a)]
    allowed = rounding * max([least, numbers[0], others[0]] if math.isfinite(numbers[0]) else [least])
    return all(abs(a - b) <= allowed for a, b in known)
