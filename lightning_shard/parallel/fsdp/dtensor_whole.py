"""Run operations of DTensors on full tensors; each rank keeps its part. For those that torch can't run on parts.

Collective over the tensors' ranks. Every rank computes the full result and needs the memory for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_shard.sharding import full_tensor, part_on


def on_full_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A handler for ``DTensor._op_dispatcher``: ``operation`` of the full tensors.

    Returns:
        DTensors. A result is placed as the first argument of its shape; if there is none, each rank holds all of it.
        What the operation changes in place is returned itself.
    """
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    wholes = {name: full(value) for name, value in given.items()}
    result = operation(*[wholes[name] for name in names[: len(args)]], **{name: wholes[name] for name in kwargs})
    written = {each.name for each in operation._schema.arguments if each.alias_info and each.alias_info.is_write}
    changed = [name for name in given if name in written]
    for name in changed:
        if isinstance(given[name], DTensor):
            given[name].copy_(wholes[name])

    def place(whole: Tensor) -> Tensor:
        itself = [given[name] for name in changed if wholes[name] is whole]
        return itself[0] if itself else _placed(whole, _sharded([*given.values()]))

    return tuple(map(place, result)) if isinstance(result, tuple) else place(result)


def full(value: Any) -> Any:
    """``value`` with full tensors in the place of DTensors, also within lists and tuples; numbers as they are."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(full, value))
    return full_tensor(value) if isinstance(value, Tensor) else value


def cut(whole: Tensor, like: DTensor) -> DTensor:
    """This rank's part of a full tensor, placed as ``like`` is. Partial sums become replicas."""
    placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    own = part_on(whole, like.device_mesh, placements).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(own, like.device_mesh, placements, shape=whole.shape, stride=whole.stride())


def _placed(whole: Tensor, given: Sequence[DTensor]) -> DTensor:
    alike = [each for each in given if each.shape == whole.shape]
    if alike:
        return cut(whole, alike[0])
    mesh = given[0].device_mesh
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _sharded(value: Any) -> list[DTensor]:
    if isinstance(value, (tuple, list)):
        return [leaf for each in value for leaf in _sharded(each)]
    return [value] if isinstance(value, DTensor) else []
