"""Makes Lightning's ModelSummary, plain and rich, report the whole model, with a column for this rank's part.

The callbacks see the module only after it is laid out. Of one that is cut into stages, or whose layers are split, sizes
and operations are those of a run on fake tensors before that, also in the fits of later Trainers. Where the example
can't run on these, they are left out. Where summaries are on, the table of what each stage has is printed too.

Private in Lightning 2.6, used here: the callbacks' ``_summary`` and ``_max_depth``, and a summary's
``_get_summary_data``. The column's title is one that the rich summary knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import get_human_readable_count, summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn

from lightning_shard.layout import Layout
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import class_name
from lightning_shard.pipeline.cost import on_fake_tensors
from lightning_shard.pipeline.placement import Placement
from lightning_shard.plugin.assembly.probe import restoring_state
from lightning_shard.sharding import local_tensor

_COLUMN = "Params per Device"
_BEFORE = "_lightning_shard_summary"
"""The attribute under which a module that was laid out keeps its summaries from before, by their depth."""
_NO_LAYER = "n/a"
"""The type in the row of parameters that belong to no layer."""


@dataclass
class WholeSummary:
    """The parts of a summary that a callback uses."""

    data: list[tuple[str, list[str]]]
    total_parameters: int
    trainable_parameters: int
    model_size: float
    total_training_modes: dict[str, int]
    total_flops: int

    @classmethod
    def of(cls, module: pl.LightningModule, depth: int) -> WholeSummary:
        found = summarize(module, max_depth=depth)
        counts = (found.total_parameters, found.trainable_parameters, found.model_size)
        return cls(found._get_summary_data(), *counts, found.total_training_modes, found.total_flops)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.data


def summarize_before(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> None:
    """Keep what summaries say of a module that is to be cut or split, for all Trainers that will fit it."""
    depths = {callback._max_depth for callback in _summaries(callbacks)}
    module.__dict__[_BEFORE] = {
        depth: (_on_fake_tensors(module, depth) if depths else None) or _without_a_run(module, depth)
        for depth in depths or {1}
    }


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


def report_whole(
    callbacks: Iterable[pl.Callback], module: pl.LightningModule, gather_over_stages: Callable[[Any], list[Any]]
) -> None:
    """Make a Trainer's callbacks report the whole of a module that was laid out, with this rank's part beside it."""
    before: dict[int, WholeSummary] | None = module.__dict__.get(_BEFORE)
    for callback in _summaries(callbacks):
        vars(callback)["_summary"] = partial(_summarized, callback._max_depth, before, gather_over_stages)


def report_placement(callbacks: Iterable[pl.Callback], layout: Layout, placement: Placement | None) -> None:
    """Print which stage has what, on rank 0, unless the Trainer's summary is off (``enable_model_summary=False``)."""
    if placement is not None and _summaries(callbacks):
        rank_zero_info(f"{layout}\n{placement}")


def _summaries(callbacks: Iterable[pl.Callback]) -> list[ModelSummary]:
    return [callback for callback in callbacks if isinstance(callback, ModelSummary) and callback._max_depth]


def _summarized(
    depth: int,
    before: dict[int, WholeSummary] | None,
    gather_over_stages: Callable[[Any], list[Any]],
    _trainer: pl.Trainer,
    module: pl.LightningModule,
) -> WholeSummary:
    if before is None:
        whole = WholeSummary.of(module, depth)
        reshard(module)  # the summary called it on its example
    else:  # of another depth, if only an earlier Trainer's is known
        whole = deepcopy(before.get(depth) or next(iter(before.values())))
        trained = gather_over_stages(
            {name: p.shape.numel() for name, p in module.named_parameters() if p.requires_grad}
        )
        whole.trainable_parameters = sum({name: n for stage in trained for name, n in stage.items()}.values())
    return _with_own_part(whole, module)


def _with_own_part(whole: WholeSummary, module: pl.LightningModule) -> WholeSummary:
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
