"""Fill DTensors with the random numbers that one process would draw for the full tensor; each rank keeps its part.

torch (2.11 to 2.13) coordinates generators over ranks on accelerators only. On the CPU each rank fills its part from
its own generator, and between steps these have the same state on all ranks. So ``nn.init.normal_(p)`` would give all
shards the same values, and ``torch.randn_like(p)`` the same noise. Here every rank draws for the full tensor, and needs
the memory for it.

Private: the handlers of ``DTensor._op_dispatcher``, which :func:`handlers` extends.
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
    """A handler for each operation that draws random numbers."""
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
