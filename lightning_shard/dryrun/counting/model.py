"""The module to plan for: built on the meta device, with its blocks found and its training step callable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, Precision
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

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

    @property
    def estimated_flops(self) -> dict[str, int]:
        """Estimated FLOPs of each part's forward, for a step that can't be counted."""
        if self.cost is None:
            return {}
        parts = [*self.cost.blocks, *self.cost.before, *self.cost.after, *(part for _, part in self.cost.between)]
        return {part.name: part.flops for part in parts}


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
