"""What ranks say of a tensor to compare it: few numbers, that differ where it does."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_shard.sharding import local_tensor

_MOST = 1 << 20
"""So many elements of a tensor are looked at."""

Outline = tuple[tuple[int, ...], float, float]
"""Shape, norm, and sum with weights, since attention's weights all have one sum."""


@torch.no_grad()
def outline(tensor: Tensor) -> Outline:
    """Of this rank's part; the device is waited for."""
    values = local_tensor(tensor).detach().to_dense()
    values = (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
    values = values[:: 1 + len(values) // _MOST].double()
    weights = torch.arange(len(values), dtype=torch.float64, device=values.device).cos()
    return tuple(tensor.shape), float(torch.linalg.vector_norm(values)), float(values @ weights)


def are_alike(one: Outline, other: Outline, rounding: float, least: float = 0.0) -> bool:
    """As far as sums in another order allow.

    Args:
        rounding: As a part of the norm, or of ``least`` where that is more.
    """
    (shape, norm, total), (other_shape, other_norm, other_total) = one, other
    apart = max(abs(norm - other_norm), abs(total - other_total))
    return shape == other_shape and not apart > rounding * max(norm, other_norm, least)
