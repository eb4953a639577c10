"""Patch DTensor so that user code can read and write sharded parameters between steps as if they were plain tensors.

What torch's DTensors (2.11 to 2.14) do by themselves is silently wrong, or fails. Here they are as the full tensor:

- *Assigned*: ``p.data = values`` uses the memory of ``values``, which torch ignores. ``p.copy_(values)`` and
  ``load_state_dict`` take a full tensor, equal on all ranks; ``p[:4] = 0``, ``p.index_fill_(…)``, ``p.triu_()`` and
  others write by places in it. A slice across shards is a copy: ``p[:4].zero_()`` is refused.
- *Read*: ``float(p.norm())``, ``bool((p > 0).all())``, ``(p > 0).any(0).sum()``, ``p.norm(dim=0).sum()`` and
  ``f"{p.norm():.4f}"`` are the full tensor's; torch's are this rank's, or count a column once per rank. So are
  ``p.tolist()``, ``p.numpy()`` and ``np.asarray(p)`` of scalars, and where this rank holds all of ``p``.
- *Drawn*: ``nn.init.normal_(p)`` and ``torch.bernoulli(p)`` draw for the full tensor, as one process does. torch gives
  all shards the same values, since it coordinates generators over ranks on accelerators only.
- *Combined*: parameters that are split over tensor ranks are on another mesh than others. Scalars of both are the full
  tensors', and an operation that joins both, such as ``torch.cat``, returns a plain tensor. Lists of sharded and plain
  tensors (``torch._foreach_lerp_`` in timm's ``ModelEmaV3``) are changed one kind after the other. A plain number that
  a sharded one would change in place (``total += p.norm()``) is refused.
- *Met by plain tensors* (``average - p``): a plain tensor is taken for a whole one, equal on all ranks, which is
  compared: twice for each tensor, since averages are the same tensors after each step. What is computed is sharded as
  the parameter is; a plain tensor that is changed in place (``average.add_(p)``) takes the whole parameter. In steps
  torch's refusal stays: there a plain tensor may be a rank's own part, such as features that a plan splits.

All but assignments to ``data``, lists and refusals are collective over the parameter's ranks, unless both operands have
the same layout or a rank holds all values. What is computed from full tensors needs the memory for them on every rank.

Private: ``DTensor._local_tensor``; ``DTensor.__torch_function__``, which torch disables, and does here while steps run:
its dispatcher, in C++, refuses plain tensors before it asks anything that could be patched; and what
``torch_private.py`` patches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.watched_parameters import data_of, watch_data
from lightning_shard.sharding import cut, full_tensor, part_on
from lightning_shard.torch_private import handlers_of_dtensors, patch_dtensors, replaced, written_by

Handler = Callable[..., Any]
_SET: Any = torch.Tensor.__setitem__
_REDUCING = {
    torch.ops.aten.sum.default,
    torch.ops.aten.sum.dim_IntList,
    torch.ops.aten.linalg_vector_norm.default,
}
"""Operations that torch applies to each rank's partial norms or maxima as if these were the full tensor's."""
_DRAWING = [
    *("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"),
    *("rand_like", "randn_like", "randint_like"),
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


def behave_as_tensors() -> None:
    """Patch the class DTensor, and so all DTensors of this process, and what parameters give and are set to."""
    watch_data()
    methods = {"__setitem__": _set, "__format__": _format, "tolist": _held(Tensor.tolist), "numpy": _held(Tensor.numpy)}
    patch_dtensors({"data": property(data_of, _assign), **methods}, _over_meshes, _refusing_lost_writes)
    _add_handlers(handlers_of_dtensors())


def _add_handlers(known: dict[Any, Handler]) -> None:
    """Add ours to those that ``DTensor._op_dispatcher`` has."""
    aten = torch.ops.aten
    known[aten._local_scalar_dense.default] = _number
    known[aten.copy_.default] = known[aten.fill_.Tensor] = _copy
    known.update((getattr(aten.any, each), _any) for each in ("default", "dim", "dims"))
    known[aten._is_all_true.default] = _all
    known[aten._foreach_copy_.default] = _copy_each
    for packet in (getattr(aten, name) for name in _DRAWING + _WRITING_ELSEWHERE):
        known.update({getattr(packet, overload): _on_full for overload in packet.overloads()})

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = known.pop(operation, None)  # torch handles the calls below
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            lists = [each for each in args if isinstance(each, (list, tuple)) and tree.tensors(each)]
            kinds = {tuple(isinstance(tensor, DTensor) for tensor in each) for each in lists}
            if _MIXED not in str(error) or len(kinds) != 1:  # not at the same places of all lists
                raise
            [sharded] = kinds
            for chosen in (sharded, [not each for each in sharded]):
                parts = ([*compress(each, chosen)] if isinstance(each, (list, tuple)) else each for each in args)
                operation(*parts, **kwargs)
            return None
        finally:
            known[operation] = own or handle

    for packet in (getattr(aten, f"_foreach_{name}_") for name in _OF_LISTS):
        known.update({getattr(packet, overload): handle for overload in packet.overloads()})


def _assign(tensor: Any, value: Any) -> None:
    if not isinstance(value, Tensor) or value.shape != tensor.shape or value.dtype != tensor.dtype:
        given = f"{tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else type(value).__name__
        raise StepError(
            f"A sharded tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, was assigned other data ({given}):"
            " it can take values of its own shape and type only. Make it what it should be in __init__.",
            breaks=9,
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


def _on_full(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A handler: ``operation`` of the full tensors.

    Returns:
        DTensors. A result is placed as the first argument of its shape; if there is none, each rank holds all of it.
        What the operation changes in place is returned itself.
    """
    names = [argument.name for argument in operation._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    wholes = full(given)
    result = operation(*[wholes[name] for name in names[: len(args)]], **{name: wholes[name] for name in kwargs})
    changed = [name for _, name in written_by(operation) if name in given]
    for target, whole in zip(*(tree.leaves([of[name] for name in changed], Tensor) for of in (given, wholes))):
        if isinstance(target, DTensor):
            target.copy_(whole)

    def place(whole: Any) -> Any:
        itself = [given[name] for name in changed if wholes[name] is whole]
        if itself or not isinstance(whole, Tensor):
            return itself[0] if itself else whole
        return _placed(whole, tree.leaves(given, DTensor))

    return tree.map_leaves(place, result)


def _placed(whole: Tensor, given: Sequence[DTensor]) -> DTensor:
    alike = [each for each in given if each.shape == whole.shape]
    mesh = given[0].device_mesh
    return cut(whole, mesh, _joined(alike[0])) if alike else DTensor.from_local(whole, mesh)


def _copy_each(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, value in zip(args[0], args[1], strict=True):
        target.copy_(value, *args[2:], **kwargs)


def _format(tensor: Any, spec: str) -> str:
    return object.__format__(tensor, spec) if tensor.ndim else format(tensor.detach().item(), spec)


def _held(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that gives values to Python, of those that this rank has; where others have parts torch refuses it."""

    @wraps(method)
    def of_held(tensor: Any, **options: Any) -> Any:
        axes = enumerate(tensor.placements)
        is_here = all(placement.is_replicate() or tensor.device_mesh.size(axis) == 1 for axis, placement in axes)
        return method(full_tensor(tensor) if is_here or not tensor.ndim else tensor, **options)

    return of_held


def _set(tensor: Any, index: Any, value: Any) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        _SET(tensor, index, value)  # raises for a leaf; else the write is part of a graph
        return
    _check_kept(tensor)
    with torch.no_grad():
        whole = full_tensor(tensor).clone()
        whole[full(index)] = full(value)
        tensor._local_tensor.copy_(_part_of(whole, tensor))


def _refusing_lost_writes(ends: Any) -> Any:
    """Wrap the end of an in-place operation: refuse writes that would be lost, or would be of this rank's part."""

    @wraps(ends)
    def end(dispatcher: Any, operation: Any, args: Any, *rest: Any) -> Any:
        written = [place for place, _ in written_by(operation)]
        if is_plain(args[0]) and written == [0]:
            raise StepError(
                "A plain tensor is changed in place by a sharded one, as by total += p.norm() or values.add_(p), and"
                " here it would be by this rank's part of it: take the whole (total += float(p.norm()),"
                " values.add_(p.full_tensor())), or a new tensor (total = total + p.norm()).",
                breaks=9,
            )
        if isinstance(args[0], DTensor) and args[0]._is_view() and written:
            _check_kept(args[0])
        return ends(dispatcher, operation, args, *rest)

    return end


def _over_meshes(plan: Any) -> Any:
    """Wrap the planning of operations: handle those that mix meshes, write to ``out=``, or reduce partial norms."""

    @wraps(plan)
    def planned(dispatcher: Any, operation: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        written = [place for place, _ in written_by(operation)]
        if written not in ([], [0]):
            out = kwargs.get("out")
            if isinstance(out, DTensor) and not _meshes(args):  # torch.eye(…, out=p) in nn.init
                return out.copy_(operation(*args, **{**kwargs, "out": full_tensor(out).clone()}))
            return plan(dispatcher, operation, args, kwargs, *rest)
        if operation in _REDUCING and any(map(_isnt_sum, args[0].placements)):
            return operation(reduced(args[0]), *args[1:], **kwargs)
        writes = bool(written)
        if writes and is_plain(args[0]):
            return operation(args[0], *full(args[1:]), **full(kwargs))
        if not writes and len(_meshes((args, kwargs), numbers=False)) > 1:  # torch 2.14 plans some of these
            return operation(*full(args), **full(kwargs))
        try:
            return plan(dispatcher, operation, args, kwargs, *rest)
        except RuntimeError:
            target, others = (args[:1], args[1:]) if writes else ((), args)
            has_numbers = any(not each.ndim for each in tree.leaves((others, kwargs), DTensor))
            if len(_meshes((args, kwargs))) == 1 or (writes and not has_numbers):
                raise
            others, options = full((others, kwargs), only_numbers=True)
            return operation(*target, *others, **options)

    return planned


def _isnt_sum(placement: Placement) -> bool:
    return placement.is_partial() and not (placement.is_partial("sum") and type(placement) is Partial)


def reduced(value: Any) -> Any:
    """A DTensor whose ranks' parts are still to be joined, such as ``p.norm()``, as they are joined; others as is."""
    if not isinstance(value, DTensor) or not any(placement.is_partial() for placement in value.placements):
        return value
    return value.redistribute(placements=_joined(value))


def _joined(tensor: DTensor) -> list[Placement]:
    """The placements of a tensor with replicas in place of parts that are still to be joined."""
    return [Replicate() if placement.is_partial() else placement for placement in tensor.placements]


def is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def full(value: Any, *, only_numbers: bool = False) -> Any:
    """``value``, of any nesting, with full tensors in the place of DTensors; collective over their meshes.

    Args:
        only_numbers: Replace DTensors without dimensions only; plain scalars can be used with DTensors of any mesh.
    """

    def whole(leaf: Any) -> Any:
        return full_tensor(leaf) if isinstance(leaf, DTensor) and not (only_numbers and leaf.ndim) else leaf

    return tree.map_leaves(whole, value)


def _meshes(value: Any, *, numbers: bool = True) -> set[DeviceMesh]:
    """The meshes of the DTensors in ``value``; without ``numbers``, of those with dimensions."""
    return {each.device_mesh for each in tree.leaves(value, DTensor) if numbers or each.ndim}


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
            " p.copy_(values)).",
            breaks=9,
        )


def _part_of(value: Tensor, like: DTensor) -> Tensor:
    """This rank's part of ``value`` in the layout of ``like``; its local tensor itself if it has that layout."""
    laid_out = like.shape, like.device_mesh, like.placements
    if isinstance(value, DTensor) and (value.shape, value.device_mesh, value.placements) == laid_out:
        given: Any = value
        return given._local_tensor.detach()  # type: ignore[no-any-return]
    kept = part_on(full_tensor(value).expand(like.shape), like.device_mesh, _joined(like))
    coordinate: Sequence[int] = like.device_mesh.get_coordinate() or ()
    is_summed = any(place and each.is_partial("sum") for place, each in zip(coordinate, like.placements))
    return torch.zeros_like(kept) if is_summed else kept  # of a sum, the first rank has all


_COMPARISONS = 2
"""Of one tensor: the first time it may be as it was made, such as zeros."""
_LEFT = {Tensor.copy_, Tensor.__setitem__}
"""Those of DTensor that are patched above."""

_compared: Any = WeakIdKeyDictionary()
"""How often a tensor was compared."""


def run() -> AbstractContextManager[None]:
    """Context of a Trainer's run."""
    return replaced((DTensor, "__torch_function__", _BETWEEN))


def step() -> AbstractContextManager[None]:
    """Context of what a run computes in steps: forwards, backwards and optimizer steps."""
    return replaced((DTensor, "__torch_function__", _DISABLED))


def _between(_: Any, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if len(args) == 1 and not kwargs:  # reads of attributes, such as p.grad
            return func(*args)
        given = [*args, *kwargs.values()]
        plain = [each for each in given if is_plain(each) and each.numel() > 1]
        sharded = next((each for each in given if isinstance(each, DTensor)), None)
        if not plain or sharded is None or func in _LEFT:
            return func(*args, **kwargs)
        for each in plain:
            _compare(each, sharded.device_mesh)
        name = getattr(func, "__name__", "")
        if args and is_plain(args[0]) and name.endswith("_") and not name.endswith("__"):
            return func(*full(args), **full(kwargs))
        with implicit_replication():
            return func(*map(reduced, args), **{key: reduced(each) for key, each in kwargs.items()})


_BETWEEN, _DISABLED = classmethod(_between), vars(DTensor)["__torch_function__"]


def _compare(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Compare a tensor over a mesh's ranks; a collective call over them.

    Raises:
        StepError: On every rank, if they have other values.
    """
    if (times := _compared.get(tensor, 0)) == _COMPARISONS:
        return
    _compared[tensor] = times + 1
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().double()
    own = torch.stack([wide.sum(), wide.norm()]).to(mesh.device_type).view(torch.int64)
    both = torch.stack([own, ~own])  # the largest of a number and of its complement show whether all are equal
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    if not torch.equal(both[0], ~both[1]):
        raise StepError(
            f"Between steps a plain tensor of shape {tuple(tensor.shape)} meets a sharded parameter, and has other"
            " values on other ranks, each of which would change its own part of the parameter by its own values: make"
            " it equal on all, as by trainer.strategy.reduce(values) or fabric.all_reduce(values).",
            breaks=9,
        )
