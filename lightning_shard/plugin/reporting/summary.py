"""Makes Lightning's ModelSummary, plain and rich, report the whole model, with a column for this rank's part.

The callbacks see the module only after it is cut and sharded. Sizes and operations are those of a run on fake tensors
before that. Where the example can't run on these, they are left out.

Private in Lightning 2.6, used here: the callbacks' ``_summary`` and ``_max_depth``, and a summary's
``_get_summary_data``. The column's title is one that the rich summary knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count, summarize
from torch import nn

from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import class_name
from lightning_shard.pipeline.cost import on_fake_tensors
from lightning_shard.plugin.assembly.example import restoring_state
from lightning_shard.sharding import local_tensor

_COLUMN = "Params per Device"
_NO_LAYER = "n/a"
"""The type in the row of parameters that belong to no layer."""


@dataclass
class WholeSummary:
    """The parts of a summary that a callback uses; created before the module is cut, and completed afterwards."""

    data: list[tuple[str, list[str]]]
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: dict[str, int]
    total_flops: int

    @classmethod
    def of(cls, module: pl.LightningModule, depth: int) -> WholeSummary:
        found: Any = summarize(module, max_depth=depth)
        counts = (found.total_parameters, found.trainable_parameters, found.model_size)
        return cls(found._get_summary_data(), *counts, found.total_training_modes, found.total_flops)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.data


def summarize_before_cutting(
    callbacks: Iterable[pl.Callback], module: pl.LightningModule, gather_over_stages: Callable[[Any], list[Any]]
) -> None:
    """Make the callbacks report the module as it is now, after it is cut."""
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    for callback in _summaries(callbacks):
        found = _on_fake_tensors(module, callback._max_depth) or _without_a_run(module, callback._max_depth)
        vars(callback)["_summary"] = partial(_completed, found, sizes, gather_over_stages)


def _on_fake_tensors(module: pl.LightningModule, depth: int) -> WholeSummary | None:
    """The summary of a run on the module's example, computing nothing; ``None`` if there is none, or it fails."""
    if module.example_input_array is None:
        return None
    modes = {part: part.training for part in module.modules()}
    try:
        with restoring_state(module), on_fake_tensors(module.parameters()):
            return WholeSummary.of(module, depth)
    except Exception:
        return None  # finding the blocks warns of the reason
    finally:
        for part, mode in modes.items():
            part.training = mode


def _without_a_run(module: pl.LightningModule, depth: int) -> WholeSummary:
    example, module.example_input_array = module.example_input_array, None
    try:
        found = WholeSummary.of(module, depth)
    finally:
        module.example_input_array = example
    if example is not None:
        found.data = [(title, column) for title, column in found.data if title != "FLOPs"]
    return found


def summarize_beside(callbacks: Iterable[pl.Callback]) -> None:
    """Make the callbacks add this rank's part to their report of a module that isn't cut."""
    for callback in _summaries(callbacks):
        vars(callback)["_summary"] = partial(_summarized, callback._max_depth)


def _summarized(depth: int, _trainer: pl.Trainer, module: pl.LightningModule) -> WholeSummary:
    found = WholeSummary.of(module, depth)
    reshard(module)  # the summary called it on its example
    return _beside(found, module)


def _summaries(callbacks: Iterable[pl.Callback]) -> list[ModelSummary]:
    return [callback for callback in callbacks if isinstance(callback, ModelSummary) and callback._max_depth]


def _completed(
    whole: WholeSummary,
    sizes: dict[str, int],
    gather_over_stages: Callable[[Any], list[Any]],
    _trainer: pl.Trainer,
    module: pl.LightningModule,
) -> WholeSummary:
    trained = gather_over_stages([name for name, p in module.named_parameters() if p.requires_grad])
    whole.trainable_parameters = sum(sizes[name] for name in {name for names in trained for name in names})
    return _beside(whole, module)


def _beside(whole: WholeSummary, module: pl.LightningModule) -> WholeSummary:
    columns = dict(whole.data)
    names, kinds = columns["Name"], columns["Type"]
    columns["Type"][:] = [
        kind if kind == _NO_LAYER else class_name(module.get_submodule(name)) for name, kind in zip(names, kinds)
    ]
    own = {name: _own(module.get_submodule(name)) for name, kind in zip(names, kinds) if kind != _NO_LAYER}
    rest = _own(module) - sum(count for name, count in own.items() if "." not in name)
    counts = [get_human_readable_count(own.get(name, rest)) for name in names]
    place = [title for title, _ in whole.data].index("Params") + 1
    whole.data = [*whole.data[:place], (_COLUMN, counts), *whole.data[place:]]
    return whole


def _own(module: nn.Module) -> int:
    return sum(local_tensor(parameter).numel() for parameter in module.parameters())
