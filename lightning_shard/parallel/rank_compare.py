"""The one comparison between ranks: named values are fingerprinted, exchanged once over a group, compared by name.

A user of it says which values ranks must share, how closely, and what it means if they don't.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.dense import dense_parts
from lightning_shard.sharding import local_tensor

_PIECE = 1 << 20
"""How many elements are widened at a time."""

Fingerprint = tuple[tuple[int, ...], float, float]
"""Shape, norm, and a weighted sum: the plain sum of attention weights is always the same."""
NOTHING: Fingerprint = ((), 0.0, 0.0)
Key = TypeVar("Key")


def fingerprints(named: Mapping[Key, Tensor]) -> dict[Key, Fingerprint]:
    """The fingerprints of this rank's parts of tensors. Waits for the device once."""
    numbers = [numbers_of(tensor) for tensor in named.values()]
    rows = torch.stack([each.to(numbers[0].device) for each in numbers]).tolist() if numbers else []
    return {key: (tuple(tensor.shape), *row) for (key, tensor), row in zip(named.items(), rows)}


def fingerprint(tensor: Tensor) -> Fingerprint:
    return fingerprints({0: tensor})[0]


@torch.no_grad()
def numbers_of(tensor: Tensor) -> Tensor:
    """Norm and weighted sum of this rank's part, ``[2]`` in float64, on its device."""
    total = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for part in dense_parts(local_tensor(tensor)):
        values = torch.view_as_real(part) if part.is_complex() else part
        weights = _weights(part.device)
        for piece in values.reshape(-1).split(_PIECE):
            wide = piece.double()
            total += torch.stack([wide @ wide, wide @ weights[: len(wide)]])
    return torch.stack([total[0].sqrt(), total[1]])


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    return torch.arange(_PIECE, dtype=torch.float64, device=device).cos()


def exchanged(own: Mapping[str, Mapping[str, Any]], group: Any) -> dict[str, dict[str, list[Any]]]:
    """All ranks' values, by topic and name, in the order of the ranks that have them; a collective call over the group.

    Args:
        own: This rank's, by topic and name. All ranks have the same topics.
    """
    everyone: list[Any] = [own]
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, own, group=group)
    return {topic: by_name(rank[topic] for rank in everyone) for topic in own}


def by_name(ranks: Iterable[Mapping[Key, Any]]) -> dict[Key, list[Any]]:
    """The ranks' values by name, in the order of the ranks that have them."""
    found: dict[Key, list[Any]] = {}
    for rank in ranks:
        for name, value in rank.items():
            found.setdefault(name, []).append(value)
    return found


def differing(
    found: Mapping[str, Sequence[Fingerprint]], rounding: float, *, least: float = 0.0, noise: float = 0.0
) -> list[str]:
    """The names whose fingerprints differ by more than sums that are taken in different orders do.

    Args:
        found: What the ranks have.
        rounding: The difference allowed, relative to the largest norm under that name, or to ``least`` if that is
            larger. What is infinite or NaN on all ranks counts as equal.
        noise: A further difference that is allowed, relative to the largest norm of all.
    """
    norms = {name: max((n for _, n, _ in ranks if math.isfinite(n)), default=0.0) for name, ranks in found.items()}
    noise *= max(norms.values(), default=0.0)
    return [name for name, ranks in found.items() if _apart(ranks, rounding * max(least, norms[name]) + noise)]


def _apart(ranks: Sequence[Fingerprint], allowed: float) -> bool:
    shapes, *numbers = zip(*ranks)
    return len({*shapes}) > 1 or any(_spread(values) > allowed for values in numbers)


def _spread(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.inf if 0 < len(finite) < len(values) else max(finite, default=0.0) - min(finite, default=0.0)


def first_of(names: Sequence[str]) -> str:
    return f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
