"""Makes Lightning's ModelSummary and ThroughputMonitor report the whole model.

A summary, plain or rich, is of the module as it was before it was laid out. Sizes and operations are those of a run on
fake tensors; where the example can't run on these, they are left out. Where summaries are on, the table of what each
stage has is printed too.

ThroughputMonitor's rates over all devices are rank 0's times the world size, and the ranks of a pipeline and of a
tensor group work on one batch together: so each device's rates, and its utilisation (MFU), are set to its share.

Private in Lightning 2.6, used here: the callbacks' ``_summary`` and ``_max_depth``, a summary's
``_get_summary_data``, and ``ThroughputMonitor._throughputs``.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch.callbacks import ModelSummary, ThroughputMonitor
from lightning.pytorch.utilities.model_summary import summarize
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.layout import Layout
from lightning_shard.pipeline.cost import on_fake_tensors
from lightning_shard.pipeline.placement import Placement
from lightning_shard.plugin.assembly.probe import restoring_state

_BEFORE = "_lightning_shard_summary"
"""The attribute under which a module that was laid out keeps its summaries from before."""
_SHOWN = ("total_parameters", "trainable_parameters", "model_size", "total_training_modes", "total_flops")


class _Whole:
    """The parts of a summary that a callback uses."""

    def __init__(self, module: pl.LightningModule, depth: int) -> None:
        found: Any = summarize(module, max_depth=depth)
        self.data: list[tuple[str, list[str]]] = found._get_summary_data()
        vars(self).update((name, getattr(found, name)) for name in _SHOWN)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.data


def summarize_before(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> None:
    """Keep what summaries say of a module that is to be laid out, for all Trainers that will fit it."""
    module.__dict__[_BEFORE] = _Before(module, {callback._max_depth for callback in _summaries(callbacks)})


class _Before:
    """Summaries by their depth; in an object of ours, as a dict would be taken for the module's state."""

    def __init__(self, module: pl.LightningModule, depths: set[int]) -> None:
        self.by_depth = {
            depth: (_on_fake_tensors(module, depth) if depths else None) or _without_a_run(module, depth)
            for depth in depths or {1}
        }


def _on_fake_tensors(module: pl.LightningModule, depth: int) -> _Whole | None:
    """The summary of a run on the module's example, computing nothing; ``None`` if there is none, or it fails."""
    if module.example_input_array is None:
        return None
    modes = {part: part.training for part in module.modules()}
    try:
        with restoring_state(module), on_fake_tensors(module.parameters()):
            return _Whole(module, depth)
    except Exception:
        return None  # finding the blocks warns of the reason
    finally:
        for part, mode in modes.items():
            part.training = mode


def _without_a_run(module: pl.LightningModule, depth: int) -> _Whole:
    example, module.example_input_array = module.example_input_array, None
    try:
        found = _Whole(module, depth)
    finally:
        module.example_input_array = example
    if example is not None:
        found.data = [(title, column) for title, column in found.data if title != "FLOPs"]
    return found


def report_whole(callbacks: Iterable[pl.Callback], module: pl.LightningModule) -> None:
    """Make a Trainer's callbacks report a module that was laid out as it was before."""
    before = module.__dict__[_BEFORE].by_depth
    for callback in _summaries(callbacks):
        # of another depth, if only an earlier Trainer's is known
        found = before.get(callback._max_depth) or next(iter(before.values()))
        vars(callback)["_summary"] = partial(_repeated, found)


def _repeated(found: _Whole, *_: Any) -> _Whole:
    return deepcopy(found)


def report_placement(callbacks: Iterable[pl.Callback], layout: Layout, placement: Placement | None) -> None:
    """Print which stage has what, on rank 0, unless the Trainer's summary is off (``enable_model_summary=False``)."""
    if placement is not None and _summaries(callbacks):
        rank_zero_info(f"{layout}\n{placement}")


def _summaries(callbacks: Iterable[pl.Callback]) -> list[ModelSummary]:
    return [callback for callback in callbacks if isinstance(callback, ModelSummary) and callback._max_depth]


def share_throughput(callbacks: Iterable[pl.Callback], layout: Layout) -> None:
    """Make each device's rates its share of its model's. To be called after callbacks are set up."""
    ranks_per_model = layout.world_size // layout.data_parallel_size
    for callback in callbacks:
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                vars(throughput)["compute"] = partial(_shared, throughput, ranks_per_model)


def _shared(throughput: Throughput, ranks_per_model: int) -> dict[str, Any]:
    metrics = type(throughput).compute(throughput)
    rates = ("_per_sec", f"{throughput.separator}mfu")
    return {name: value / ranks_per_model if name.endswith(rates) else value for name, value in metrics.items()}
