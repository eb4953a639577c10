"""Makes Lightning's ModelSummary, plain and rich, report the whole model, with a column for this rank's part.

The callbacks see the module only after it is laid out. Of one that is cut into stages, or whose layers are split, sizes
and operations are those of a run on fake tensors before that, also in the fits of later Trainers. Where the example
can't run on these, they are left out. Where summaries are on, the table of what each stage has is printed too.

Private in Lightning 2.6, used here: the callbacks' ``_summary`` and ``_max_depth``, and a summary's
``_get_summary_data`` and ``_layer_summary``. The column's title is one that the rich summary knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import ModelSummary as Summary
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
"""The attribute under which a module that was laid out keeps what it was like before."""
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
    def of(cls, found: Summary) -> WholeSummary:
        counts = (found.total_parameters, found.trainable_parameters, found.model_size)
        return cls(found._get_summary_data(), *counts, found.total_training_modes, found.total_flops)

    def _get_summary_data(self) -> list[tuple[str, list[str]]]:
        return self.data


class SummaryBefore:
    """What summaries of any depth say of a module before it is laid out.

    Args:
        module: Not laid out yet.
        runs: Also run it on its example, for sizes and operations.
    """

    def __init__(self, module: pl.LightningModule, *, runs: bool) -> None:
        self._counts = {name: parameter.numel() for name, parameter in module.named_parameters()}
        self._of_depth = (_on_fake_tensors(module) if runs else None) or _without_a_run(module)

    def report_by(self, callbacks: Iterable[pl.Callback], gather_over_stages: Callable[[Any], list[Any]]) -> None:
        """Make the callbacks of a Trainer that fits the module report this."""
        for callback in _summaries(callbacks):
            vars(callback)["_summary"] = partial(self._completed, callback._max_depth, gather_over_stages)

    def _completed(
        self,
        depth: int,
        gather_over_stages: Callable[[Any], list[Any]],
        _trainer: pl.Trainer,
        module: pl.LightningModule,
    ) -> WholeSummary:
        deepest = max(self._of_depth)
        whole = deepcopy(self._of_depth[min(depth, deepest) if depth > 0 else deepest])
        trained = gather_over_stages([name for name, p in module.named_parameters() if p.requires_grad])
        whole.trainable_parameters = sum(self._counts[name] for name in {name for names in trained for name in names})
        return _beside(whole, module)


class _OfEveryDepth(Summary):
    """A summary of all modules."""

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        # a child that is also held deeper has its own row in a summary of children only
        return list({**dict(super().named_modules), **dict(self._model.named_children())}.items())


def _by_depth(module: pl.LightningModule) -> dict[int, WholeSummary]:
    """Summaries of each depth, of one run of the module on its example."""
    found = _OfEveryDepth(module, max_depth=-1)
    layers, everywhere = found._layer_summary, [name for name, _ in module.named_modules() if name]
    shown = {depth: [n for n in everywhere if n.count(".") < depth] for depth in range(2, _depth(everywhere) + 1)}
    shown[1] = [name for name, _ in module.named_children()]
    summaries = {}
    for depth, names in shown.items():
        found._layer_summary = {name: layers[name] for name in names}
        summaries[depth] = WholeSummary.of(found)
    return summaries


def _depth(names: Iterable[str]) -> int:
    return max((name.count(".") + 1 for name in names), default=1)


def _on_fake_tensors(module: pl.LightningModule) -> dict[int, WholeSummary] | None:
    """The summaries of a run on the module's example, computing nothing; ``None`` if there is none, or it fails."""
    if module.example_input_array is None:
        return None
    modes = {part: part.training for part in module.modules()}
    try:
        with restoring_state(module), on_fake_tensors(module.parameters()):
            return _by_depth(module)
    except Exception:
        return None  # finding the blocks warns of the reason
    finally:
        for part, mode in modes.items():
            part.training = mode


def _without_a_run(module: pl.LightningModule) -> dict[int, WholeSummary]:
    example, module.example_input_array = module.example_input_array, None
    try:
        found = _by_depth(module)
    finally:
        module.example_input_array = example
    if example is not None:
        for each in found.values():
            each.data = [(title, column) for title, column in each.data if title != "FLOPs"]
    return found


def summarize_before(module: pl.LightningModule, callbacks: Iterable[pl.Callback]) -> None:
    """Keep what summaries say of a module that is to be cut or split, for all Trainers that will fit it."""
    module.__dict__[_BEFORE] = SummaryBefore(module, runs=bool(_summaries(callbacks)))


def report_whole(
    callbacks: Iterable[pl.Callback], module: pl.LightningModule, gather_over_stages: Callable[[Any], list[Any]]
) -> None:
    """Make a Trainer's callbacks report the whole of a module that was laid out, with this rank's part beside it."""
    before: SummaryBefore | None = module.__dict__.get(_BEFORE)
    if before is not None:
        before.report_by(callbacks, gather_over_stages)
        return
    for callback in _summaries(callbacks):
        vars(callback)["_summary"] = partial(_summarized, callback._max_depth)


def report_placement(callbacks: Iterable[pl.Callback], layout: Layout, placement: Placement | None) -> None:
    """Print which stage has what, on rank 0, unless the Trainer's summary is off (``enable_model_summary=False``)."""
    if placement is not None and _summaries(callbacks):
        rank_zero_info(f"{layout}\n{placement}")


def _summarized(depth: int, _trainer: pl.Trainer, module: pl.LightningModule) -> WholeSummary:
    found = WholeSummary.of(summarize(module, max_depth=depth))
    reshard(module)  # the summary called it on its example
    return _beside(found, module)


def _summaries(callbacks: Iterable[pl.Callback]) -> list[ModelSummary]:
    return [callback for callback in callbacks if isinstance(callback, ModelSummary) and callback._max_depth]


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
