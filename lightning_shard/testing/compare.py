"""Where the ranks of a layout first compute something else than one process did. Pure: records in, a difference out.

Tolerances. A layout changes only the order in which numbers are added, which moves a value by a few units in its last
place. What that means depends on the tensor: each is held to ``tolerance`` times its own largest value. Three things
are allowed for beyond that:

- A gradient that should be zero (the bias of an attention's keys, say) is rounding of values that cancel: the scale of
  a gradient is at least a hundredth of the step's largest.
- A norm in fp32 is a sum of up to millions of squares: ten times the tolerance.
- Adam divides a gradient by its own size, so where a gradient is rounding, so is the step: an element's step may differ
  by as much, relative to its size, as its gradients did, which have been compared before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.testing.layouts import NamedLayout

_GRADIENTS_FLOOR = 1e-2
"""The least scale of a gradient, relative to the largest of the step."""
_NORMS = 10.0
"""So many times the tolerance is allowed for the norm."""
_DEVIATION = 0.1
"""The least scale of a running mean, relative to its standard deviation."""
_FLOOR = 1e-6
"""The least scale of anything else."""


@dataclass
class Moment:
    """What one rank held at one moment of a run.

    Attributes:
        outputs: What a step returned and hooks got, leaf by leaf.
        logs: ``trainer.callback_metrics`` and ``trainer.logged_metrics``.
        gradients: Whole ones of the rank's stage, before the optimizer's step; where they are not zero.
        norm: Of all gradients.
        state: Parameters and buffers that a checkpoint would hold of the rank's stage, whole.
        weight: How much the loss of the rank's part of the batch counts, by ``loss_weight``.
    """

    outputs: dict[str, Any] = field(default_factory=dict)
    logs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float | None = None
    state: dict[str, Tensor] = field(default_factory=dict)
    weight: float = 1.0


Record = dict[str, Moment]
"""By the moment's name, in the order of time."""


@dataclass
class Facts:
    """What is known of a module and its batches from running it on one process; for hints.

    Attributes:
        draws: What draws random numbers in training, by name and class.
        batch_norms: Names of layers that take statistics over a batch.
        padded: What in the batches says that samples count unequally; empty where nothing does.
        has_plan: Whether it brings a tensor-parallel plan.
        precision: The Trainer's.
    """

    draws: list[str] = field(default_factory=list)
    batch_norms: list[str] = field(default_factory=list)
    padded: str = ""
    has_plan: bool = False
    precision: str = "32-true"


@dataclass(frozen=True)
class Apart:
    """One quantity that differs.

    Attributes:
        kind: ``"output"``, ``"log"``, ``"gradient"``, ``"gradient norm"`` or ``"state"``.
        name: Of the quantity within its kind.
        ranks: Where it was found; empty where it is missing on all.
        relative: The largest difference relative to the scale that the tolerance is of; ``inf`` for another shape or
            type, or none at all.
        ratio: What the expected value has to be multiplied with, if that is all.
    """

    kind: str
    name: str
    expected: str
    found: str
    ranks: tuple[int, ...]
    relative: float
    ratio: float | None = None

    def __str__(self) -> str:
        return f"the {self.kind}" + (f" {self.name!r}" if self.name else "")


@dataclass(frozen=True)
class Parting:
    """The first moment at which anything differs, and all that does then: outputs, logs, gradients, state."""

    moment: str
    apart: list[Apart]


def first_parting(plain: Record, ranks: Sequence[Record], layout: NamedLayout, tolerance: float) -> Parting | None:
    """Compare moment by moment.

    Args:
        plain: One process's.
        ranks: By rank.
        tolerance: Relative; ``inf`` compares names, shapes and types only.
    """
    steps = _Steps()
    for moment, expected in plain.items():
        missing = tuple(rank for rank, record in enumerate(ranks) if moment not in record)
        if missing:
            return Parting(moment, [Apart("moment", moment, "it came", "it never came", missing, math.inf)])
        found = [record[moment] for record in ranks]
        apart = _once_each(_all_apart(expected, found, layout, tolerance, steps))
        if apart:
            return Parting(moment, apart)
    return None


def _once_each(apart: Iterator[Apart]) -> list[Apart]:
    """A quantity that differs on several ranks is one, as found on the first of them and those that found the same."""
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
    wanted = {**zeros, **expected.gradients}  # a gradient of None is one of zeros
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


# Who holds what


def _columns(layout: NamedLayout) -> list[tuple[int, ...]]:
    """For each place beside the data axis, its data ranks in order: together they have the whole batch."""
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
    """What the stages have together, and on which ranks each is."""

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
            if len(parts) == 1:  # lists of several data ranks have other entries
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
    """What data ranks returned, as one process may have returned it for all: the likeliest way first."""
    first = parts[0]
    if len(parts) == 1:
        return parts
    if isinstance(first, Tensor) and first.ndim:
        same = all(part.shape == first.shape for part in parts) and first.is_floating_point()
        together = all(part.shape[1:] == first.shape[1:] for part in parts)
        return [*([torch.cat(parts)] if together else []), *([torch.stack(parts).mean(0)] if same else [])]
    if isinstance(first, list):
        return [[entry for part in parts for entry in part]]
    if isinstance(first, float):
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
    """Of those that count, since a mean over nothing may be NaN; of all, where none does."""
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
    """How far each parameter's elements may have parted by steps along gradients that are rounding."""

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
            # a step is the difference of momenta, which may be far smaller than they and what is unsure of them
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
    def apart(relative: float = math.inf, ratio: float | None = None) -> Apart:
        return Apart(kind, name, _shown(expected), _shown(found), ranks, relative, ratio)

    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.shape != found.shape or expected.dtype != found.dtype:
            return apart()
        one, other = _doubles(expected), _doubles(found)
    elif isinstance(expected, float) and isinstance(found, Number):
        one, other = torch.tensor(expected).double(), torch.tensor(float(found)).double()  # type: ignore[arg-type]
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
    return apart(float(difference.max()) / scale, _ratio(one, other))


def _doubles(tensor: Tensor) -> Tensor:
    """In 64 bits; a complex number is two."""
    dense = tensor.to_dense()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double()


def _scale(tensor: Tensor) -> float:
    values = _doubles(tensor.detach()).nan_to_num(0.0, 0.0, 0.0).abs()
    return float(values.max()) if values.numel() else 0.0


def _ratio(one: Tensor, other: Tensor) -> float | None:
    one, other = one.flatten().nan_to_num(0.0, 0.0, 0.0), other.flatten().nan_to_num(0.0, 0.0, 0.0)
    square = float(one @ one)
    if not square:
        return None
    ratio = float(one @ other) / square
    return ratio if _scale(other - ratio * one) <= 1e-3 * _scale(other) else None


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.8g}"
    if isinstance(value, (Tensor, np.ndarray)):
        shape = "×".join(map(str, value.shape)) or "no dimensions"
        values = torch.as_tensor(value).flatten()
        start = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in values[:4].tolist())
        return f"{str(value.dtype).removeprefix('torch.')} of {shape}: {start}{', …' if values.numel() > 4 else ''}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
