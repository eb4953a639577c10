"""A search's candidates, with what is computed once for all candidates that share it: counts, stages, times, orders."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

from lightning_shard import tree
from lightning_shard.dryrun.counting.count import count_each, count_two_parts
from lightning_shard.dryrun.counting.counts import Counts
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.moments import moments_of
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import Held, Rank, Stage
from lightning_shard.dryrun.search.found import Choice, Why
from lightning_shard.dryrun.timing.devices import Groups, Rates
from lightning_shard.dryrun.timing.layout import LEFT_OUT, Timing, model_flops, stage_time, ties
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout, divisors
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.pipeline.placement import place
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.assembly.placing import as_run
from lightning_shard.plugin.steps.schedule_choice import SIMPLEST_FIRST, against_parts

_CHECKPOINTING: tuple[Recomputing, ...] = (None, "selective", True)


@dataclass(frozen=True)
class Space:
    """The search space, beside schedules and activation checkpointing; each layout uses all devices."""

    devices: int
    global_batch: int  # samples per step, over all data ranks
    device_memory: int  # bytes of a device's memory that are available to tensors
    most_samples: int = 8  # of a microbatch
    held: Held = field(default_factory=Held)  # the other settings


def layouts(devices: int, most_stages: int) -> Iterator[Layout]:
    """All combinations of axis sizes that multiply to ``devices``."""
    for stages in divisors(devices):
        if stages > most_stages:
            break
        for tensor in divisors(devices // stages):
            data = devices // stages // tensor
            for replicas in divisors(data):
                for experts in divisors(data // replicas):
                    yield Layout(stages, data, replicas, tensor, 0, experts)


class Workshop:
    """Computes bounds, times and peaks of a search's candidates."""

    def __init__(self, model: Model, optimizer: OptimizerState, space: Space, rates: Rates) -> None:
        self._model, self._optimizer, self.space, self.rates = model, optimizer, space, rates
        both = math.gcd(space.global_batch, tree.batch_size(model.batch))
        self._samples = [n for n in divisors(both) if n <= space.most_samples]
        self._most_stages = len(model.blocks.names) if model.blocks is not None else 1
        self._why_not: dict[tuple[int, int], str] = {}
        self._refusals: dict[tuple[bool, bool], str] = {}  # by what is cut, of the smallest sizes: others say the same
        self._made: dict[Any, Any] = {}
        one = self._counts_of(Choice(Layout(), None, 1, 1, None))
        self.flops = model_flops(one)
        self.assumed = (*rates.device.assumptions, *one.assumed, LEFT_OUT)

    def _once(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    # -- candidates

    def bounded(self, dropped: Counter[str]) -> Iterator[Choice]:
        """Yield each candidate that could run, with its lower bound; counts the dropped ones by reason."""
        for layout in layouts(self.space.devices, self._most_stages):
            each, left = divmod(self.space.global_batch, layout.data_parallel_size)
            if left:
                dropped[Why.DOESNT_DIVIDE] += 1
                continue
            for samples in self._samples:
                if each % samples == 0:
                    yield from self._choices(layout, samples, each // samples, dropped)

    def _choices(self, layout: Layout, samples: int, microbatches: int, dropped: Counter[str]) -> Iterator[Choice]:
        stages = layout.pipeline_parallel_size
        if microbatches < stages:
            dropped[Why.TOO_FEW] += 1
            return
        sizes = layout.tensor_parallel_size, layout.expert_parallel_size
        if self._of(*sizes, samples) is None:
            dropped[self._why_not[sizes]] += 1
            return
        for schedule in SIMPLEST_FIRST if stages > 1 else (None,):
            for way in _CHECKPOINTING if self._model.blocks is not None else (None,):
                why_not = self._cant_run(schedule, stages, microbatches, way)
                if why_not:
                    dropped[why_not] += 1
                    continue
                choice = Choice(layout, schedule, samples, microbatches, way)
                # a bound is below what the simulation gives, whatever the order of its sums
                yield replace(choice, bound=(1 - 1e-9) * self.timing(choice, for_bound=True).bound())

    def _cant_run(self, name: str | None, ranks: int, microbatches: int, way: Recomputing) -> str | None:
        """The reason why a schedule can't be used; ``None`` if it can."""
        if name is None:
            return None
        named = SCHEDULES[name]
        if microbatches < named.microbatches * ranks:
            return Why.TOO_FEW
        if named.usual * ranks > self._most_stages:
            return Why.TOO_FEW_BLOCKS
        held = replace(self.space.held, activation_checkpointing=way)
        if _order(name, ranks, named.microbatches * ranks).splits_backwards and against_parts(vars(held)):
            return Why.NOT_IN_PARTS
        return None

    # -- counts

    def _of(self, tensor: int, expert: int, samples: int) -> Counts | None:
        """Counts of one microbatch; ``None`` if the module can't be cut that way."""
        if (tensor, expert) not in self._why_not and (tensor, expert, samples) not in self._made:
            self._count(tensor, expert)
        return self._made.get((tensor, expert, samples))  # type: ignore[no-any-return]

    def _count(self, tensor: int, expert: int) -> None:
        """Count all sizes of microbatches, for which the module is cut only once."""
        try:
            found = count_each(self._model, tensor, expert, self._samples)
        except ConfigurationError as error:
            if tensor == expert == 1:
                raise
            refused = f"{Why.CANT_BE_CUT} ({str(error).partition('. ')[0].removesuffix('.')})"
            self._why_not[tensor, expert] = self._refusals.setdefault((tensor > 1, expert > 1), refused)
            return
        self._made.update(((tensor, expert, n), counts) for n, counts in zip(self._samples, found))

    # -- one candidate

    def timing(self, choice: Choice, *, for_bound: bool = False) -> Timing:
        """The timing of a candidate's step; for a bound with whole backwards, and an order of few microbatches."""
        schedule = _order_of(choice, fewest=for_bound)
        counts = self._counts_of(choice)
        if schedule.splits_backwards and not for_bound:
            counts = self._in_two_parts(counts)
        layout, splits = choice.layout, schedule.splits_backwards
        groups = Groups(layout, self.rates.device.per_machine)
        stages = self._stages_of(choice, counts, schedule)
        shared = "time", layout.data_parallel_replicas, splits
        times = [
            self._once((*shared, key), partial(stage_time, stage, groups, self.rates, splits=splits))
            for key, stage in stages
        ]
        blocks = self._blocks(schedule.stages, choice.activation_checkpointing)
        tied = self._once(
            ("ties", id(counts), layout.shard_size, tuple(own.start for own in blocks)),
            lambda: ties(counts, layout, blocks),
        )
        number = choice.microbatches if choice.schedule is not None else 1
        return Timing(schedule, self.rates, groups, [stage for _, stage in stages], times, tied, microbatches=number)

    def peak(self, choice: Choice) -> int | None:
        """Peak bytes of the fullest rank; or a smaller number that already exceeds the device's memory.

        ``None`` if the schedule splits backwards, and these can't be counted.
        """
        schedule, most = _order_of(choice), self.space.device_memory
        counts = self._counts_of(choice)
        layout, blocks = choice.layout, self._blocks(schedule.stages, choice.activation_checkpointing)
        flights = _flights(schedule.name, len(schedule.rows), schedule.microbatches)
        own = [schedule.stages_of(rank) for rank in range(len(schedule.rows))]
        stages = self._stages_of(choice, counts, schedule)
        least = max(_least([stages[stage][1] for stage in of_rank], n) for of_rank, n in zip(own, flights))
        if least > most:
            return least
        if schedule.splits_backwards:
            counts = self._in_two_parts(counts)
            if counts is None:
                return None
            stages = self._stages_of(choice, counts, schedule)
        # of equal ranks with one stage each, only the one with most microbatches in flight
        fullest: dict[Any, int] = {}
        for rank, of_rank in enumerate(own):
            key = stages[of_rank[0]][0] if len(of_rank) == 1 and not schedule.splits_backwards else rank
            if key not in fullest or flights[rank] > flights[fullest[key]]:
                fullest[key] = rank
        found = 0
        for rank in sorted(fullest.values(), key=lambda rank: -flights[rank]):
            shorter = schedule if self.space.held.sends_stay else _shorter(schedule, flights[rank])
            later = (schedule.microbatches - shorter.microbatches) * counts.batch_bytes
            keys = tuple(stages[stage][0] for stage in own[rank])
            made = {stage: stages[stage][1] for stage in own[rank]}

            def peak(made: dict[int, Stage] = made, order: Schedule = shorter, rank: int = rank) -> int:
                if len(made) > 1:  # equal stages are separate ones here, each with its own gradients
                    made = {n: Stage(counts, layout, blocks[n], one.held, self._optimizer) for n, one in made.items()}
                return max(moment.total for moment in moments_of(Rank(made, order, rank)))

            known = "peak", keys, schedule.name, len(schedule.rows), rank, shorter.microbatches
            found = max(found, later + self._once(known, peak))
            if found > most:
                break
        return found

    def _counts_of(self, choice: Choice) -> Counts:
        found = self._of(choice.layout.tensor_parallel_size, choice.layout.expert_parallel_size, choice.samples)
        assert found is not None, "a candidate's microbatch was counted"
        return found

    def _in_two_parts(self, counts: Counts) -> Any:
        """The counts with those of split backwards; ``None`` if its step can't be run so."""

        def counted() -> Counts | None:
            try:
                return count_two_parts(self._model, counts)
            except ConfigurationError:
                return None

        return self._once(("in two parts", id(counts)), counted)

    def _blocks(self, stages: int, way: Recomputing) -> list[range]:
        """The blocks of each stage, as a run places them (with the costs of recomputation)."""
        cost = self._model.cost
        if cost is None:
            return [range(0)]
        placed = self._once(
            ("placed", stages, way), lambda: place(as_run(cost, way), stages, "auto" if stages > 1 else "even")
        )
        return [stage.blocks for stage in placed.stages]

    def _stages_of(self, choice: Choice, counts: Counts, schedule: Schedule) -> list[tuple[Any, Stage]]:
        """The stages, each with its key; stages of equal cost have equal keys, and share one object."""
        layout, way = choice.layout, choice.activation_checkpointing
        accumulates = 1 if choice.schedule is not None else choice.microbatches
        held = replace(self.space.held, activation_checkpointing=way, accumulates=accumulates)
        shared = id(counts), layout.shard_size, layout.expert_parallel_size, layout.data_parallel_size > 1
        several = layout.pipeline_parallel_size > 1
        found = []
        for blocks in self._blocks(schedule.stages, way):
            key = *shared, several, held.accumulates, way, self._alike(counts, blocks)
            found.append((key, self._once(key, partial(Stage, counts, layout, blocks, held, self._optimizer))))
        return found

    def _alike(self, counts: Counts, blocks: range) -> tuple[Any, ...]:
        """A key that is equal for stages with blocks of equal costs, and the same parts around them."""

        def alike() -> tuple[Any, ...]:
            numbers: dict[Any, int] = {}
            kinds = self._once(
                ("kinds", id(counts)),
                lambda: [numbers.setdefault(_kind_of(block), len(numbers)) for block in counts.blocks],
            )
            is_last = blocks.stop == len(counts.blocks)
            around = tuple(place for place, _ in counts.parts if place in range(blocks.start, blocks.stop + is_last))
            received = counts.blocks[blocks.start - 1].output if blocks.start else 0
            return tuple(kinds[place] for place in blocks), around, received, is_last

        found: tuple[Any, ...] = self._once(("alike", id(counts), blocks), alike)
        return found


def _kind_of(part: Any) -> Any:
    """A key of everything that is known about a block, except names."""
    parameters = tuple(replace(parameter, name="") for parameter in part.parameters)
    return parameters, part.output, repr((part.plain, part.recomputed, part.selective))


def _least(stages: Sequence[Stage], flight: int) -> int:
    """A lower bound of a rank's bytes when it has begun the last of ``flight`` forwards in flight."""
    kept = [sum(cost.kept for cost in stage.costs) for stage in stages]
    units = [(unit, stage.keeps_gathered) for stage in stages for unit in stage.units.values()]
    held = sum(unit.held + unit.gathered * keeps for unit, keeps in units)
    # a rank's stages may share parameters outside of blocks, and their optimizer state
    root = max(stage.root.held + stage.root.gathered for stage in stages)
    state = sum(stage.state_bytes for stage in stages) if len(stages) == 1 else 0
    received = min(stage.received for stage in stages)
    return held + root + state + flight * received + (flight - 1) * min(kept)


@lru_cache(maxsize=32)  # an order of 64 stages and a thousand microbatches takes 20 MB
def _order(name: str, ranks: int, microbatches: int) -> Schedule:
    return build(name, ranks, microbatches)


def _order_of(choice: Choice, *, fewest: bool = False) -> Schedule:
    """The schedule; or the one of the fewest microbatches, with the same stages and the same last actions."""
    name, ranks = choice.schedule or "1F1B", choice.layout.pipeline_parallel_size
    microbatches = SCHEDULES[name].microbatches * ranks if fewest else choice.microbatches
    return _order(name, ranks, microbatches if choice.schedule is not None else 1)


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
    return [_order(name, ranks, microbatches).in_flight(rank, until="BI") for rank in range(ranks)]
