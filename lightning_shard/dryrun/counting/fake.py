"""Fake ranks and fake tensors: a process group that sends nothing, and modules without memory.

Private parts of torch 2.11 to 2.14: ``torch.testing._internal.distributed.fake_pg``, the only process group of any size
that one process can create; ``FakeTensorMode``, tensors with a device but without data; and ``DTensor._local_tensor``,
since ``to_local()`` is an operation, and one on meta costs as much as ten on fake tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.cost import GroupedMatmuls
from lightning_shard.sharding import parameter_like

Made = TypeVar("Made")
Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Context: this process is one of ``count`` ranks; the others don't exist, and collectives do nothing.

    Raises:
        ConfigurationError: This process has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigurationError(
            "A plan can't be made in a process that has a process group: call plan() before"
            " torch.distributed.init_process_group, or use the command line (lightning-shard plan)."
        )
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Context: new tensors are on the CPU and have no data."""
    with FakeTensorMode(allow_non_fake_inputs=True), GroupedMatmuls():
        yield


def on_meta(run: Callable[[], Made], failed: str, remedy: str) -> Made:
    """Call ``run`` under ``torch.device("meta")``; if it fails there, refuse with the reason."""
    try:
        with torch.device("meta"):
            return run()
    except Exception as error:
        reason = " ".join(str(error).partition("\nfull_key")[0].split())  # without what hydra appends
        raise ConfigurationError(
            f"{failed} without memory, under torch.device('meta') ({type(error).__name__}: {reason}): {remedy}."
        ) from error


def built_on_meta(build: Callable[[], Made]) -> Made:
    """Call a function that builds a module, without memory."""
    return on_meta(
        build,
        f"{getattr(build, '__name__', type(build).__name__)} can't build its module",
        "leave what reads data or weights, or computes with their values, to setup, configure_model or"
        " reset_parameters; or build it where there is memory, and pass the module",
    )


def copied_to_meta(module: Module) -> Module:
    """Copy a module, with parameters and buffers on meta; one that holds what can't be copied is refused."""
    memo: dict[int, Any] = {id(p): parameter_like(p.detach().to("meta"), p) for p in module.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    trainer = vars(module).get("_trainer")
    if trainer is not None:
        memo[id(trainer)] = None
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise ConfigurationError(
            f"{type(module).__name__} can't be copied for a plan ({type(error).__name__}: {error}): pass a function"
            " that builds it."
        ) from error


def make_fake(module: nn.Module) -> None:
    """Replace a meta module's tensors by fake CPU tensors, in place; tied tensors stay tied."""
    made: dict[int, Tensor] = {}

    def empty(tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
            local = empty(tensor._local_tensor)
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=tensor.stride())
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            copy = empty(tensor)
            made[id(tensor)] = parameter_like(copy, tensor) if isinstance(tensor, nn.Parameter) else copy
        return made[id(tensor)]

    with torch.no_grad():
        for held in (held for part in module.modules() for held in (part._parameters, part._buffers)):
            held.update({key: fake(tensor) for key, tensor in held.items() if tensor is not None})  # type: ignore
