"""Random numbers in DTensors: those of the whole tensor on one process, of which each rank keeps its part.

torch (2.11 to 2.13) has generators over ranks for accelerators only. On the CPU each rank filled its part by its own
generator, which between steps stands at the same place on all of them: ``nn.init.normal_(p)`` gave all shards the same
values, and ``torch.randn_like(p)`` the same noise. Here every rank draws for the whole tensor, which takes its memory.

Private: the handlers of ``DTensor._op_dispatcher``, to which these are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_shard.sharding import full_tensor, part_on

_FILLING = ["normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"]
_MAKING = ["rand_like", "randn_like", "randint_like"]


def handlers() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """What to do for each operation that draws."""
    for names, draw in ((_FILLING, _fill), (_MAKING, _make)):
        for packet in (getattr(torch.ops.aten, name) for name in names):
            yield from ((getattr(packet, overload), draw) for overload in packet.overloads() if "out" not in overload)


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    others = [full_tensor(value) if isinstance(value, Tensor) else value for value in args[1:]]
    return target.copy_(operation(_whole(target), *others, **kwargs))


def _make(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    like = args[0]
    whole = operation(_whole(like), *args[1:], **kwargs)
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    own = part_on(whole, like.device_mesh, placements).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(own, like.device_mesh, placements, shape=whole.shape, stride=whole.stride())


def _whole(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
