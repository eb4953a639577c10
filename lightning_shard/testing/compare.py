"""Compares the records of a layout's ranks with one process's, and finds the first difference. Pure.

Tolerances: a layout changes only the order of additions, which changes a value by a few units in its last place.
Therefore each tensor may differ by ``tolerance`` times its own largest value. Three allowances go beyond that:

- A gradient that is zero in exact arithmetic (such as that of the bias of an attention's keys) is rounding error of
  values that cancel. So a gradient's scale is at least a hundredth of the step's largest gradient.
- A norm in fp32 is a sum of up to millions of squares, and gets ten times the tolerance.
- Adam divides a gradient by its own size, so if a gradient is rounding error, its step is, too. So an element's step
  may differ, relative to its size, by as much as its gradients did, which have been compared already.

Hints: the usual cause of a quantity that differs between a layout and one process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.arguments import few
from lightning_shard.testing.layouts import NamedLayout

_GRADIENTS_FLOOR = 1e-2
"""Smallest scale of a gradient, relative to the step's largest gradient."""
_NORMS = 10.0
"""Factor on the tolerance for the gradient norm."""
_DEVIATION = 0.1
"""Smallest scale of a running mean, relative to its standard deviation."""
_FLOOR = 1e-6
"""Smallest scale of anything else."""


@dataclass
class Moment:
    """What one rank recorded at one moment of a run.

    Attributes:
        outputs: What a step returned to hooks, leaf by leaf.
        logs: ``trainer.callback_metrics`` and ``trainer.logged_metrics``.
        gradients: The full gradients of the rank's stage before the optimizer's step; without those that are zero.
        norm: The norm of all gradients.
        state: The full parameters and buffers of the rank's stage that a checkpoint would hold.
        weight: The weight of the loss of the rank's part of the batch, by ``loss_weight``.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0


Record = dict[str, Moment]
"""Moments by name, in chronological order."""


@dataclass
class Facts:
    """Facts about a module, found by running it on one process; used for hints.

    Attributes:
        draws: Modules whose settings say that they drop values in training, by name and class.
        batch_norms: Names of layers that compute statistics over a batch.
        has_plan: Whether the module declares a tensor-parallel plan.
    """

    draws: list[str] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    has_plan: bool = False


@dataclass(frozen=True)
class Apart:
    """One quantity that differs.

    Attributes:
        kind: ``"output"``, ``"log"``, ``"gradient"``, ``"gradient norm"`` or ``"state"``.
        name: The quantity's name within its kind.
        expected, found: Texts of both values.
        ranks: The ranks that have it; empty if no rank has it.
        relative: The largest difference, relative to the scale that the tolerance refers to; ``inf`` for another shape
            or type, or a missing value.
    """

    kind: str
    name: str
    expected: str
    found: str
    ranks: tuple[int, ...]
    relative: float

    def __str__(self) -> str:
        return f"the {self.kind}" + (f" {self.name!r}" if self.name else "")


@dataclass(frozen=True)
class Parting:
    """The first moment at which anything differs, and everything that differs then: outputs, logs, gradients, state."""

    moment: str
    apart: list[Apart]


def first_parting(
    plain: Record,
    ranks: Sequence[Record],
    layout: NamedLayout,
    tolerance: float,
    ignore_logs: Sequence[str] = (),
) -> Parting | None:
    """Compare moment by moment; returns the first that differs, or None.

    Args:
        plain: One process's record.
        ranks: The layout's records by rank.
        layout: The layout.
        tolerance: Relative tolerance; ``inf`` compares only names, shapes and types.
        ignore_logs: Patterns of the names of logs that aren't compared.
    """
    steps = _Steps()
    for moment, expected in plain.items():
        missing = tuple(rank for rank, record in enumerate(ranks) if moment not in record)
        if missing:
            return Parting(moment, [Apart("moment", moment, "it came", "it never came", missing, math.inf)])
        found = [record[moment] for record in ranks]
        apart = _once_each(_all_apart(expected, found, layout, tolerance, steps))
        apart = [each for each in apart if each.kind != "log" or not any_matches(each.name, ignore_logs)]
        if apart:
            return Parting(moment, apart)
    return None


def any_matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _once_each(apart: Iterator[Apart]) -> list[Apart]:
    """Merge a quantity's differences on several ranks to one: the first rank's, with all ranks of the same value."""
    kept: dict[tuple[str, str], Apart] = {}
    for one in apart:
        first = kept.setdefault((one.kind, one.name), one)
        if first is not one and first.found == one.found:
            kept[one.kind, one.name] = replace(first, ranks=(*first.ranks, *one.ranks))
    return [*kept.values()]


def _all_apart(
    expected: Moment, found: Sequence[Moment], layout: NamedLayout, tolerance: float, steps: _Steps
) -> Iterator[Apart]:
    for ranks in _columns(layout):
        yield from _outputs_apart(expected.outputs, [found[rank] for rank in ranks], ranks, tolerance)
    for ranks in _columns(layout):
        yield from _logs_apart(expected.logs, [found[rank] for rank in ranks], ranks, tolerance)

    stages = [(rank, found[rank]) for rank in range(layout.world_size) if keeps(layout, rank)]
    largest = max((_scale(gradient) for gradient in expected.gradients.values()), default=0.0)
    gradients = _union([(rank, moment.gradients) for rank, moment in stages])
    zeros = {name: torch.zeros_like(t) for name, t in [*expected.gradients.items(), *gradients.values.items()]}
    wanted = {**zeros, **expected.gradients}  # None counts as zeros
    gradients.values = {**zeros, **gradients.values}
    yield from _tensors_apart("gradient", wanted, gradients, tolerance, _GRADIENTS_FLOOR * largest)
    if expected.norm is not None:
        for rank, norm in enumerate(moment.norm for moment in found):
            if apart := _apart("gradient norm", "", expected.norm, norm, (rank,), _NORMS * tolerance, _FLOOR):
                yield apart
    state = _union([(rank, moment.state) for rank, moment in stages])
    allowed = {**steps.allowance(expected, gradients.values, state.values), **_of_means(expected.state, tolerance)}
    yield from _tensors_apart("state", expected.state, state, tolerance, _FLOOR, allowed)


def _of_means(state: Mapping[str, Tensor], tolerance: float) -> dict[str, Tensor]:
    variances = {
        name: state.get(name.replace("running_mean", "running_var")) for name in state if "running_mean" in name
    }
    return {name: tolerance * _DEVIATION * v.double().sqrt() for name, v in variances.items() if v is not None}


# Which ranks hold what


def _columns(layout: NamedLayout) -> list[tuple[int, ...]]:
    """For each coordinate on the other axes, its data ranks in order; together they have the whole batch."""
    columns: dict[tuple[int, int, int], list[int]] = {}
    for rank in range(layout.world_size):
        place = layout.at(rank)
        columns.setdefault((place.pipeline_rank, place.context_rank, place.tensor_rank), []).append(rank)
    return [tuple(sorted(ranks, key=lambda rank: layout.at(rank).data_rank)) for ranks in columns.values()]


def keeps(layout: NamedLayout, rank: int) -> bool:
    place = layout.at(rank)
    return place.data_rank == place.context_rank == place.tensor_rank == 0


@dataclass
class _Union:
    """The union of the stages' tensors, and the ranks that have each."""

    values: dict[str, Tensor]
    ranks: dict[str, tuple[int, ...]]


def _union(parts: Sequence[tuple[int, Mapping[str, Tensor]]]) -> _Union:
    union = _Union({}, {})
    for rank, part in parts:
        union.values.update(part)
        union.ranks.update({name: (*union.ranks.get(name, ()), rank) for name in part})
    return union


# Kinds of quantities


def _outputs_apart(
    expected: Mapping[str, Any], parts: Sequence[Moment], ranks: tuple[int, ...], tolerance: float
) -> Iterator[Apart]:
    for name, value in expected.items():
        own = [part.outputs[name] for part in parts if name in part.outputs]
        if len(own) < len(parts):
            if len(parts) == 1:  # with several data ranks, lists have other entries
                yield Apart("output", name, _shown(value), "nothing", ranks, math.inf)
            continue
        ways = _joined(own, [part.weight for part in parts])
        yield from _apart_in_all_ways("output", name, value, ways, ranks, tolerance)


def _apart_in_all_ways(
    kind: str, name: str, value: Any, ways: Sequence[Any], ranks: tuple[int, ...], tolerance: float
) -> Iterator[Apart]:
    found = [_apart(kind, name, value, way, ranks, tolerance, _FLOOR) for way in ways]
    if found and all(found):
        assert found[0] is not None
        yield found[0]


def _joined(parts: list[Any], weights: list[float]) -> list[Any]:
    """Join what data ranks returned to what one process may have returned: candidates, the likeliest first."""
    first = parts[0]
    if len(parts) == 1:
        return parts
    if isinstance(first, Tensor) and first.ndim:
        has_mean = first.is_floating_point() or first.is_complex()
        same = has_mean and all(part.shape == first.shape for part in parts)
        together = all(part.shape[1:] == first.shape[1:] for part in parts)
        return [*([torch.cat(parts)] if together else []), *([torch.stack(parts).mean(0)] if same else [])]
    if isinstance(first, list):
        return [[entry for part in parts for entry in part]]
    if isinstance(first, (float, complex)):
        return [_mean(parts, weights), *([_mean(parts, [1.0] * len(parts))] if len(set(weights)) > 1 else [])]
    if isinstance(first, int) and not isinstance(first, bool):
        return [sum(parts), *([first] if parts.count(first) == len(parts) else [])]
    return [first] if all(part == first for part in parts) else []


def _logs_apart(
    expected: Mapping[str, float], parts: Sequence[Moment], ranks: tuple[int, ...], tolerance: float
) -> Iterator[Apart]:
    for name, value in expected.items():
        told = [part for part in parts if name in part.logs]
        if not told and 0 not in ranks:
            continue  # rank_zero_only
        ways = _joined([part.logs[name] for part in told], [part.weight for part in told]) if told else [None]
        yield from _apart_in_all_ways("log", name, value, ways, ranks, tolerance)
    for name in sorted({name for part in parts for name in part.logs} - expected.keys()):
        yield Apart("log", name, "nothing", _shown(parts[0].logs.get(name)), ranks, math.inf)


def _mean(parts: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted mean without parts of weight 0, which may be NaN; the plain mean if all weights are 0."""
    counted = [(part, weight) for part, weight in zip(parts, weights) if weight] or [(part, 1.0) for part in parts]
    return sum(part * weight for part, weight in counted) / sum(weight for _, weight in counted)


def _tensors_apart(
    kind: str,
    expected: Mapping[str, Tensor],
    found: _Union,
    tolerance: float,
    floor: float,
    allowed: Mapping[str, Tensor] | None = None,
) -> Iterator[Apart]:
    for name, value in expected.items():
        more = allowed.get(name) if allowed else None
        if apart := _apart(
            kind, name, value, found.values.get(name), found.ranks.get(name, ()), tolerance, floor, more
        ):
            yield apart
    for name in sorted(found.values.keys() - expected.keys()):
        yield Apart(kind, name, "nothing", _shown(found.values[name]), found.ranks[name], math.inf)


class _Steps:
    """Tracks how far each parameter's elements may have diverged by steps along gradients that are rounding error."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Tensor, Tensor]] = {}
        self._unsure: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._allowed: dict[str, Tensor] = {}

    def allowance(
        self, expected: Moment, gradients: Mapping[str, Tensor], state: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        for name in expected.gradients.keys() & gradients.keys():
            one, other = _doubles(expected.gradients[name]), _doubles(gradients[name])
            if one.shape == other.shape:
                size = torch.maximum(one.abs(), other.abs())
                relative = torch.where(size > 0, (one - other).abs() / size.clamp_min(1e-300), 0.0)
                self._unsure[name] = torch.maximum(self._unsure.get(name, relative), relative)
        for name in expected.state.keys() & state.keys():
            now = _doubles(expected.state[name]), _doubles(state[name])
            before, self._before[name] = self._before.get(name), now
            unsure = self._unsure.get(name)
            if before is None or unsure is None or not now[0].shape == now[1].shape == unsure.shape:
                continue
            step = (now[0] - before[0]).abs() + (now[1] - before[1]).abs()
            # a step may be a difference of momenta, far smaller than these and their uncertainty: use the largest step
            self._largest[name] = torch.maximum(self._largest.get(name, step), step)
            self._allowed[name] = self._allowed.get(name, torch.zeros(())) + 2 * unsure * self._largest[name]
        return self._allowed


# One quantity


def _apart(
    kind: str,
    name: str,
    expected: Any,
    found: Any,
    ranks: tuple[int, ...],
    tolerance: float,
    floor: float,
    allowed: Tensor | None = None,
) -> Apart | None:
    def apart(relative: float = math.inf) -> Apart:
        return Apart(kind, name, _shown(expected), _shown(found), ranks, relative)

    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return apart()
        one, other = _doubles(expected), _doubles(found)
    elif isinstance(expected, (float, complex)) and isinstance(found, Number):
        one, other = (_doubles(torch.tensor(value, dtype=torch.complex128)) for value in (expected, found))
    elif isinstance(expected, (str, bytes, int, bool, list, type(None))):
        different = expected != found and tolerance < math.inf
        return apart() if different or type(expected) is not type(found) else None
    else:
        return apart()
    if not one.numel():
        return None
    if not torch.equal(one.isfinite(), other.isfinite()):
        return apart() if tolerance < math.inf else None
    difference = (one - other).nan_to_num(0.0).abs()
    scale = max(_scale(one), floor, 1e-300)
    excess = difference - (allowed if allowed is not None else 0.0)
    relative = float(excess.max()) / scale
    if relative <= tolerance:
        return None
    return apart(float(difference.max()) / scale)


def _doubles(tensor: Tensor) -> Tensor:
    """Convert to float64; a complex number becomes two elements."""
    dense = tensor.to_dense().resolve_conj()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double()


def _scale(tensor: Tensor) -> float:
    values = _doubles(tensor.detach()).nan_to_num(0.0, 0.0, 0.0).abs()
    return float(values.max()) if values.numel() else 0.0


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, (Tensor, np.ndarray)):
        shape = "×".join(map(str, value.shape)) or "no dimensions"
        values = torch.as_tensor(value).to_dense().flatten()
        start = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in values[:4].tolist())
        return f"{str(value.dtype).removeprefix('torch.')} of {shape}: {start}{', …' if values.numel() > 4 else ''}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"


def hint(parting: Parting, facts: Facts, layout: NamedLayout) -> str:
    """A sentence or two about the likeliest cause."""
    stages = layout.arguments.get("pipeline_parallel_size", 1)
    data = layout.arguments.get("data_parallel_size", 1)
    parts = data * (layout.arguments.get("microbatches") or 2 * stages if stages > 1 else 1)
    kinds = {apart.kind for apart in parting.apart}

    if parting.moment == "before training":
        return (
            "make_module must draw its weights from the global generators of torch, numpy and random alone, which are"
            " seeded before it is called."
        )
    if facts.batch_norms and parts > 1:
        return (
            f"{few(facts.batch_norms, 3)} computes statistics over the samples of one call, here a part of the batch:"
            " use GroupNorm or LayerNorm, or microbatches=1 on stages, or accept the difference."
        )
    if facts.draws:
        return f"Random numbers are drawn by {few(facts.draws, 3)}; each layout draws others: turn that off here."
    if kinds == {"log"}:
        return (
            "Everything else is equal then, so the difference comes from what is logged, and how; ignore_logs='*'"
            f" compares the rest. A step runs for each of {parts} parts of a batch: self.log averages over a data"
            " rank's (a count of samples becomes that of a part; reduce_fx sums over parts, not batches),"
            " sync_dist=True over data ranks, and what a step keeps itself after calling the network is kept once for"
            " each part."
        )
    if parts > 1 and kinds & {"output", "gradient", "gradient norm"}:
        return (
            f"The step sees one of {parts} parts of a batch at a time, whose losses and numbers are averaged: a sum"
            " (reduction='sum') becomes a mean of sums, a mean over what counts (targets of -100, a mask) weighs each"
            " part alike, unless HybridShardStrategy(loss_weight=…) weighs them, and a loss that compares samples has"
            " another value."
        )
    if layout.arguments.get("tensor_parallel_size", 1) > 1:
        return (
            "Look at the tensor-parallel plan: what is split by features (colwise) must meet the layer that is split by"
            " its input (rowwise), and what runs between them must work on each feature by itself."
        )
    return (
        "If nothing in the module explains it, please report it with this text; with a precision of 16 bits, try"
        " tolerance=0.01 before."
    )
