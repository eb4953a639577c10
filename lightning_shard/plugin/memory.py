"""What a step changes beside gradients, put back as it was, so that the step can run anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.pipeline.taint import Hollow


def remember(root: nn.Module) -> Callable[[], None]:
    """Note every module's attributes, and what its buffers, other tensors and containers hold.

    Parameters are left out: a forward doesn't change them.

    Returns:
        What puts all of it back, any number of times.
    """
    parts = [(part, dict(vars(part)), dict(part._buffers)) for part in root.modules()]
    tensors: dict[int, tuple[Tensor, Tensor]] = {}
    containers: dict[int, tuple[Any, Any]] = {}
    for _, attributes, buffers in parts:
        for key, value in (*attributes.items(), *buffers.items()):
            if isinstance(value, Tensor) and not isinstance(value, Hollow):
                tensors.setdefault(id(value), (value, value.detach().clone()))
            elif type(value) in (list, dict, set) and not key.startswith("_"):
                containers.setdefault(id(value), (value, value.copy()))

    @torch.no_grad()
    def put_back() -> None:
        for part, attributes, buffers in parts:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for tensor, copy in tensors.values():
            tensor.__class__ = type(copy)  # it may have become unknown
            tensor.copy_(copy)
        for container, copy in containers.values():
            container.clear()
            container.extend(copy) if isinstance(container, list) else container.update(copy)

    return put_back
