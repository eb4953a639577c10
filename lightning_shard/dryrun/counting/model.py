"""The module to plan for: built on the meta device, with its blocks found and its training step callable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.dryrun.counting.fake import built_on_meta, copied_to_meta
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.blocks import Blocks
from lightning_shard.parallel.fsdp.shard import parallelizes_itself
from lightning_shard.pipeline.cost import ModelCost
from lightning_shard.plugin import trainer_private
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
        _check(module, batch, device_type)
        settings = replace(settings, gathered_dtype=trainer_private.GATHERED.get(precision))
        built = copied_to_meta(module) if isinstance(module, pl.LightningModule) else built_on_meta(module)
        if not isinstance(built, pl.LightningModule):
            raise ConfigurationError(
                f"{built!r:.100} isn't a LightningModule: pass one, or a function that builds one."
            )
        _configure(built)
        if parallelizes_itself(built):
            raise ConfigurationError(
                f"{type(built).__name__}.configure_model parallelizes the module itself, so its layout isn't the"
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
        dtype = trainer_private.GATHERED.get(self.precision)
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

    @property
    def estimated_flops(self) -> dict[str, int]:
        """Estimated FLOPs of each part's forward, for a step that can't be counted."""
        if self.cost is None:
            return {}
        parts = [*self.cost.blocks, *self.cost.before, *self.cost.after, *(part for _, part in self.cost.between)]
        return {part.name: part.flops for part in parts}


def _check(module: Any, batch: Any, device_type: str) -> None:
    try:
        torch.device(device_type)
    except (RuntimeError, TypeError) as error:
        raise ConfigurationError(
            f"device_type={device_type!r} is not a torch device type: use cuda or cpu. Pass a device model, such as"
            " h100, as device=."
        ) from error
    if isinstance(module, nn.Module) and not isinstance(module, pl.LightningModule):
        name = type(module).__name__
        raise ConfigurationError(f"{name} isn't a LightningModule: pass one, or a function that builds one.")
    if tree.batch_size(batch) < 1:
        raise ConfigurationError("The batch has no samples: pass one of the size that a data-parallel rank reads.")


def _configure(module: pl.LightningModule) -> None:
    try:
        with torch.device("meta"):
            module.configure_model()
    except Exception as error:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_model can't be run without memory, under torch.device('meta')"
            f" ({type(error).__name__}: {error}): leave what reads weights or computes with them to setup."
        ) from error


@contextmanager
def fake_trainer(module: pl.LightningModule) -> Iterator[None]:
    """Context: the module has a Trainer to query, and what it logs is discarded."""
    level = logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = pl.Trainer(accelerator="cpu", devices=1, max_steps=1000, max_epochs=-1, **off)  # type: ignore
    finally:
        logging.getLogger("lightning.pytorch").setLevel(level)
    names = ("log", "log_dict")
    before = module.__dict__.get("_trainer")
    module.trainer = trainer
    for name in names:
        vars(module)[name] = lambda *_, **__: None
    try:
        yield
    finally:
        module._trainer = before
        for name in names:
            vars(module).pop(name, None)
