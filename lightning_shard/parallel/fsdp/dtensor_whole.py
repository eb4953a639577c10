"""Handlers of operations that DTensors (torch 2.11 to 2.14) can't run on parts, or run wrongly.

*Full tensors*: collective over the tensors' ranks. Every rank computes the full result, needs the memory for it, and
keeps its part.

*Random numbers*, as one process would draw them for the full tensor. torch coordinates generators over ranks on
accelerators only. On the CPU each rank fills its part from its own generator, and between steps these have the same
state on all ranks: ``nn.init.normal_(p)`` would give all shards the same values, ``torch.bernoulli(p)`` the same mask.
Operations that draw by values gather these.

*Lists* (``torch._foreach_lerp_``) that hold sharded parameters and plain buffers, as averages of a whole
``state_dict()`` do (timm's ``ModelEmaV3``), are refused by DTensors. Here the DTensors are changed together, and then
the plain tensors, if the other lists have the same kinds at the same places. ``torch._foreach_copy_`` is ``copy_`` of
each.

Private: the handlers of ``DTensor._op_dispatcher``, which are looked up in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_shard.sharding import full_tensor, part_on

Handler = Callable[..., Any]
_FILLING = ["normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"]
_MAKING = ["rand_like", "randn_like", "randint_like"]
_DRAWING_BY_VALUES = [
    *("bernoulli", "binomial", "multinomial", "normal", "poisson", "_sample_dirichlet", "_standard_gamma"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"),
]
_WRITING_ELSEWHERE = [
    *("index_add_", "index_copy_", "index_fill_", "index_put_", "index_reduce_", "put_"),
    *("scatter_", "scatter_add_", "scatter_reduce_", "masked_scatter_"),
    *("triu_", "tril_", "cumsum_", "cumprod_", "renorm_"),
]
"""In-place operations that write by places in the full tensor, or by more of it than a part."""
_OF_LISTS = ["lerp", "add", "sub", "mul", "div", "addcmul", "addcdiv", "zero"]
_MIXED = "mixed torch.Tensor and DTensor"


def add_handlers(known: dict[Any, Handler]) -> None:
    """Add them to those that ``DTensor._op_dispatcher`` has."""
    groups = ((_FILLING, _fill), (_MAKING, _make), (_DRAWING_BY_VALUES, on_full_tensors))
    for names, handler in (*groups, (_WRITING_ELSEWHERE, on_full_tensors)):
        for packet in (getattr(torch.ops.aten, name) for name in names):
            for overload in packet.overloads():
                known[getattr(packet, overload)] = on_full_tensors if "out" in overload else handler

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = known.pop(operation, None)  # torch handles the calls below
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or not _agree(args):
                raise
            for sharded in (True, False):
                places = [place for place, each in enumerate(args[0]) if isinstance(each, DTensor) is sharded]
                operation(*(_at(places, each) for each in args), **kwargs)
            return None
        finally:
            known[operation] = own or handle

    for packet in (getattr(torch.ops.aten, f"_foreach_{name}_") for name in _OF_LISTS):
        known.update({getattr(packet, overload): handle for overload in packet.overloads()})
    known[torch.ops.aten._foreach_copy_.default] = _copy


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


def _fill(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    return target.copy_(operation(_whole(target), *map(full, args[1:]), **kwargs))


def _make(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return cut(operation(_whole(args[0]), *map(full, args[1:]), **kwargs), args[0])


def _whole(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _copy(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, value in zip(args[0], args[1], strict=True):
        target.copy_(value, *args[2:], **kwargs)


def _agree(args: Sequence[Any]) -> bool:
    """Whether all lists of tensors have DTensors at the same places."""
    lists = [each for each in args if isinstance(each, (list, tuple)) and any(isinstance(t, Tensor) for t in each)]
    return len({tuple(isinstance(tensor, DTensor) for tensor in tensors) for tensors in lists}) == 1


def _at(places: Sequence[int], argument: Any) -> Any:
    return [argument[place] for place in places] if isinstance(argument, (list, tuple)) else argument
