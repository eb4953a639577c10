"""Fully sharded data parallelism: FSDP2, a unit per block and one for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.blocks import tied_parameters


def apply_fully_sharded(
    root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, keep_gathered: bool, whole_steps: bool
) -> None:
    """Shard ``root``'s parameters over ``mesh``, in place.

    Args:
        root: The model.
        blocks: Modules that become a unit each, gathered while they run.
        mesh: One axis to shard over, or two: replicate over the first, shard over the second.
        keep_gathered: Keep blocks gathered from a forward to its backward. In a pipeline the same blocks run for every
            microbatch, so to gather once per step is to gather ``2 × microbatches`` times less.
        whole_steps: What isn't in a block is one unit, gathered while ``root`` is called, and a step is one such call.
            If not (manual optimization: backwards and optimizer steps within a step), each module below ``root`` is
            gathered while it is called itself.

    Raises:
        ConfigurationError: Without whole steps, a parameter that ``root`` holds itself.
    """
    # of these FSDP2 has no shards, or can't reduce their gradients
    whole = {parameter for parameter in root.parameters() if not parameter.ndim or not parameter.numel()}
    for unit in chain.from_iterable(map(_with_forward, blocks)):
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keep_gathered, ignored_params=whole)
    if whole_steps:
        fully_shard(root, mesh=mesh, ignored_params=whole)
        return
    bare = [name for name, _ in root.named_parameters(recurse=False)]
    if bare:
        raise ConfigurationError(
            f"With manual optimization, {type(root).__name__} can't hold the parameters {bare} itself: move them into"
            " a module that is called."
        )
    called = list(_called(root))
    for group in tied_parameters(root):
        tied = root.get_parameter(group[0])
        if sum(any(parameter is tied for parameter in module.parameters()) for module in called) > 1:
            raise ConfigurationError(
                f"With manual optimization, {' and '.join(group)} can't be one tied parameter of two modules: put both"
                " modules into one, or untie them."
            )
    for module in called:
        if not isinstance(module, FSDPModule):
            # sharded between calls, so that what is set there, such as requires_grad, is set on what is trained
            fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)


def _called(root: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules below ``root`` that have a forward, and parameters."""
    for child in root.children():
        if any(True for _ in child.parameters()):
            yield from _with_forward(child)


def _with_forward(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or the outermost ones in a container that is never called itself."""
    if type(module).forward is nn.Module.forward:
        yield from _called(module)
    else:
        yield module


def scalar_parameters(root: nn.Module) -> list[nn.Parameter]:
    """Parameters without dimensions, of which FSDP2 has no shards: each rank holds them whole."""
    return [parameter for parameter in root.parameters() if not parameter.ndim]


@torch.no_grad()
def average_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients of scalar parameters over a group's ranks, in place; one that no rank has stays ``None``.

    A collective call of the group. What an earlier call has averaged may be among them.
    """
    parameters = list(parameters)
    if not parameters:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    present = [torch.zeros_like(p) if p.grad is None else torch.ones_like(p) for p in parameters]
    both = torch.stack([*gradients, *present]).float()
    dist.all_reduce(both, group=group)
    means, ranks = (both / dist.get_world_size(group)).chunk(2)
    for parameter, mean, any_rank in zip(parameters, means, ranks.tolist()):
        if any_rank:
            parameter.grad = mean.to(parameter.dtype)


def parallelizes_itself(root: nn.Module) -> bool:
    """Whether a module was sharded by its own ``configure_model``, as Lightning's ModelParallelStrategy expects."""
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in root.parameters())


def sharded_units(root: nn.Module) -> Iterator[FSDPModule]:
    return (module for module in root.modules() if isinstance(module, FSDPModule))


def expect_backward(root: nn.Module, *, reduces: bool, reshards: bool = True) -> None:
    """Prepare for the next backward.

    Args:
        root: The model.
        reduces: Whether it's the last one before the optimizer step: only that one reduces gradients over the ranks.
        reshards: Whether it frees gathered parameters; ``False`` where another microbatch's backward needs them.
    """
    for unit in sharded_units(root):
        unit.set_requires_gradient_sync(reduces, recurse=False)
        unit.set_reshard_after_backward(reshards, recurse=False)
        unit.set_is_last_backward(reshards)


@contextmanager
def differentiating_by_inputs(root: nn.Module, reduces: Callable[[], bool]) -> Iterator[None]:
    """Inside, ``torch.autograd.grad`` leaves parameters gathered, since a graph that it creates uses them once more.

    Args:
        reduces: Whether the next backward after it is to reduce gradients.
    """
    plain = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        expect_backward(root, reduces=False, reshards=False)
        try:
            return plain(*args, **kwargs)
        finally:
            expect_backward(root, reduces=reduces())

    torch.autograd.grad = grad
    try:
        yield
    finally:
        torch.autograd.grad = plain


def reshard(root: nn.Module) -> None:
    """Free gathered parameters and register the sharded ones."""
    for unit in sharded_units(root):
        unit.reshard()


@contextmanager
def no_gradient_sync(root: nn.Module) -> Iterator[None]:
    expect_backward(root, reduces=False)
    try:
        yield
    finally:
        expect_backward(root, reduces=True)


def reduce_gradients(root: nn.Module) -> None:
    """Reduce gradients that backwards without synchronisation left unreduced; nothing where there are none."""
    for group in _private_groups(root):
        if any(_has_unreduced_gradient(parameter) for parameter in group.fsdp_params):
            group.reduce_grads, group.reshard_after_backward = True, True
            group.post_backward()
            group.finalize_backward()


def forget_gradients(root: nn.Module) -> None:
    """Drop gradients that were not reduced, as of an accumulation that was broken off: ``zero_grad`` doesn't."""
    for group in _private_groups(root):
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter.unsharded_param.grad = None


def _private_groups(root: nn.Module) -> Iterator[Any]:
    """FSDP2's parameter groups, whose unreduced gradients have no public access (torch 2.11 to 2.13).

    torch's own pipeline stages (``torch/distributed/pipelining/stage.py``) end their last backward as
    :func:`reduce_gradients` does. Before torch 2.13 a unit had at most one group.
    """
    for unit in sharded_units(root):
        state: Any = unit._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        yield from groups if groups is not None else filter(None, [state._fsdp_param_group])


def _has_unreduced_gradient(parameter: Any) -> bool:
    if parameter.unsharded_accumulated_grad is not None:
        return True
    return hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.grad is not None
