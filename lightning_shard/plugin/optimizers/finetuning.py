"""Supports Lightning's finetuning callbacks, which unfreeze parts during a run.

Private in Lightning 2.6, used here: ``BaseFinetuning._internal_optimizer_metadata``, each optimizer's groups with the
names of their parameters, and ``_restarting``: whether the callback rebuilds the groups in ``on_fit_start``, as it can
where all parameters are in one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn

from lightning_shard.lightning_private import filtering_parameters_by
from lightning_shard.parallel.batch_norm import batch_norms


def finetuning_callbacks(trainer: pl.Trainer) -> list[BaseFinetuning]:
    return [c for c in trainer.callbacks if isinstance(c, BaseFinetuning)]  # type: ignore[attr-defined]


class _AddedAnyway(list[Tensor]):
    """A list that is true even if empty, so that Lightning adds a parameter group for it."""

    def __bool__(self) -> bool:
        return True


def adding_new_parameters(several_stages: bool) -> AbstractContextManager[None]:
    """Inside, finetuning callbacks distinguish parameters by identity; Lightning's compare values.

    With several stages, each adds the new group, even if empty, so that all have the same groups.
    """

    def new_ones(known: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        ids = set(map(id, known))
        new = [p for p in params if id(p) not in ids]
        return _AddedAnyway(new) if several_stages else new

    return filtering_parameters_by(new_ones)


def add_unfrozen_groups(trainer: pl.Trainer, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Unfreeze again, and add the parameter groups, that restored callbacks had added when they were saved."""
    named = dict(nn.Module.named_parameters(module, remove_duplicate=False))
    for callback in finetuning_callbacks(trainer):
        if not callback._restarting:
            continue
        callback._restarting = False
        for index, optimizer in enumerate(optimizers):
            groups = callback._internal_optimizer_metadata.get(index, [])
            for group in groups[len(optimizer.param_groups) :]:
                params = [named[name] for name in group["params"] if name in named]
                for parameter in params:
                    parameter.requires_grad_(True)
                optimizer.add_param_group({**group, "params": params})
                _track_statistics(module, params)


def _track_statistics(module: nn.Module, params: Iterable[Tensor]) -> None:
    """Make BatchNorm track statistics again, as unfreezing does."""
    ids = set(map(id, params))
    for layer in batch_norms(module).values():
        if any(id(p) in ids for p in layer._parameters.values()):
            layer.track_running_stats = True


def whole_groups(checkpoint: Mapping[str, Any], trainer: pl.Trainer, names: Sequence[Sequence[Sequence[str]]]) -> None:
    """Write the names of all stages' parameters into the state that finetuning callbacks save.

    Args:
        names: By optimizer and group.
    """
    states = checkpoint.get("callbacks", {})
    for callback in finetuning_callbacks(trainer):
        saved = states.get(callback.state_key)
        if saved is not None:
            groups = saved["internal_optimizer_metadata"]
            saved["internal_optimizer_metadata"] = {
                index: [{**group, "params": list(params)} for group, params in zip(of_one, names[index])]
                for index, of_one in groups.items()
            }
