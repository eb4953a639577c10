"""The module to plan for: built on the meta device, with its blocks found and its training step callable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import lightning_private, tree
from lightning_shard.dryrun.counting.fake import built_on_meta, copied_to_meta, on_meta
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.blocks import Blocks
from lightning_shard.parallel.fsdp.shard import parallelizes_itself
from lightning_shard.pipeline.cost import ModelCost
from lightning_shard.plugin.assembly.placing import blocks_of, costs_of
from lightning_shard.plugin.settings import Settings

_TRUE: dict[str, Callable[[], Precision]] = {
    "64-true": DoublePrecision,
    "bf16-true": lambda: HalfPrecision("bf16-true"),
    "16-true": lambda: HalfPrecision("16-true"),
}
"""Lightning's plugins by precision, which convert the module and what it is given; a mixed one only casts."""


@dataclass(frozen=True)
class Model:
    """A LightningModule on meta, and what is known about it independently of the layout."""

    module: pl.LightningModule  # a copy that belongs to this plan
    batch: Any  # what one data-parallel rank reads for a step, as the step is given it: in the module's precision
    settings: Settings
    precision: str = "32-true"
    device_type: str = "cuda"
    blocks: Blocks | None = None  # in running order
    cost: ModelCost | None = None  # by which blocks are placed on stages

    @classmethod
    def of(
        cls,
        module: pl.LightningModule | Callable[[], pl.LightningModule],
        batch: Any,
        settings: Settings,
        *,
        stages: int,
        precision: str = "32-true",
        device_type: str = "cuda",
    ) -> Model:
        """Build or copy the module on meta, and find its blocks; with several stages, it must have some.

        Raises:
            ConfigurationError: The module can't be built without memory, shards itself, or lacks the needed blocks.
        """
        _check(batch, device_type)
        settings = replace(settings, gathered_dtype=lightning_private.GATHERED.get(precision))
        built: Any = copied_to_meta(module) if isinstance(module, nn.Module) else built_on_meta(module)
        name = type(built).__name__
        if not isinstance(built, pl.LightningModule):
            raise ConfigurationError(f"{name} isn't a LightningModule: pass one, or a function that builds one.")
        left = "leave what reads weights or computes with them to setup"
        on_meta(built.configure_model, f"{name}.configure_model can't be run", left)
        if parallelizes_itself(built):
            raise ConfigurationError(
                f"{name}.configure_model parallelizes the module itself, so its layout isn't the"
                " strategy's to plan: plan a module that leaves it to the strategy."
            )
        plugin = _TRUE.get(precision, Precision)()
        plugin.convert_module(built)
        blocks = blocks_of(built, settings, stages)
        cost = None
        if blocks is not None:
            blocks, cost = costs_of(built, blocks, runs=True)
        return cls(built, plugin.convert_input(batch), settings, precision, device_type, blocks, cost)

    def copy(self) -> pl.LightningModule:
        return copied_to_meta(self.module)

    def autocast(self) -> AbstractContextManager[Any]:
        dtype = lightning_private.GATHERED.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype, cache_enabled=False)

    def loss_of(self, module: pl.LightningModule, batch: Any) -> Tensor:
        """The loss that the user's ``training_step`` returns for a microbatch; without one, it is refused."""
        if not module.automatic_optimization:
            raise ConfigurationError("it optimizes by itself (automatic_optimization=False)")
        arguments = [batch, 0] if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else [batch]
        with _TRUE.get(self.precision, Precision)().train_step_context():
            result = module.training_step(*arguments)
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise ConfigurationError(f"training_step gives {type(loss).__name__}, and no loss")
        return loss

    @cached_property
    def _trainer(self) -> pl.Trainer:
        logger = logging.getLogger("lightning.pytorch")
        level, off = logger.level, ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        logger.setLevel(logging.ERROR)
        try:
            settings: Any = dict.fromkeys(off, False)
            return pl.Trainer(accelerator="cpu", devices=1, max_steps=1000, max_epochs=-1, **settings)
        finally:
            logger.setLevel(level)

    @contextmanager
    def fake_trainer(self, module: pl.LightningModule) -> Iterator[None]:
        """Context: a copy of the module has a Trainer to query, and what it logs is discarded."""
        before, logs = vars(module).get("_trainer"), ("log", "log_dict")
        module.trainer = self._trainer
        vars(module).update(dict.fromkeys(logs, lambda *_, **__: None))
        try:
            yield
        finally:
            module._trainer = before
            for name in logs:
                vars(module).pop(name, None)


def _check(batch: Any, device_type: str) -> None:
    try:
        torch.device(device_type)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device_type={device_type!r} is not a torch device type: use cuda or cpu. Pass a device model, such as"
            " h100, as device=."
        ) from error
    if tree.batch_size(batch) < 1:
        raise ConfigurationError("The batch has no samples: pass one of the size that a data-parallel rank reads.")


_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "index", "idx")
"""Attributes that number layers: blocks that differ only in these count as equal."""


@dataclass
class _Like:
    places: list[int] = field(default_factory=list)
    made: Any = None


class Likes:
    """Tracks which blocks are equal, and what they return.

    Attributes:
        stands_for: The place of a block that wasn't run, to that of the equal block that was run for it.
    """

    def __init__(self) -> None:
        self.stands_for: dict[int, int] = {}
        self._seen: dict[Hashable, _Like] = {}

    def pairs(self) -> list[tuple[int, int]]:
        return [(like.places[0], like.places[1]) for like in self._seen.values() if len(like.places) > 2]

    def of(self, block: nn.Module, forward: Callable[..., Any], place: Callable[[], Any]) -> Callable[..., Any]:
        kind = _kind(block)

        def likely(*args: Any, **kwargs: Any) -> Any:
            key = (kind, _signature((args, kwargs)))
            like = self._seen.setdefault(key, _Like())
            here = place()
            if like.made is not None and len(like.places) >= 2 and isinstance(here, int):
                like.places.append(here)
                self.stands_for[here] = like.places[1]
                return _stand_in(like.made, (args, kwargs))
            output = forward(*args, **kwargs)
            if isinstance(here, int):
                like.places.append(here)
                like.made = _recipe(output, (args, kwargs))
            return output

        return likely


def _kind(block: nn.Module) -> Hashable:
    """A key of everything that determines a block's cost, except its inputs."""
    found: list[Hashable] = []
    for name, part in block.named_modules():
        plain = (int, float, str, bool, type(None), torch.dtype)
        settings = tuple(
            sorted((key, repr(v)) for key, v in vars(part).items() if type(v) in plain and key not in _NUMBERS)
        )
        held = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad)
            for key, t in [*part._parameters.items(), *part._buffers.items()]
            if t is not None
        )
        found.append((name, type(part), settings, held))
    return tuple(found)


def _signature(values: Any) -> Hashable:
    def of(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.stride()
        return repr(leaf) if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf).__qualname__

    return tuple((path, of(leaf)) for path, leaf in tree.walk(values))


def _recipe(output: Any, given: Any) -> Any:
    """How to make an output of the same form; ``None`` if that isn't possible."""
    inputs = {id(leaf): place for place, leaf in enumerate(tree.tensors(given))}

    def of(leaf: Any) -> _Leaf:
        if id(leaf) in inputs:
            return _Leaf(given=inputs[id(leaf)])
        if isinstance(leaf, DTensor):
            raise TypeError
        if isinstance(leaf, Tensor):
            return _Leaf(made=(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        return _Leaf(value=leaf)

    try:
        return (tree.map_leaves(of, output),)
    except TypeError:
        return None


_Made = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""A new tensor: its shape, strides, dtype, and whether it requires a gradient."""


@dataclass(frozen=True)
class _Leaf(tree.Leaf):
    """A new tensor, the index of an input that is returned, or another value."""

    made: _Made | None = None
    given: int | None = None
    value: Any = None


def _stand_in(recipe: tuple[Any], given: Any) -> Any:
    inputs = tree.tensors(given)
    made = [leaf.made for _, leaf in tree.walk(recipe[0]) if leaf.made is not None]
    floating = [t for t in inputs if t.is_floating_point()]
    outputs = iter(_StandIn.apply(made, *floating) if made else ())

    def of(leaf: _Leaf) -> Any:
        if leaf.made is not None:
            return next(outputs)
        return leaf.value if leaf.given is None else inputs[leaf.given]

    return tree.map_leaves(of, recipe[0])


class _StandIn(torch.autograd.Function):
    """Saves its inputs, as a block does, and returns tensors without values."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[_Made], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        outputs = [torch.empty_strided(shape, stride, dtype=dtype, device="cpu") for shape, stride, dtype, _ in made]
        ctx.mark_non_differentiable(*(output for output, (*_, trains) in zip(outputs, made) if not trains))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:])
        return None, *(torch.empty_like(t) if needs else None for t, needs in needed)
