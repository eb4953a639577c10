"""Make layers that a tensor-parallel plan splits whole for a while, in place; their code is as it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.parallel.fsdp.watched_parameters import others_in_place
from lightning_shard.parallel.tensor.local_modules import computing_with
from lightning_shard.sharding import full_tensor, parameter_like

Forward = Callable[..., Any]
Layers = Mapping[str, tuple[nn.Module, Forward | None]]
"""Split layers by name, each with the forward that it had as an attribute before it was split."""


def whole_parameters(layers: Layers) -> dict[int, nn.Parameter]:
    """By the ids of split ones, since tied ones are one. Collective over the tensor ranks."""
    found = {id(p): p for layer, _ in layers.values() for p in layer.parameters() if isinstance(p, DTensor)}
    return {number: parameter_like(full_tensor(p), p) for number, p in found.items()}


@contextmanager
def with_whole_layers(layers: Layers, parameters: Mapping[int, Tensor]) -> Iterator[None]:
    """Inside, split layers have their whole parameters and original forwards, and no hooks."""
    with others_in_place(), ExitStack() as inside:
        for layer, forward in layers.values():
            inside.enter_context(exchanged_forward(layer, forward))
            inside.enter_context(computing_with(layer.modules(), lambda p: parameters.get(id(p), p)))
        yield


@contextmanager
def exchanged_forward(module: nn.Module, forward: Forward | None) -> Iterator[None]:
    """Inside, a module has no forward hooks, and another forward; ``None`` stands for that of its class."""
    own: dict[str, Any] = vars(module)
    before: dict[str, Any] = {
        name: own[name] for name in ("_forward_hooks", "_forward_pre_hooks", "forward") if name in own
    }
    own.update(_forward_hooks=type(own["_forward_hooks"])(), _forward_pre_hooks=type(own["_forward_pre_hooks"])())
    own.pop("forward", None)
    if forward is not None:
        own["forward"] = forward
    try:
        yield
    finally:
        own.pop("forward", None)
        own.update(before)
