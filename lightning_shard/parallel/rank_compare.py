"""The one comparison between ranks: named values are exchanged once over a group, and compared by name.

Tensors are told apart by digests where they must be equal in every bit, and by fingerprints where sums that are taken
in different orders may differ; other values are compared as they are. Its users: ``docs/decisions/comparison.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from lightning_shard import tree
from lightning_shard.dense import dense_parts
from lightning_shard.sharding import local_tensor

_PIECE = 1 << 20
"""How many elements are widened at a time."""

Fingerprint = tuple[tuple[int, ...], float, float]
"""Shape, norm, and a weighted sum: the plain sum of attention weights is always the same."""
NOTHING: Fingerprint = ((), 0.0, 0.0)
Key = TypeVar("Key")
ByRank = dict[Key, dict[int, Any]]
"""What ranks have, by name and by rank of the group."""


def fingerprints(named: Mapping[Key, Tensor]) -> dict[Key, Fingerprint]:
    """The fingerprints of this rank's parts of tensors. Waits for the device once."""
    numbers = [numbers_of(tensor) for tensor in named.values()]
    rows = torch.stack([each.to(numbers[0].device) for each in numbers]).tolist() if numbers else []
    return {key: (tuple(tensor.shape), *row) for (key, tensor), row in zip(named.items(), rows)}


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


def digest_of(values: Any) -> str:
    """A digest of a tree's tensors, texts and numbers: their bits, and their paths."""
    digest = xxhash.xxh3_128()
    for path, leaf in tree.walk(values):
        digest.update("/".join(path).encode())
        if isinstance(leaf, Tensor):
            for part in dense_parts(leaf.detach()):
                plain = part.resolve_conj().resolve_neg().cpu().contiguous()
                digest.update(tree.as_bytes(plain).numpy().data)
        elif isinstance(leaf, (str, int, float)):
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def everyones(own: Any, group: Any = None) -> list[Any]:
    """All ranks' values, in their order; a collective call over the group."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [own]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, own, group=group)
    return values


def exchanged(group: Any, *own: Mapping[Key, Any]) -> list[ByRank[Key]]:
    """All ranks' values, each mapping's by name; one collective call over the group for all of them."""
    return [by_name(ranks) for ranks in zip(*everyones(own, group))]


def by_name(ranks: Iterable[Mapping[Key, Any]]) -> ByRank[Key]:
    """The ranks' values by name, each by its rank, in the order of the ranks that have it."""
    found: ByRank[Key] = {}
    for rank, named in enumerate(ranks):
        for name, value in named.items():
            found.setdefault(name, {})[rank] = value
    return found


def unequal(found: ByRank[Key]) -> dict[Key, dict[Any, list[int]]]:
    """The names whose values aren't the same, and for each of the values its ranks."""
    parted: dict[Key, dict[Any, list[int]]] = {}
    for name, ranks in found.items():
        for rank, value in ranks.items():
            parted.setdefault(name, {}).setdefault(value, []).append(rank)
    return {name: held for name, held in parted.items() if len(held) > 1}


def differing(found: ByRank[str], rounding: float, *, least: float = 0.0, noise: float = 0.0) -> list[str]:
    """The names whose fingerprints differ by more than sums that are taken in different orders do.

    Args:
        found: The ranks' fingerprints.
        rounding: The difference allowed, relative to the largest norm under that name, or to ``least`` if that is
            larger. What is infinite or NaN on all ranks counts as equal.
        noise: A further difference that is allowed, relative to the largest norm of all.
    """
    held = {name: [*ranks.values()] for name, ranks in found.items()}
    norms = {name: max((n for _, n, _ in ranks if math.isfinite(n)), default=0.0) for name, ranks in held.items()}
    noise *= max(norms.values(), default=0.0)
    return [name for name, ranks in held.items() if _apart(ranks, rounding * max(least, norms[name]) + noise)]


def _apart(ranks: Sequence[Fingerprint], allowed: float) -> bool:
    shapes, *numbers = zip(*ranks)
    return len({*shapes}) > 1 or any(_spread(values) > allowed for values in numbers)


def _spread(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.inf if 0 < len(finite) < len(values) else max(finite, default=0.0) - min(finite, default=0.0)
