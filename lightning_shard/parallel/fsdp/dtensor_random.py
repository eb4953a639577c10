"""Fill DTensors with the random numbers that one process would draw for the full tensor; each rank keeps its part.

torch (2.11 to 2.14) coordinates generators over ranks on accelerators only. On the CPU each rank fills its part from
its own generator, and between steps these have the same state on all ranks. So ``nn.init.normal_(p)`` would give all
shards the same values, ``torch.randn_like(p)`` the same noise, and ``torch.bernoulli(p)`` the same mask. Here every
rank draws for the full tensor, and needs the memory for it. Operations that draw by values, such as
``torch.bernoulli``, gather these: a collective call.

Private: the handlers of ``DTensor._op_dispatcher``, which :func:`handlers` extends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.parallel.fsdp.dtensor_whole import cut, full, on_full_tensors

_FILLING = ["normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"]
_MAKING = ["rand_like", "randn_like", "randint_like"]
_DRAWING_BY_VALUES = [
    *("bernoulli", "binomial", "multinomial", "normal", "poisson", "_sample_dirichlet", "_standard_gamma"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"),
]


def handlers() -> Iterator[tuple[Any, Callable[..., Any]]]:
    """A handler for each operation that draws random numbers."""
    for names, draw in ((_FILLING, _fill), (_MAKING, _make), (_DRAWING_BY_VALUES, on_full_tensors)):
        for packet in (getattr(torch.ops.aten, name) for name in names):
            for overload in packet.overloads():
                yield getattr(packet, overload), on_full_tensors if "out" in overload else draw


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    return target.copy_(operation(_whole(target), *map(full, args[1:]), **kwargs))


def _make(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cut(operation(_whole(args[0]), *map(full, args[1:]), **kwargs), args[0])


def _whole(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
