"""Fully sharded data parallelism: FSDP2, a unit per block and one for the rest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def apply_fully_sharded(root: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, *, keep_gathered: bool) -> None:
    """Shard ``root``'s parameters over ``mesh``, in place.

    Args:
        root: The model; what isn't in a block becomes the root unit, gathered for the whole step.
        blocks: Modules that become a unit each, gathered while they run.
        mesh: One axis to shard over, or two: replicate over the first, shard over the second.
        keep_gathered: Keep blocks gathered from a forward to its backward. In a pipeline the same blocks run for every
            microbatch, so to gather once per step is to gather ``2 × microbatches`` times less.
    """
    for block in blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=not keep_gathered)
    fully_shard(root, mesh=mesh)


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
    """Reduce gradients that backwards without synchronisation left unreduced; nothing where there are none.

    torch 2.13 has no public way to do it without another backward; its own pipeline stages (``pipelining/stage.py``) end
    their last backward in these same steps.
    """
    for unit in sharded_units(root):
        state = unit._get_fsdp_state()
        for group in state._fsdp_param_groups:
            if any(parameter.unsharded_accumulated_grad is not None for parameter in group.fsdp_params):
                group.reduce_grads, group.reshard_after_backward = True, True
                group.post_backward()
                group.finalize_backward()
