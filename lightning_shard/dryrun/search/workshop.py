"""Caches of a search: counts, stages, times and schedules, each computed once for all candidates that share it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import accumulate, zip_longest
from typing import Any

from lightning_shard import tree
from lightning_shard.dryrun.counting.count import count_each, count_two_parts
from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.moments import moments_of
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import Held, Rank, Stage
from lightning_shard.dryrun.search.found import (
    CANT_BE_COUNTED,
    CANT_BE_CUT,
    DOESNT_DIVIDE,
    NOT_IN_PARTS,
    TOO_FEW,
    TOO_FEW_BLOCKS,
    Choice,
)
from lightning_shard.dryrun.search.scaled import ALIKE, between, is_like, kind_of
from lightning_shard.dryrun.search.space import Space, divisors, layouts
from lightning_shard.dryrun.timing.layout import LEFT_OUT, Timing, crossings, model_flops, ties
from lightning_shard.dryrun.timing.links import Groups
from lightning_shard.dryrun.timing.rates import Rates
from lightning_shard.dryrun.timing.stage import StageTime, stage_time
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.parallel.experts.stacked import resolve_experts
from lightning_shard.parallel.tensor.plan import resolve_plan
from lightning_shard.pipeline.placement import Policy, place
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.placing import as_run
from lightning_shard.plugin.steps.schedule_choice import against_parts

ORDERS_KEPT = 32
"""Size of the cache of schedules; one of 64 stages and a thousand microbatches takes 20 MB."""


MAY_BE_LESS = 0.05
"""Margin for dropping a candidate by extrapolated memory: exact counts may be lower by this fraction."""


class Unlike(Exception):
    """A microbatch's exact counts differ from those extrapolated from one and two samples."""


class Workshop:
    """Computes and caches counts, stages, times and schedules of a search's candidates.

    Attributes:
        scales: Whether counts for bounds are extrapolated from those of one and two samples.
    """

    def __init__(self, model: Model, optimizer: OptimizerState, space: Space, rates: Rates) -> None:
        self._model, self._optimizer, self.space, self.rates = model, optimizer, space, rates
        self.scales = True
        self._scaled: dict[tuple[int, int, int], Counts | None] = {}
        self._counts: dict[tuple[int, int, int], Counts | None] = {}
        self._parted: dict[tuple[int, int, int], Counts | None] = {}
        self._why_not: dict[tuple[int, int], str] = {}
        self._refusals: dict[str, str] = {}  # of each axis the smallest size's: others' say mostly the same
        self._likenesses: dict[Any, tuple[Any, ...]] = {}
        self._likes: dict[tuple[int, int], bool] = {}
        self._kinds: dict[int, dict[int, int]] = {}
        self._stages: dict[Any, Stage] = {}
        self._times: dict[Any, StageTime] = {}
        self._peaks: dict[Any, int] = {}
        self._placed: dict[Any, list[range]] = {}
        self._ties: dict[Any, list[tuple[int, int, int]]] = {}
        one = self._of(1, 1, 1)
        if one is None or not one.counted:
            reason = one.reason if one is not None else CANT_BE_CUT
            raise ConfigurationError(
                f"Layouts can't be compared, since the step can't be counted on fake tensors ({reason}): change that,"
                " or plan single layouts."
            )
        self.flops = model_flops(one)
        self.assumed = (*rates.device.assumptions, *one.assumed, LEFT_OUT)

    # -- candidates

    def bounded(self, dropped: Counter[str]) -> Iterator[Choice]:
        """Yield each candidate that could run, with its lower bound; counts the dropped ones by reason."""
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
                        why_not = self._cant_run(schedule, stages, microbatches, way, most_stages)
                        if why_not:
                            dropped[why_not] += 1
                        else:
                            yield Choice(layout, schedule, samples, microbatches, way)

    def _cant_run(
        self, name: str | None, ranks: int, microbatches: int, way: Recomputing, most_stages: int
    ) -> str | None:
        """The reason why a schedule can't be used; ``None`` if it can."""
        if name is None:
            return None
        named = SCHEDULES[name]
        if microbatches < named.microbatches * ranks:
            return TOO_FEW
        if named.usual * ranks > most_stages:
            return TOO_FEW_BLOCKS
        held = replace(self.space.held, activation_checkpointing=way)
        if _order(name, ranks, named.microbatches * ranks).splits_backwards and against_parts(vars(held)):
            return NOT_IN_PARTS
        return None

    def _of(self, tensor: int, expert: int, samples: int) -> Counts | None:
        """Exact counts; ``None`` if the module can't be cut that way, or can't be counted then."""
        key = tensor, expert, samples
        if key not in self._counts:
            can_be_cut = (tensor, expert) not in self._why_not and self._can_be_cut(tensor, expert)
            # bounds need counts of one and two samples: cut the module once for both
            both = self.scales and samples <= 2 <= self.space.most_samples
            numbers = [1, 2] if both else [samples]
            counted = self._counted(tensor, expert, numbers) if can_be_cut else []
            for number, counts in zip_longest(numbers, counted):
                self._counts[tensor, expert, number] = counts
        return self._counts[key]

    def _in_two_parts(self, tensor: int, expert: int, samples: int) -> Counts | None:
        key = tensor, expert, samples
        if key not in self._parted:
            counts = self._of(*key)
            parted = count_two_parts(self._model, counts) if counts is not None else None
            self._parted[key] = parted if parted is not None and parted.counted else None
        return self._parted[key]

    def _can_be_cut(self, tensor: int, expert: int) -> bool:
        module, settings = self._model.module, self._model.settings
        experts: list[str] | None = None
        try:
            experts = resolve_experts(module, settings.expert_parallel_plan, expert)
            if tensor > 1:
                resolve_plan(module, settings.tensor_parallel_plan, tensor, without=experts)
        except ConfigurationError as error:
            axis = "expert" if experts is None else "tensor"
            self._why_not[tensor, expert] = self._refusals.setdefault(axis, _refused(error))
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

    def _counted(self, tensor: int, expert: int, samples: Sequence[int]) -> list[Counts]:
        """Exact counts of several microbatch sizes; fewer, if one can't be counted."""
        size = tree.batch_size(self._model.batch)
        for number in samples:
            if size % number:
                raise ConfigurationError(
                    f"The batch to count on has {size} samples, and a microbatch of {number} is to be counted: pass a"
                    " batch whose size is a multiple of 2, and of the microbatches to try."
                )
        try:
            found = count_each(self._model, tensor, expert, samples)
        except ConfigurationError as error:
            if tensor == expert == 1:
                raise
            self._why_not[tensor, expert] = _refused(error)
            return []
        if found[-1].counted or tensor == expert == 1:  # for the uncut module the caller reports the reason
            return found
        # a module may be cut, and then fail to run, such as with heads that don't divide
        sizes = f"tensor_parallel_size={tensor}" + (f" expert_parallel_size={expert}" if expert > 1 else "")
        self._why_not[tensor, expert] = f"{CANT_BE_COUNTED} ({sizes}: {found[-1].reason})"
        return found[:-1]

    # -- one candidate

    def timing(self, choice: Choice, *, for_bound: bool = False) -> Timing:
        """The timing of a candidate's step.

        Args:
            choice: The candidate.
            for_bound: Use counts that may be extrapolated.
        """
        counts, layout, schedule, held = self._parts(choice, for_bound=for_bound)
        groups = Groups(layout, self.rates.device.per_machine)
        blocks = self._blocks(schedule.stages, held.activation_checkpointing)
        stages = self._stages_of(choice, counts, blocks, held)
        key_of_ties = id(counts), layout.shard_size, tuple(own.start for own in blocks)
        if key_of_ties not in self._ties:
            self._ties[key_of_ties] = ties(counts, layout, blocks)
        splits = schedule.splits_backwards
        return Timing(
            counts,
            layout,
            schedule,
            held,
            self.rates,
            groups,
            [stage for _, stage in stages],
            [self._time(key, stage, layout, counts.samples, held, groups, splits=splits) for key, stage in stages],
            crossings(counts, blocks),
            self._ties[key_of_ties],
            microbatches=choice.microbatches if choice.schedule is not None else 1,
        )

    def least_peak(self, choice: Choice) -> float:
        """A lower bound of the fullest rank's bytes, from the counts that are used for the time bound."""
        layout, samples = choice.layout, choice.samples
        counts = self._for_bounds(layout.tensor_parallel_size, layout.expert_parallel_size, samples)
        assert counts is not None
        schedule, held = self._order_of(choice), self._held_of(choice)
        stages = self._stages_of(choice, counts, self._blocks(schedule.stages, held.activation_checkpointing), held)
        least = _least_of([stage for _, stage in stages], schedule)
        return least if samples <= 2 else (1 - MAY_BE_LESS) * least

    def peak(self, choice: Choice) -> int:
        """Peak bytes of the fullest rank; or a smaller number that already exceeds the device's memory."""
        counts, layout, schedule, held = self._parts(choice)
        blocks = self._blocks(schedule.stages, held.activation_checkpointing)
        stages = self._stages_of(choice, counts, blocks, held)
        least = _least_of([stage for _, stage in stages], schedule)
        if least > self.space.device_memory:
            return least
        flights = _flights(schedule.name, len(schedule.rows), schedule.microbatches)
        own = [schedule.stages_of(rank) for rank in range(len(schedule.rows))]
        # of equal ranks with one stage each, only the one with most microbatches in flight
        fullest: dict[Any, int] = {}
        for rank, of_rank in enumerate(own):
            key = stages[of_rank[0]][0] if len(of_rank) == 1 and not schedule.splits_backwards else rank
            if key not in fullest or flights[rank] > flights[fullest[key]]:
                fullest[key] = rank

        def of(rank: int) -> int:
            """The rank's peak, from a schedule of fewer microbatches with as many in flight."""
            shorter = schedule if held.sends_stay else _shorter(schedule, flights[rank])
            later = (schedule.microbatches - shorter.microbatches) * counts.batch_bytes
            keys = tuple(stages[s][0] for s in own[rank])
            known = keys, schedule.name, len(schedule.rows), rank, shorter.microbatches
            if known not in self._peaks:
                made = {s: stages[s][1] for s in own[rank]}
                if len(made) > 1:  # equal stages are separate ones here, each with its own gradients
                    made = {s: Stage(counts, layout, blocks[s], held, self._optimizer) for s in made}
                self._peaks[known] = max(moment.total for moment in moments_of(Rank(made, shorter, rank)))
            return self._peaks[known] + later

        most = 0
        for rank in sorted(fullest.values(), key=lambda rank: -flights[rank]):
            most = max(most, of(rank))
            if most > self.space.device_memory:
                break
        return most

    def _parts(self, choice: Choice, *, for_bound: bool = False) -> tuple[Counts, Layout, Schedule, Held]:
        """Counts, layout, schedule and settings of a candidate.

        Raises:
            Unlike: The exact counts differ from those that its bound was based on.
        """
        layout, schedule = choice.layout, self._order_of(choice, fewest=for_bound)
        sizes = layout.tensor_parallel_size, layout.expert_parallel_size, choice.samples
        bounding = self._for_bounds(*sizes)
        counts = bounding
        if not for_bound:
            counts = self._in_two_parts(*sizes) if schedule.splits_backwards else self._of(*sizes)
        assert counts is not None
        assert bounding is not None
        if counts is not bounding and not self._is_like(counts, bounding):
            raise Unlike
        return counts, layout, schedule, self._held_of(choice)

    def _order_of(self, choice: Choice, *, fewest: bool = False) -> Schedule:
        """The schedule; or the one of the fewest microbatches, with the same stages and the same last actions."""
        name, ranks = choice.schedule or "1F1B", choice.layout.pipeline_parallel_size
        microbatches = SCHEDULES[name].microbatches * ranks if fewest else choice.microbatches
        return _order(name, ranks, microbatches if choice.schedule is not None else 1)

    def _held_of(self, choice: Choice) -> Held:
        return replace(
            self.space.held,
            activation_checkpointing=choice.activation_checkpointing,
            accumulates=1 if choice.schedule is not None else choice.microbatches,
        )

    def can_be_counted(self, choice: Choice) -> bool:
        """Whether a microbatch can be counted, including split backwards if its schedule has them."""
        layout = choice.layout
        splits = choice.schedule is not None and _splits(choice.schedule)
        sizes = layout.tensor_parallel_size, layout.expert_parallel_size, choice.samples
        return (self._in_two_parts(*sizes) if splits else self._of(*sizes)) is not None

    def _is_like(self, counted: Counts, scaled: Counts) -> bool:
        key = id(counted), id(scaled)
        if key not in self._likes:
            self._likes[key] = is_like(counted, scaled)
        return self._likes[key]

    def _blocks(self, stages: int, way: Recomputing) -> list[range]:
        """The blocks of each stage, as a run places them (with the costs of recomputation)."""
        if (stages, way) not in self._placed:
            policy: Policy = "auto" if stages > 1 else "even"
            cost = self._model.cost
            placed = place(as_run(cost, way), stages, policy).stages if cost is not None else ()
            self._placed[stages, way] = [stage.blocks for stage in placed] or [range(0)]
        return self._placed[stages, way]

    def _stages_of(
        self, choice: Choice, counts: Counts, stages: Sequence[range], held: Held
    ) -> list[tuple[Any, Stage]]:
        """The stages, each with its key; stages of equal cost have equal keys, and share one object."""
        layout = choice.layout
        several = layout.pipeline_parallel_size > 1
        found = []
        for blocks in stages:
            key = (
                *(id(counts), layout.shard_size, layout.expert_parallel_size, layout.data_parallel_size > 1),
                *(several, held.accumulates, choice.activation_checkpointing, self._alike(counts, blocks)),
            )
            if key not in self._stages:
                self._stages[key] = Stage(counts, layout, blocks, held, self._optimizer)
            found.append((key, self._stages[key]))
        return found

    def _time(
        self, key: Any, stage: Stage, layout: Layout, samples: int, held: Held, groups: Groups, *, splits: bool
    ) -> StageTime:
        known = key, layout.data_parallel_replicas, splits
        if known not in self._times:
            self._times[known] = stage_time(stage, samples, held, groups, self.rates, splits=splits)
        return self._times[known]

    def _alike(self, counts: Counts, blocks: range) -> tuple[Any, ...]:
        """A key that is equal for stages with blocks of equal costs, and the same parts around them.

        If a setting recomputes every n-th block, the blocks' places are part of the key.
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


def _refused(error: ConfigurationError) -> str:
    sentence = str(error).partition(". ")[0].removesuffix(".")
    return f"{CANT_BE_CUT} ({sentence})"


def _least_of(stages: Sequence[Stage], schedule: Schedule) -> int:
    """A lower bound of the fullest rank's bytes."""
    flights = _flights(schedule.name, len(schedule.rows), schedule.microbatches)
    own = ([stages[stage] for stage in schedule.stages_of(rank)] for rank in range(len(schedule.rows)))
    return max(map(_least, own, flights))


def _least(stages: Sequence[Stage], flight: int) -> int:
    """A lower bound of a rank's bytes when it has begun the last of ``flight`` forwards in flight."""
    kept = [sum(cost.kept for cost in stage.costs) for stage in stages]
    held = 0
    for stage in stages:
        held += sum(unit.held for unit in stage.units.values())
        held += sum(unit.gathered for unit in stage.units.values()) if stage.keeps_gathered else 0
    # a rank's stages may share parameters outside of blocks, and their optimizer state
    root = max(stage.root.held + stage.root.gathered for stage in stages)
    state = sum(stage.state_bytes for stage in stages) if len(stages) == 1 else 0
    received = min(stage.received for stage in stages)
    return held + root + state + flight * received + (flight - 1) * min(kept)


@lru_cache(maxsize=ORDERS_KEPT)
def _order(name: str, ranks: int, microbatches: int) -> Schedule:
    return build(name, ranks, microbatches)


@lru_cache(maxsize=32)
def _splits(name: str) -> bool:
    return _order(name, 2, 4).splits_backwards


def _shorter(schedule: Schedule, flight: int) -> Schedule:
    """A schedule of fewer microbatches that keeps as many in flight.

    With one stage per rank and whole backwards, later microbatches behave like the first few. Other schedules run in
    equal rounds of as many microbatches as ranks; if the number of microbatches isn't a multiple, none is left out.
    """
    ranks, microbatches = len(schedule.rows), schedule.microbatches
    if schedule.stages == ranks and not schedule.splits_backwards:
        return schedule.first(min(microbatches, flight + 2))
    if microbatches % ranks:
        return schedule
    return _order(schedule.name, ranks, min(microbatches, 4 * ranks))


@cache
def _flights(name: str, ranks: int, microbatches: int) -> list[int]:
    """For each rank, the largest number of forwards whose backward (or its first part) hasn't run yet."""
    changes = {"F": 1, "B": -1, "I": -1, "W": 0}
    rows = _order(name, ranks, microbatches).rows
    return [max(accumulate(changes[action.kind] for action in row)) for row in rows]
