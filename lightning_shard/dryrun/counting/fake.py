"""Fake ranks and fake tensors: a process group that sends nothing, and modules without memory.

Private parts of torch 2.11 to 2.14: ``torch.testing._internal.distributed.fake_pg``, the only process group of any size
that one process can create; ``FakeTensorMode``, tensors with a device but without data; and ``DTensor._local_tensor``,
since ``to_local()`` is an operation, and one on meta costs as much as ten on fake tensors.

Routing depends on values, so it is replaced by an assumption: tokens are spread evenly over ranks and experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard import tree
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.experts.stacked import Dispatched
from lightning_shard.parallel.plans import matches
from lightning_shard.pipeline.cost import GroupedMatmuls
from lightning_shard.sharding import laid_out, parameter_like

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
            return laid_out(empty(tensor._local_tensor), tensor)
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            copy = empty(tensor)
            made[id(tensor)] = parameter_like(copy, tensor) if isinstance(tensor, nn.Parameter) else copy
        return made[id(tensor)]

    with torch.no_grad():
        for held in (held for part in module.modules() for held in (part._parameters, part._buffers)):
            held.update({key: fake(tensor) for key, tensor in held.items() if tensor is not None})  # type: ignore


_aten = torch.ops.aten


class DealtEvenly(Dispatched):
    """Ranks send each other equally many rows."""

    def _agree(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        ranks, rows = self._mesh.size(), len(chosen)
        sizes = [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]
        return sizes, sizes, chosen.new_empty(rows)

    def _compute(self, module: nn.Module, rows: Tensor, experts: Tensor, scales: Tensor, here: int) -> Tensor:
        with PickedEvenly(here, experts):
            return super()._compute(module, rows, experts, scales, here)


class WholeEvenly:
    """Replaces the forward of a stack of experts that isn't sharded; assumes that equally many tokens choose each."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self._forward = module, module.forward
        self.is_asked = False  # whether the forward's code looked up which tokens chose an expert
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        integers = [t for t in tree.tensors((args, kwargs)) if t.ndim == 2 and not t.is_floating_point()]
        if len(integers) != 1:
            return self._forward(*args, **kwargs)
        with PickedEvenly(int(self.module.num_experts), integers[0]) as picked:  # type: ignore[arg-type]
            result = self._forward(*args, **kwargs)
        self.is_asked |= picked.is_asked
        return result


def stacks_named(root: nn.Module, plan: Mapping[str, str] | None) -> list[nn.Module]:
    """The stacks of experts that a user's plan names."""
    named = [module for name, module in root.named_modules() for pattern in plan or () if matches(name, pattern)]
    return [module for module in named if isinstance(getattr(module, "num_experts", None), int)]


class PickedEvenly(TorchDispatchMode):
    """On fake tensors: code that selects the tokens of an expert gets an equal share of all choices.

    Recognizes bool masks over the tokens, or over their choices. Anything else that depends on values fails.

    Args:
        experts: The number of experts.
        chosen: The experts that tokens have chosen, of shape (tokens, choices per token).

    Attributes:
        is_asked: Whether any code selected by such a mask.
    """

    def __init__(self, experts: int, chosen: Tensor) -> None:
        super().__init__()
        self._experts, self._tokens, self._choices = experts, len(chosen), chosen.numel()
        self.is_asked = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.nonzero.default and self._is_mask(args[0]):
            return self._picked(args[0])
        if func is _aten.index.Tensor and any(self._is_mask(index) for index in args[1]):
            picked = [self._picked(index).unbind(1) if self._is_mask(index) else (index,) for index in args[1]]
            return func(args[0], [index for each in picked for index in each])
        if func is _aten.bincount.default and args[0].numel() in (self._tokens, self._choices):
            least = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
            return args[0].new_empty(max(least, self._experts), dtype=torch.long)
        return func(*args, **kwargs)

    def _is_mask(self, index: Any) -> bool:
        is_bool = isinstance(index, Tensor) and index.dtype is torch.bool
        return is_bool and self._choices > 0 and index.numel() in (self._tokens, self._choices)

    def _picked(self, mask: Tensor) -> Tensor:
        """The indices that ``nonzero`` would give: shape (rows, dims of the mask)."""
        self.is_asked = True
        return mask.new_empty(self._choices // self._experts, mask.ndim, dtype=torch.long)
