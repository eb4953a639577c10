"""Apply FSDP2 to a model, one unit per block and one for the rest, and control its all-gathers and reductions.

A *unit* is a module that ``fully_shard`` was applied to. Its parameters are all-gathered (unsharded) together, and
freed (resharded) together. Gradients are accumulated and reduced in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.containers import called_below, slots_of, with_forward
from lightning_shard.parallel.fsdp.autocast import cast_units, not_cast
from lightning_shard.parallel.fsdp.units import (
    call_fsdp,
    frees,
    gathered_in,
    give_classes_back,
    groups_of,
    groups_under,
    is_unit,
    make_unit,
    of_one_dtype,
    sharded_units,
)
from lightning_shard.parallel.fsdp.unsharded import hold_unsharded, unsharded_of
from lightning_shard.parallel.fsdp.watched_parameters import check_before_gather
from lightning_shard.parallel.init import attributes_of, put_on_units
from lightning_shard.sharding import local_tensor


@dataclass(frozen=True)
class Sharding:
    """How parameters are held and all-gathered.

    Attributes:
        keeps_gathered: Keep blocks unsharded from a forward to its backward. In a pipeline the same blocks run for
            every microbatch, so one all-gather per step replaces ``2 × microbatches`` of them.
        gathered_dtype: The dtype of autocast: weights that autocast would cast are all-gathered in it. ``None``:
            all-gather in the dtype of the parameters.
        offloads: Hold shards, their gradients and so the optimizer's state in host memory.
    """

    keeps_gathered: bool = False
    gathered_dtype: torch.dtype | None = None
    offloads: bool = False


def apply_fully_sharded(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    sharding: Sharding,
    *,
    whole_steps: bool,
    experts: Iterable[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
    sharded: Collection[nn.Parameter] = (),
) -> None:
    """Shard ``root``'s parameters over ``mesh``, in place; on a mesh of one rank, hold them without FSDP2's copies.

    Args:
        root: The model.
        blocks: Modules that become a unit each, unsharded while they run.
        mesh: One axis to shard over, or two: replicate over the first, shard over the second.
        sharding: How parameters are held and all-gathered.
        whole_steps: A step is one call of ``root``, and everything outside of the blocks is one unit, unsharded during
            that call. If false (manual optimization: backwards and optimizer steps within a step), each module below
            ``root`` is unsharded during its own call, and sharded between calls. So what code sets there, such as
            ``requires_grad``, is set on the parameters that are trained, and no call uses weights from before an
            optimizer's step.
        experts: Modules within blocks that become units over ``expert_mesh``.
        expert_mesh: The axes of the ranks that hold the same experts.
        sharded: Parameters that are sharded already, and all-gathered by the code that uses them.

    Raises:
        ConfigurationError: One module holds parameters of several dtypes. Without ``whole_steps``: ``root`` itself
            holds a parameter that has dimensions, or two modules share a tied one.
    """
    if whole_steps and expert_mesh is None and _nothing_is_sharded(root, mesh, sharding):
        hold_unsharded(root, mesh)
        return
    if not whole_steps:
        sharding = replace(sharding, keeps_gathered=False)
    attributes = attributes_of(root)
    # FSDP2 can't shard scalar parameters, or can't reduce gradients of parameters without elements
    whole = {parameter for parameter in root.parameters() if not parameter.ndim or not parameter.numel()}
    whole.update(sharded)
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_contiguous():  # such as channels_last
            parameter.data = parameter.data.contiguous()
    on_host = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if sharding.offloads else OffloadPolicy()
    for unit in experts:
        assert expert_mesh is not None
        make_unit(
            unit,
            mesh=expert_mesh,
            offload_policy=on_host,
            reshard_after_forward=not sharding.keeps_gathered,
            shard_placement_fn=partial(_even_dim, parts=expert_mesh.size(-1)),
            mp_policy=_policy([unit]),
        )
    apply = partial(make_unit, mesh=mesh, offload_policy=on_host)
    units = list(of_one_dtype(chain.from_iterable(map(with_forward, blocks)), root if whole_steps else None, whole))
    cast = cast_units(root, units, whole) if whole_steps and sharding.gathered_dtype else set()
    elsewhere = whole
    if whole_steps:
        in_units = _in_units(root, units, cast)
        of_root = [slot for slot in slots_of(root) if slot[0].get_parameter(slot[1]) not in in_units]
        apply(root, mp_policy=_policy([root]), ignored_params=whole | in_units)
        elsewhere = whole.union(module.get_parameter(name) for module, name in of_root)
    for unit in units:
        policy = _policy([unit], sharding.gathered_dtype if unit in cast else None)
        apply(unit, reshard_after_forward=not sharding.keeps_gathered, mp_policy=policy, ignored_params=elsewhere)
    if not whole_steps:
        _shard_what_is_called(root, whole, apply)
    give_classes_back(root)
    put_on_units(root, attributes)


def _shard_what_is_called(root: nn.Module, whole: set[nn.Parameter], apply: Callable[..., Any]) -> None:
    """Make each module below ``root`` that is called a unit; without ``whole_steps``."""
    bare = [name for name, parameter in root.named_parameters(recurse=False) if parameter not in whole]
    if bare:
        raise ConfigurationError(
            f"With manual optimization, {type(root).__name__} can't hold the parameters {bare} itself: move them into"
            " a module that is called, or give one of a single number no dimensions (torch.tensor(0.0))."
        )
    called = list(called_below(root))
    for group in tied_parameters(root):
        tied = root.get_parameter(group[0])
        if sum(any(parameter is tied for parameter in module.parameters()) for module in called) > 1:
            raise ConfigurationError(
                f"With manual optimization, {' and '.join(group)} can't be one tied parameter of two modules: put both"
                " modules into one, or untie them."
            )
    for module in called:
        for unit in of_one_dtype([] if is_unit(module) else [module], None, whole):
            apply(unit, reshard_after_forward=True, mp_policy=_policy([unit]), ignored_params=whole)


def _nothing_is_sharded(root: nn.Module, mesh: DeviceMesh, sharding: Sharding) -> bool:
    """Whether FSDP2 would do nothing: no sharding, replicas, offloading or casts, and no 16-bit gradients to add."""
    if mesh.size() > 1 or mesh.ndim > 1 or sharding.offloads or sharding.gathered_dtype is not None:
        return False
    return all(p.dtype.is_complex or p.dtype in (torch.float32, torch.float64) for p in root.parameters())


def _in_units(root: nn.Module, units: Iterable[nn.Module], cast: Iterable[nn.Module]) -> set[nn.Parameter]:
    """The parameters that belong to exactly one unit, without those in units of ``cast`` that autocast doesn't cast."""
    unit_of = {module: unit for unit in reversed(list(units)) for module in unit.modules()}
    holders: dict[nn.Parameter, set[nn.Module | None]] = {}
    for module, name in slots_of(root):
        holders.setdefault(module.get_parameter(name), set()).add(unit_of.get(module))
    alone = {parameter for parameter, held_by in holders.items() if len(held_by) == 1 and None not in held_by}
    return alone.difference(*map(not_cast, cast))


def _policy(modules: Iterable[nn.Module], dtype: torch.dtype | None = None) -> MixedPrecisionPolicy:
    """The policy of a unit: gradients are added over microbatches and ranks in 32 bits, also if computed in 16.

    Args:
        modules: The unit.
        dtype: The dtype to all-gather in; ``None`` for that of the parameters.
    """
    halves = any(p.dtype in (torch.bfloat16, torch.float16) for module in modules for p in module.parameters())
    return MixedPrecisionPolicy(dtype, torch.float32 if dtype or halves else None, cast_forward_inputs=False)


def _even_dim(parameter: nn.Parameter, parts: int) -> Shard:
    """Shard the first dim that ``parts`` divides; dim 0 counts the experts of a rank, which may be fewer than ranks."""
    local = local_tensor(parameter)
    return Shard(next((dim for dim, size in enumerate(local.shape) if size % parts == 0), 0))


def to_device(root: nn.Module, device: torch.device, sharding: Sharding) -> None:
    """Move the model to ``device``; with offloading, all but the shards."""
    if not sharding.offloads:
        attributes = attributes_of(root)
        root.to(device)  # makes new DTensors
        put_on_units(root, attributes)
        return
    for parameter in scalar_parameters(root):
        parameter.data = parameter.data.to(device)
    for module in root.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)


def scalar_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Parameters without dimensions. FSDP2 can't shard them, so each rank holds them in full."""
    return [parameter for parameter in root.parameters() if not parameter.ndim]


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients of scalar parameters over a group's ranks, in place. Collective over the group.

    A gradient that no rank has stays ``None``. Gradients that an earlier call has averaged may be among them.
    """
    parameters = list(parameters)
    if not parameters or dist.get_world_size(group) == 1:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = [torch.zeros_like(p) if p.grad is None else torch.ones_like(p) for p in parameters]
    widest = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    both = torch.stack([value.to(widest) for value in (*gradients, *present)])
    dist.all_reduce(both, group=group)
    means, ranks = (both / dist.get_world_size(group)).chunk(2)
    for parameter, mean, any_rank in zip(parameters, means, ranks.tolist()):
        if any_rank:
            parameter.grad = (mean if parameter.is_complex() else mean.real).to(parameter.dtype)


def parallelizes_itself(root: nn.Module) -> bool:
    """Whether a module's own ``configure_model`` has sharded it, as Lightning's ModelParallelStrategy expects."""
    return any(isinstance(parameter, DTensor) for parameter in root.parameters())


def expect_backward_of(
    units: Iterable[nn.Module], *, reduces: bool, reshards: bool = True, is_last: bool | None = None
) -> None:
    """Set what FSDP2 does in the next backward.

    Args:
        units: All of a model's.
        reduces: Whether the backward reduces gradients over the ranks; the last one before an optimizer step must.
        reshards: Whether the backward frees unsharded parameters; ``False`` if another microbatch's backward needs
            them.
        is_last: Whether the backward is the last one for the forwards so far. Default: the value of ``reshards``.
    """
    for unit in units:
        call_fsdp(unit, FSDPModule.set_requires_gradient_sync, reduces, recurse=False)
        call_fsdp(unit, FSDPModule.set_reshard_after_backward, reshards, recurse=False)
        call_fsdp(unit, FSDPModule.set_is_last_backward, reshards if is_last is None else is_last)


@contextmanager
def prefetching(root: nn.Module, *, all_units: bool) -> Iterator[None]:
    """Prefetch: start asynchronous all-gathers before a step that runs inside; each unit's call waits for its own.

    Use it only after the first call of ``root``, in which FSDP2 initialises itself.

    Args:
        root: The model.
        all_units: Prefetch all units, or only the first one.
    """
    units = [*sharded_units(root)][: None if all_units else 1]
    for unit in units:
        check_before_gather(unit)
    handles = [call_fsdp(unit, FSDPModule.unshard, async_op=True) for unit in units]
    yield
    for handle in handles:
        assert handle is not None
        handle.wait()  # for units that weren't called: the next step would take the gathered weights for its own
    if handles:
        reshard(root)


@contextmanager
def kept_gathered(root: nn.Module) -> Iterator[None]:
    """Context in which units that are resharded after their forward stay unsharded until its end."""
    units = [*filter(frees, sharded_units(root))]
    for unit in units:
        call_fsdp(unit, FSDPModule.set_reshard_after_forward, False, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            call_fsdp(unit, FSDPModule.reshard)
            call_fsdp(unit, FSDPModule.set_reshard_after_forward, True, recurse=False)


def reshard(root: nn.Module) -> None:
    """Free unsharded parameters, and put the sharded ones in their places."""
    if (held := unsharded_of(root)) is not None:
        held.free()
    for group in groups_under(root):
        group.reshard()


@contextmanager
def no_gradient_sync(root: nn.Module) -> Iterator[None]:
    """Backwards inside don't reduce gradients over the ranks."""
    expect_backward_of(sharded_units(root), reduces=False)
    try:
        yield
    finally:
        expect_backward_of(sharded_units(root), reduces=True)


def end_backward(root: nn.Module, *, reduces: bool) -> None:
    """After the last backward of a step, where nothing is sharded: do what FSDP2 else does by itself."""
    if (held := unsharded_of(root)) is not None:
        if reduces:
            held.move_gradients()
        held.free()


def reduce_gradients(root: nn.Module, *, reshards: bool = True) -> None:
    """Reduce the gradients that backwards without synchronisation left unreduced, if there are any.

    Args:
        root: The model.
        reshards: Whether to free the unsharded parameters of groups with such gradients.
    """
    if (held := unsharded_of(root)) is not None:
        held.move_gradients()
    for group in groups_under(root):
        if has_unreduced_gradients(group):
            group.reduce_grads = group.all_reduce_grads = True  # over shards and over replicas
            group.reshard_after_backward = reshards
            group.post_backward()
            group.finalize_backward()


def accumulate_late_gradients(units: Iterable[nn.Module]) -> None:
    """Move gradients that came after the end of a unit's backward to FSDP2's 32-bit accumulators.

    FSDP2 itself does this at the end of a unit's backward that doesn't reduce.
    """
    for group in chain.from_iterable(map(groups_of, units)):
        for parameter, _ in gathered_in(group):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def drop_unreduced_gradients(root: nn.Module) -> None:
    """Drop unreduced gradients, as of an accumulation that was interrupted; ``zero_grad`` doesn't drop them."""
    if (held := unsharded_of(root)) is not None:
        held.drop_unreduced_gradients()
    for group in groups_under(root):
        for parameter, gathered in gathered_in(group):
            parameter.unsharded_accumulated_grad = gathered.grad = None


def join_all_gather(unit: nn.Module) -> None:
    """Take part in the all-gather of a unit that other ranks call, and reshard it if the call does."""
    if is_gathered(unit):
        return  # the other ranks have it unsharded too, and all-gather nothing
    call_fsdp(unit, FSDPModule.unshard)
    if frees(unit):
        call_fsdp(unit, FSDPModule.reshard)


def is_gathered(unit: nn.Module) -> bool:
    """Whether a unit is unsharded already, so that a call of it all-gathers nothing."""
    return any(group.is_unsharded for group in groups_of(unit))


def has_unreduced_gradients(group: Any) -> bool:
    """Whether backwards have left unreduced gradients in one of FSDP2's parameter groups."""
    return any(
        parameter.unsharded_accumulated_grad is not None or gathered.grad is not None
        for parameter, gathered in gathered_in(group)
    )
