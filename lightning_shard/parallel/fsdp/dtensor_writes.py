"""Patch DTensor so that user code can read and write sharded parameters between steps as if they were plain tensors.

What torch's DTensors (2.11 to 2.14) do by themselves, and what they do here:

- ``p.data = values`` changes nothing, since the values are those of the local tensor inside; averaged weights that are
  swapped in would be lost silently. Here the parameter uses the memory of ``values``, as a plain tensor would.
- ``float(p.norm())``, ``p.sum().item()`` and ``bool((p > 0).all())`` return the local part's number, which differs
  between ranks. Here they return the full tensor's.
- ``p.copy_(values)`` and ``load_state_dict`` don't accept plain tensors. Here they do: ``values`` is the full tensor,
  equal on all ranks, and each rank copies its part. ``plain.copy_(p)`` copies the full tensor.
- ``p[:4] = 0`` and ``p.grad[mask] = 0`` fail. Here they write the full tensor's elements.
- ``p.index_fill_(0, rows, 0)``, ``scatter_`` and ``p.triu_()`` fail, and ``bias.index_add_`` leaves a placement that
  isn't its local part's. Here they change the full tensor.
- ``f"{p.norm():.4f}"``, ``p.norm().tolist()`` and ``.numpy()`` fail. Here they are the full tensor's. So are
  ``p.tolist()``, ``p.numpy()`` and ``np.asarray(p)`` where this rank holds all of ``p``; where several ranks hold parts
  they are refused, since loggers make arrays on one rank, and gathering takes all.
- ``p[:4].zero_()`` and ``p.grad[0].mul_(0.5)`` change nothing, since a slice across shards is a copy. Here they are
  refused.
- ``torch.stack([p.grad.norm() for p in module.parameters()])`` fails if some parameters are split over tensor ranks and
  others aren't, since these are on different meshes. So do other operations on both, and ``total += p.grad.norm()``.
  Here scalars are the full tensors', and an operation that joins both kinds, such as ``torch.cat``, gathers all of them
  at once and returns a plain tensor.
- ``(p > 0).any(0).sum()`` and ``p.norm(dim=0).sum()`` count a column once per rank, and ``nn.init.eye_(p)`` writes the
  full matrix to each rank's part. Here they use the full tensor; so do random numbers (``dtensor_whole.py``).
- ``average - p`` of a plain tensor and a parameter fails. Here it is computed (``dtensor_mixed.py``).
- ``torch._foreach_lerp_(averages, values, weight)`` of parameters and buffers fails (``dtensor_whole.py``).
- ``total += p.norm()`` with a plain ``total`` fails with a bare assertion once torch has cached how to add two sharded
  scalars. Here it is refused in that case.

All but the first, those of lists and the refused ones are collective over the parameter's ranks, unless both operands
have the same layout or a rank holds all values: every rank must make the call.

Private: ``DTensor._local_tensor``; the handlers of ``DTensor._op_dispatcher``; the dispatcher's
``_dispatch_fast_path_python_tail`` (since 2.13), which in-place operations pass through; and its
``_propagate_op_sharding_dispatch_slow_path`` (since 2.13), which plans an operation the first time that it occurs, or
returns its result. A failed plan isn't cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.data_writes import data_of, watch_data
from lightning_shard.parallel.fsdp.dtensor_whole import add_handlers, full
from lightning_shard.sharding import full_tensor, local_part, part_on

_SET: Any = torch.Tensor.__setitem__
_END = "_dispatch_fast_path_python_tail"
_PLAN = "_propagate_op_sharding_dispatch_slow_path"
_REDUCING = {
    torch.ops.aten.sum.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.linalg_vector_norm.default,
}
"""Operations that torch applies to each rank's partial norms or maxima as if these were the full tensor's."""


def behave_as_tensors() -> None:
    """Patch the class DTensor, and so all DTensors of this process, and what parameters give and are set to."""
    watch_data()
    sharded: Any = DTensor
    sharded.data = property(data_of, _assign)
    handlers = sharded._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number
    handlers[torch.ops.aten.copy_.default] = _copy
    handlers[torch.ops.aten.fill_.Tensor] = _copy
    handlers.update((getattr(torch.ops.aten.any, each), _any) for each in ("default", "dim", "dims"))
    handlers[torch.ops.aten._is_all_true.default] = _all
    add_handlers(handlers)
    sharded.__setitem__ = _set
    sharded.__format__, sharded.tolist, sharded.numpy = _format, _list, _array
    dispatcher = type(sharded._op_dispatcher)
    for name, wrap in ((_END, _refusing_lost_writes), (_PLAN, _over_meshes)):
        plain = getattr(dispatcher, name, None)
        if plain is not None and not hasattr(plain, "__wrapped__"):
            setattr(dispatcher, name, wrap(plain))


def _assign(tensor: Any, value: Any) -> None:
    if not isinstance(value, Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
        given = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise StepError(
            f"A sharded tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, was assigned other data ({given}): it"
            " can take values of its own shape and type only. Make it what it should be in __init__ or configure_model."
        )
    local = _part_of(value, tensor).to(tensor._local_tensor.device)
    if not local.is_contiguous() or local.untyped_storage().nbytes() != local.numel() * local.itemsize:
        local = local.clone(memory_format=torch.contiguous_format)  # all-gathers recognise memory by its first address
    tensor._local_tensor = local


def _number(_: Any, args: tuple[Any, ...], __: Any) -> Any:
    return full_tensor(args[0]).item()


def _copy(_: Any, args: tuple[Any, ...], __: Any) -> Any:
    target, value = args[:2]
    if isinstance(target, DTensor):
        _check_kept(target)
        held: Any = target
        held._local_tensor.copy_(_part_of(value, target))
    else:
        target.copy_(full_tensor(value))
    return target


def _any(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.all(args[0] == 0, *args[1:], **kwargs).logical_not()


def _all(_: Any, args: tuple[Any, ...], __: Any) -> Any:
    return torch.all(args[0])


def _format(tensor: Any, spec: str) -> str:
    return object.__format__(tensor, spec) if tensor.ndim else format(tensor.detach().item(), spec)


def _list(tensor: Any) -> Any:
    return _held(tensor, "tolist").detach().tolist()


def _array(tensor: Any, *, force: bool = False) -> Any:
    return _held(tensor, "numpy").numpy(force=force)


def _held(tensor: Any, asked: str) -> Tensor:
    """All values of a tensor, as a plain one; of scalars a collective call, as ``item()`` is.

    Raises:
        StepError: Other ranks hold a part of them.
    """
    if not tensor.ndim:
        return full_tensor(tensor)
    mesh = tensor.device_mesh
    if all(placement.is_replicate() or mesh.size(axis) == 1 for axis, placement in enumerate(tensor.placements)):
        return tensor.to_local()  # type: ignore[no-any-return]
    raise StepError(
        f"{asked}() needs all values of a sharded tensor of shape {tuple(tensor.shape)}, and this rank holds those of"
        f" shape {tuple(tensor._local_tensor.shape)}: call p.full_tensor().{asked}(), on all ranks and not on rank 0"
        " alone, which would wait for the others. So it is with what makes arrays, as np.asarray(p) and loggers'"
        " histograms do: give them what p.full_tensor() has returned."
    )


def _set(tensor: Any, index: Any, value: Any) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        _SET(tensor, index, value)  # raises for a leaf; else the write is part of a graph
        return
    _check_kept(tensor)
    whole = full_tensor(tensor).clone()
    whole[full(index)] = full(value)
    tensor._local_tensor.copy_(_part_of(whole, tensor))


def _refusing_lost_writes(ends: Any) -> Any:
    """Wrap the end of an in-place operation: refuse writes that would be lost, or would be of this rank's part."""

    @wraps(ends)
    def end(dispatcher: Any, operation: Any, args: Any, *rest: Any) -> Any:
        is_plain = isinstance(args[0], Tensor) and not isinstance(args[0], DTensor)
        if is_plain and _written(operation) == [0]:
            raise StepError(
                "A plain tensor is changed in place by a sharded one, as by total += p.norm() or values.add_(p), and"
                " here it would be by this rank's part of it: take the whole (total += float(p.norm()),"
                " values.add_(p.full_tensor())), or a new tensor (total = total + p.norm())."
            )
        if isinstance(args[0], DTensor) and args[0]._is_view() and operation._schema.is_mutable:
            _check_kept(args[0])
        return ends(dispatcher, operation, args, *rest)

    return end


def _over_meshes(plan: Any) -> Any:
    """Wrap the planning of operations: handle those that mix meshes, write to ``out=``, or reduce partial norms."""

    @wraps(plan)
    def planned(dispatcher: Any, operation: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        written = _written(operation)
        if written not in ([], [0]):
            out = kwargs.get("out")
            if isinstance(out, DTensor) and not _meshes(args):  # torch.eye(…, out=p) in nn.init
                return out.copy_(operation(*args, **{**kwargs, "out": full_tensor(out).clone()}))
            return plan(dispatcher, operation, args, kwargs, *rest)
        if operation in _REDUCING and any(map(_isnt_sum, args[0].placements)):
            return operation(_reduced(args[0]), *args[1:], **kwargs)
        writes = bool(written)
        if writes and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
            return operation(args[0], *_plain(args[1:]), **_plain(kwargs))
        if not writes and len(_meshes((args, kwargs), numbers=False)) > 1:  # torch 2.14 plans some of these
            return operation(*_plain(args), **_plain(kwargs))
        try:
            return plan(dispatcher, operation, args, kwargs, *rest)
        except RuntimeError:
            target, others = (args[:1], args[1:]) if writes else ((), args)
            has_numbers = any(isinstance(leaf, DTensor) and not leaf.ndim for leaf in _leaves((others, kwargs)))
            if len(_meshes((args, kwargs))) == 1 or (writes and not has_numbers):
                raise
            others, options = _plain((others, kwargs), only_numbers=True)
            return operation(*target, *others, **options)

    return planned


def _isnt_sum(placement: Placement) -> bool:
    return placement.is_partial() and not (placement.is_partial("sum") and type(placement) is Partial)


def _reduced(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Replicate() if each.is_partial() else each for each in tensor.placements])


def _written(operation: Any) -> list[int]:
    """The positions of the arguments that an operation changes in place."""
    arguments = enumerate(operation._schema.arguments)
    return [place for place, each in arguments if each.alias_info is not None and each.alias_info.is_write]


def _meshes(value: Any, *, numbers: bool = True) -> set[DeviceMesh]:
    """The meshes of the DTensors in ``value``; without ``numbers``, of those with dimensions."""
    return {leaf.device_mesh for leaf in _leaves(value) if isinstance(leaf, DTensor) and (numbers or leaf.ndim)}


def _plain(value: Any, *, only_numbers: bool = False) -> Any:
    """``value`` with full tensors in the place of DTensors. Collective over their meshes.

    Args:
        only_numbers: Replace DTensors without dimensions only; plain scalars can be used with DTensors of any mesh.
    """
    if isinstance(value, (tuple, list)):
        return type(value)(_plain(each, only_numbers=only_numbers) for each in value)
    if isinstance(value, dict):
        return {key: _plain(each, only_numbers=only_numbers) for key, each in value.items()}
    if not isinstance(value, DTensor) or (only_numbers and value.ndim):
        return value
    return full_tensor(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = [*value.values()]
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, (tuple, list)) else [value]


def _check_kept(target: Any) -> None:
    """
    Raises:
        StepError: ``target`` was made as a view, and writes to it don't reach its base.
    """
    base = target._base if target._is_view() else None
    if not isinstance(base, DTensor):
        return
    held: Any = base
    if held._local_tensor.untyped_storage().data_ptr() != target._local_tensor.untyped_storage().data_ptr():
        raise StepError(
            f"A part, of shape {tuple(target.shape)}, of a sharded tensor of shape {tuple(base.shape)} is changed in"
            " place. It is a copy, gathered from the ranks that hold it, so the change would be lost: assign to it"
            " (p.grad[:4] = values), or change the whole (values = p.full_tensor(); values[:4].mul_(0.5);"
            " p.copy_(values))."
        )


def _part_of(value: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``value`` in the layout of ``like``; its local tensor itself if it has that layout."""
    laid_out = like.shape, like.device_mesh, like.placements
    if isinstance(value, DTensor) and (value.shape, value.device_mesh, value.placements) == laid_out:
        given: Any = value
        return given._local_tensor.detach()  # type: ignore[no-any-return]
    whole = full_tensor(value).expand(like.shape)
    if not any(placement.is_partial() for placement in like.placements):
        return local_part(whole, like)
    kept = part_on(whole, like.device_mesh, [Replicate() if each.is_partial() else each for each in like.placements])
    coordinate: Sequence[int] = like.device_mesh.get_coordinate() or ()
    is_summed = any(place and each.is_partial("sum") for place, each in zip(coordinate, like.placements))
    return torch.zeros_like(kept) if is_summed else kept  # of a sum, the first rank has all
