"""All layouts of so many devices, and the fastest of those that fit.

For each pair of pipeline and tensor sizes, number of replicas and of expert ranks, microbatch, schedule and way to
checkpoint activations there is a bound that its step can't go below, cheap to compute. Layouts are simulated in the
order of their bounds until the best of those that fit can't be beaten by what is left: so the best are the best of all,
though few are simulated.

Every layout takes the same global batch for a step. With one stage, its microbatches are batches whose gradients are
accumulated. For bounds, operations and bytes of a microbatch are those of one sample and those of each further one;
what is put on a clock is counted, and if that disagrees by more than bounds are lowered for it, everything is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import lightning.pytorch as pl

from lightning_shard.dryrun.counting import count
from lightning_shard.dryrun.counts import Counts
from lightning_shard.dryrun.devices import Device
from lightning_shard.dryrun.devices import device as device_of
from lightning_shard.dryrun.found import (
    CANT_BE_COUNTED,
    CANT_BE_CUT,
    DOESNT_DIVIDE,
    DOESNT_FIT,
    SLOWER,
    TOO_FEW,
    Choice,
    Found,
)
from lightning_shard.dryrun.links import Groups
from lightning_shard.dryrun.memory import Held, Rank, Stage, usable
from lightning_shard.dryrun.model import Model
from lightning_shard.dryrun.moments import moments_of
from lightning_shard.dryrun.optimizer import OptimizerState, ask
from lightning_shard.dryrun.rates import Rates, dtype_of
from lightning_shard.dryrun.scaled import ALIKE, between, is_like, kind_of
from lightning_shard.dryrun.space import Space, divisors, layouts
from lightning_shard.dryrun.stage_time import StageTime, stage_time
from lightning_shard.dryrun.time import Timing, crossings, model_flops, ties
from lightning_shard.errors import ConfigurationError, PlacementError
from lightning_shard.layout import Layout
from lightning_shard.parallel.expert import ExpertPlan, resolve_experts
from lightning_shard.parallel.tensor import Plan as TensorPlan
from lightning_shard.parallel.tensor import resolve_plan
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.orders import build
from lightning_shard.pipeline.placement import place
from lightning_shard.pipeline.schedule import Schedule
from lightning_shard.plugin import loops
from lightning_shard.plugin.settings import Settings


def search_module(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    devices: int,
    device: str | Mapping[str, Any] | Device,
    global_batch: int,
    device_memory: int | None = None,
    most: int = 10,
    precision: str = "32-true",
    device_type: str = "cuda",
    pipeline_blocks: str | Sequence[str] | None = None,
    tensor_parallel_plan: TensorPlan | None = None,
    expert_parallel_plan: ExpertPlan | None = None,
    reduce_each_microbatch: bool = False,
    reshard_after_forward: bool | None = None,
) -> Found:
    """The fastest layouts of a module on so many devices; the other arguments are those of ``lightning_shard.plan``.

    Args:
        batch: To count on: its shapes count, and its samples are the most that a microbatch can have.
        devices: How many.
        device: A profile: its name, the path of a YAML file, or a mapping.
        global_batch: Samples of a step, of all data ranks together.
        device_memory: Bytes of each device; default: the profile's.
        most: How many to list.

    Raises:
        ConfigurationError: What a run would refuse too, or what can't be compared; says what.
    """
    profile = device_of(device)
    settings = Settings(
        "auto",
        pipeline_blocks,
        tensor_parallel_plan,
        expert_parallel_plan,
        reshard_after_forward=reshard_after_forward,
        gathered_dtype=loops.GATHERED.get(precision),
    )
    make = partial(Model.of, module, batch, settings, precision=precision, device_type=device_type)
    try:
        model = make(stages=2)
    except PlacementError:
        model = make(stages=1)  # nothing to cut between: one stage
    optimizer, _ = ask(model)
    samples = tree.batch_size(batch)
    space = Space(
        devices,
        global_batch,
        usable(profile.memory if device_memory is None else device_memory),
        most_samples=max(n for n in (1, 2, 4, 8) if samples % n == 0),
        held=Held(
            reduce_each_microbatch=reduce_each_microbatch,
            reshard_after_forward=reshard_after_forward,
            sends_stay=device_type == "cpu",
        ),
    )
    return search(model, optimizer, space, Rates(profile, dtype_of(precision)), most=most)


def search(
    model: Model,
    optimizer: OptimizerState | None,
    space: Space,
    rates: Rates,
    *,
    most: int = 10,
    exhaustively: bool = False,
) -> Found:
    """The fastest layouts that fit.

    Args:
        most: How many to list.
        exhaustively: Simulate all that fit, not only those that could be among the fastest.

    Raises:
        ConfigurationError: The step can't be counted, or numbers can't be.
    """
    for name, value in (("devices", space.devices), ("global_batch", space.global_batch), ("most", most)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} ({value!r}) must be an integer of at least 1.")
    if space.held.cpu_offload:
        raise ConfigurationError(
            "cpu_offload=True can't be searched, since an optimizer's step on the host isn't timed: leave it out, and"
            " plan the layout that was found with it."
        )
    workshop = _Workshop(model, optimizer, space, rates)
    try:
        return _searched(workshop, most, exhaustively)
    except _Unlike:
        workshop.scales = False
        return _searched(workshop, most, exhaustively)


def _searched(workshop: _Workshop, most: int, exhaustively: bool) -> Found:
    space = workshop.space
    dropped: Counter[str] = Counter()
    candidates = list(workshop.bounded(dropped))
    considered = len(candidates) + dropped.total()
    candidates.sort(key=lambda candidate: (candidate.bound, candidate.layout.tensor_parallel_size, candidate.samples))
    best: list[Choice] = []
    simulated = 0
    for number, candidate in enumerate(candidates):
        if not exhaustively and len(best) >= most and candidate.bound > _seconds(best[most - 1]):
            dropped[SLOWER] += len(candidates) - number
            break
        peak = workshop.peak(candidate)
        if peak > space.device_memory:
            dropped[DOESNT_FIT] += 1
            continue
        simulated += 1
        best.append(replace(candidate, step=workshop.timing(candidate).simulated(workshop.flops), peak_bytes=peak))
        best.sort(key=_seconds)
        if not exhaustively and len(best) > most:
            best.pop()
            dropped[SLOWER] += 1
    return Found(
        tuple(best[:most]),
        dict(dropped),
        considered,
        simulated,
        space.devices,
        workshop.rates.device.name,
        space.global_batch,
        space.device_memory,
        workshop.assumed,
        best[0].step.unknown if best and best[0].step is not None else (),
    )


def _seconds(choice: Choice) -> float:
    assert choice.step is not None
    return choice.step.step


class _Unlike(Exception):
    """A microbatch doesn't cost what one sample and further ones do."""


class _Workshop:
    """Counts, stages and orders, each made once.

    Attributes:
        scales: Whether counts for bounds are made from those of one and two samples.
    """

    def __init__(self, model: Model, optimizer: OptimizerState | None, space: Space, rates: Rates) -> None:
        self._model, self._optimizer, self.space, self.rates = model, optimizer, space, rates
        self.scales = True
        self._scaled: dict[tuple[int, int, int], Counts | None] = {}
        self._counts: dict[tuple[int, int, int], Counts | None] = {}
        self._why_not: dict[tuple[int, int], str] = {}
        self._likenesses: dict[Any, tuple[Any, ...]] = {}
        self._likes: dict[tuple[int, int], bool] = {}
        self._kinds: dict[int, dict[int, int]] = {}
        self._stages: dict[Any, Stage] = {}
        self._times: dict[Any, StageTime] = {}
        self._peaks: dict[Any, int] = {}
        self._placed: dict[int, list[range]] = {}
        self._ties: dict[Any, list[tuple[int, int, int]]] = {}
        one = self._of(1, 1, 1)
        if one is None or not one.counted:
            reason = one.reason if one is not None else CANT_BE_CUT
            raise ConfigurationError(
                f"Layouts can't be compared, since the step can't be counted on fake tensors ({reason}): change that,"
                " or plan single layouts."
            )
        self.flops = model_flops(one)
        self.assumed = (*rates.device.assumptions, *one.assumed)

    # -- what there is

    def bounded(self, dropped: Counter[str]) -> Iterator[Choice]:
        """Each choice that could run, with its bound."""
        for choice in self._choices(dropped):
            yield replace(choice, bound=(1 - ALIKE) * self.timing(choice, for_bound=True).bound())

    def _choices(self, dropped: Counter[str]) -> Iterator[Choice]:
        space = self.space
        most_stages = len(self._model.blocks.names) if self._model.blocks is not None else 1
        for layout in layouts(space.devices, most_stages):
            each, left = divmod(space.global_batch, layout.data_parallel_size)
            if left:
                dropped[DOESNT_DIVIDE] += 1
                continue
            stages = layout.pipeline_parallel_size
            for samples in divisors(each):
                if samples > space.most_samples:
                    break
                microbatches = each // samples
                if microbatches < stages:
                    dropped[TOO_FEW] += 1
                    continue
                sizes = layout.tensor_parallel_size, layout.expert_parallel_size
                if self._for_bounds(*sizes, samples) is None:
                    dropped[self._why_not[sizes]] += 1
                    continue
                for schedule in space.schedules if stages > 1 else (None,):
                    for way in space.activation_checkpointing if self._model.blocks is not None else (None,):
                        yield Choice(layout, schedule, samples, microbatches, way)

    def _of(self, tensor: int, expert: int, samples: int) -> Counts | None:
        """``None``: the module can't be cut so, or not be counted then, with whatever number of samples."""
        key = tensor, expert, samples
        if key not in self._counts:
            can_be_cut = (tensor, expert) not in self._why_not and self._can_be_cut(tensor, expert)
            self._counts[key] = self._counted(*key) if can_be_cut else None
        return self._counts[key]

    def _can_be_cut(self, tensor: int, expert: int) -> bool:
        module, settings = self._model.module, self._model.settings
        try:
            experts = resolve_experts(module, settings.expert_parallel_plan, expert)
            if tensor > 1:
                resolve_plan(module, settings.tensor_parallel_plan, tensor, without=experts)
        except ConfigurationError:
            self._why_not[tensor, expert] = CANT_BE_CUT
            return False
        return True

    def _for_bounds(self, tensor: int, expert: int, samples: int) -> Counts | None:
        if samples <= 2 or not self.scales:
            return self._of(tensor, expert, samples)
        key = tensor, expert, samples
        if key not in self._scaled:
            one, two = self._of(tensor, expert, 1), self._of(tensor, expert, 2)
            self._scaled[key] = None if one is None or two is None else between(one, two, samples)
        return self._scaled[key]

    def _counted(self, tensor: int, expert: int, samples: int) -> Counts | None:
        batch = self._model.batch
        if tree.batch_size(batch) % samples:
            raise ConfigurationError(
                f"The batch to count on has {tree.batch_size(batch)} samples, and a microbatch of {samples} is to be"
                " counted: pass a batch whose size is a multiple of 2, and of the microbatches to try."
            )
        try:
            counts = count(self._model, tensor_parallel_size=tensor, expert_parallel_size=expert, samples=samples)
        except ConfigurationError:
            if tensor == expert == 1:
                raise
            self._why_not[tensor, expert] = CANT_BE_CUT
            return None
        if counts.counted or tensor == expert == 1:  # of the whole module it is said why
            return counts
        # what was cut may fail to run, as heads that don't divide do
        sizes = f"tensor_parallel_size={tensor}" + (f" expert_parallel_size={expert}" if expert > 1 else "")
        self._why_not[tensor, expert] = f"{CANT_BE_COUNTED} ({sizes}: {counts.reason})"
        return None

    # -- of one choice

    def timing(self, choice: Choice, *, for_bound: bool = False) -> Timing:
        counts, layout, schedule, held = self._parts(choice, for_bound=for_bound)
        groups = Groups(layout, self.rates.device.per_machine)
        blocks = self._blocks(layout.pipeline_parallel_size)
        stages = self._stages_of(choice, counts, held)
        key_of_ties = id(counts), layout.shard_size, len(blocks)
        if key_of_ties not in self._ties:
            self._ties[key_of_ties] = ties(counts, layout, blocks)
        return Timing(
            counts,
            layout,
            schedule,
            held,
            self.rates,
            groups,
            [stage for _, stage in stages],
            [self._time(key, stage, layout, counts.samples, held, groups) for key, stage in stages],
            crossings(counts, blocks),
            self._ties[key_of_ties],
        )

    def peak(self, choice: Choice) -> int:
        """Bytes of the fullest stage; or less, where that is too much already."""
        counts, _, schedule, held = self._parts(choice)
        stages = self._stages_of(choice, counts, held)
        flights = _flights(schedule.name, len(schedule.rows), schedule.microbatches)
        least = max(_least(stage, flight, counts) for (_, stage), flight in zip(stages, flights))
        if least > self.space.device_memory:
            return least
        # of stages alike, the one that keeps most microbatches
        fullest: dict[Any, int] = {}
        for rank, (key, _) in enumerate(stages):
            if key not in fullest or flights[rank] > flights[fullest[key]]:
                fullest[key] = rank
        return max(
            self._peak(key, stages[rank][1], schedule, rank, flights[rank], counts) for key, rank in fullest.items()
        )

    def _peak(self, key: Any, stage: Stage, schedule: Schedule, rank: int, flight: int, counts: Counts) -> int:
        """Microbatches after the first few are as these: what is kept has grown to its most by then."""
        enough = schedule.microbatches if stage.held.sends_stay else min(schedule.microbatches, flight + 2)
        later = (schedule.microbatches - enough) * counts.batch_bytes
        known = key, schedule.name, len(schedule.rows), rank, enough
        if known not in self._peaks:
            moments = moments_of(Rank({rank: stage}, schedule.first(enough), rank))
            self._peaks[known] = max(moment.total for moment in moments)
        return self._peaks[known] + later

    def _parts(self, choice: Choice, *, for_bound: bool = False) -> tuple[Counts, Layout, Schedule, Held]:
        """What a choice is made of.

        Raises:
            _Unlike: Its microbatch costs something else than was taken for its bound.
        """
        layout = choice.layout
        sizes = layout.tensor_parallel_size, layout.expert_parallel_size, choice.samples
        bounding = self._for_bounds(*sizes)
        counts = bounding if for_bound else self._of(*sizes)
        assert counts is not None
        assert bounding is not None
        if counts is not bounding and not self._is_like(counts, bounding):
            raise _Unlike
        several = choice.schedule is not None
        microbatches = choice.microbatches if several else 1
        schedule = _order(choice.schedule or "1F1B", layout.pipeline_parallel_size, microbatches)
        held = replace(
            self.space.held,
            activation_checkpointing=choice.activation_checkpointing,
            accumulates=1 if several else choice.microbatches,
        )
        return counts, layout, schedule, held

    def _is_like(self, counted: Counts, scaled: Counts) -> bool:
        key = id(counted), id(scaled)
        if key not in self._likes:
            self._likes[key] = is_like(counted, scaled)
        return self._likes[key]

    def _blocks(self, stages: int) -> list[range]:
        if stages not in self._placed:
            cost = self._model.cost
            placed = place(cost, stages, "auto" if stages > 1 else "even").stages if cost is not None else ()
            self._placed[stages] = [stage.blocks for stage in placed] or [range(0)]
        return self._placed[stages]

    def _stages_of(self, choice: Choice, counts: Counts, held: Held) -> list[tuple[Any, Stage]]:
        """The stages, each with what is equal for stages that cost the same: of these there is one."""
        layout = choice.layout
        several = layout.pipeline_parallel_size > 1
        found = []
        for blocks in self._blocks(layout.pipeline_parallel_size):
            key = (
                *(id(counts), layout.shard_size, layout.expert_parallel_size, several, held.accumulates),
                *(choice.activation_checkpointing, self._alike(counts, blocks)),
            )
            if key not in self._stages:
                self._stages[key] = Stage(counts, layout, blocks, held, self._optimizer)
            found.append((key, self._stages[key]))
        return found

    def _time(self, key: Any, stage: Stage, layout: Layout, samples: int, held: Held, groups: Groups) -> StageTime:
        known = key, layout.data_parallel_replicas
        if known not in self._times:
            self._times[known] = stage_time(stage, samples, held, groups, self.rates)
        return self._times[known]

    def _alike(self, counts: Counts, blocks: range) -> tuple[Any, ...]:
        """Equal for stages whose blocks cost the same, with the same parts around them.

        Every n-th block is recomputed: a block's place is part of it where that is a setting.
        """
        if (id(counts), blocks) in self._likenesses:
            return self._likenesses[id(counts), blocks]
        kinds = self._kinds.get(id(counts))
        if kinds is None:
            numbers: dict[Any, int] = {}
            kinds = {
                place: numbers.setdefault(kind_of(block), len(numbers)) for place, block in enumerate(counts.blocks)
            }
            self._kinds[id(counts)] = kinds
        whole = len(counts.blocks)
        places = range(blocks.start, blocks.stop + (blocks.stop == whole))
        around = tuple(place for place, _ in counts.parts if place in places)
        ways = self.space.activation_checkpointing
        placed = blocks if any(isinstance(way, int) and not isinstance(way, bool) for way in ways) else None
        received = counts.blocks[blocks.start - 1].output if blocks.start else 0
        likeness = tuple(kinds[place] for place in blocks), around, placed, received, blocks.stop == whole
        self._likenesses[id(counts), blocks] = likeness
        return likeness


def _least(stage: Stage, flight: int, counts: Counts) -> int:
    """Bytes that a stage holds at least when it has begun its last of so many forwards that are in flight."""
    kept = sum(cost.kept for cost in stage.costs)
    gathered = stage.root.gathered + (sum(u.gathered for u in stage.units.values()) if stage.keeps_gathered else 0)
    held = sum(unit.held for unit in stage.all_units) + stage.state_bytes
    return held + gathered + flight * stage.received + (flight - 1) * kept


@lru_cache(maxsize=256)
def _order(name: str, ranks: int, microbatches: int) -> Schedule:
    return build(name, ranks, microbatches)


@lru_cache(maxsize=256)
def _flights(name: str, ranks: int, microbatches: int) -> list[int]:
    schedule = _order(name, ranks, microbatches)
    return [schedule.in_flight(rank) for rank in range(ranks)]
