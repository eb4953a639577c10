"""What a rank holds over a step: by hand for a few stages, and for the orders of all schedules."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.dryrun.counting.counts import AROUND, LOSS, Cost, Counts, ParameterCount, PartCount, TwoParts
from lightning_shard.dryrun.memory.moments import stage_memories
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import Held, Stage, StageMemory
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Action, Schedule

BLOCKS, OUTPUT, KEPT, FREED, NUMEL = 8, 100, 1000, 100, 5
OWED = 300
GLOO = Held(sends_stay=True)


def network(shared: str = "") -> Counts:
    """Blocks that keep 1000 bytes, of which 100 are their output, that the next block is the last to use.

    Between both parts of a backward they keep 300, of which 100 are the gradient that they were given.
    """

    def block(index: int) -> PartCount:
        names = [f"blocks.{index}.weight", *([shared] if shared else [])]
        parameters = tuple(ParameterCount(name, (NUMEL,), (NUMEL,), torch.float32) for name in names)
        cost = Cost(kept=KEPT, freed=FREED)
        parts = TwoParts(cost, owed=OWED, given=OUTPUT, weights_peak=4 * NUMEL, weights_adding_peak=50, late=(0,))
        return PartCount(f"blocks.{index}", parameters, OUTPUT, replace(cost, parts=parts))

    blocks = tuple(map(block, range(BLOCKS)))
    return Counts(blocks, everywhere=(PartCount(AROUND),), loss=PartCount(LOSS), in_two_parts=True)


def memories(schedule: Schedule, held: Held, counts: Counts | None = None) -> tuple[StageMemory, ...]:
    each = BLOCKS // schedule.stages
    blocks = [range(stage * each, (stage + 1) * each) for stage in range(schedule.stages)]
    layout = Layout(pipeline_parallel_size=len(schedule.rows))
    made = [Stage(counts or network(), layout, own, held, OptimizerState()) for own in blocks]
    return stage_memories(made, schedule)


def at_peak(memory: StageMemory, kind: str) -> int:
    return max(moment.bytes[kind] for moment in memory.moments)


def test_activations_of_two_stages_on_a_rank_by_hand() -> None:
    schedule = build("Interleaved1F1B", 2, 4)
    first, last = memories(schedule, Held())
    assert (first.stages, last.stages) == ((0, 2), (1, 3))
    # rank 0 runs 0F0 0F1 2F0 2F1 0F2, then 0F3 and 2B0 in turn: never more than stage 0's four and stage 2's two
    assert (first.in_flight, last.in_flight) == ((4, 2), (3, 1))
    assert at_peak(first, "activations") == schedule.in_flight(0) * 2 * KEPT
    assert at_peak(last, "activations") == schedule.in_flight(1) * 2 * KEPT


def test_what_crosses_by_hand() -> None:
    """Two ranks, 1F1B: of the last stage a microbatch's values, their copy, and buffers for the next ones."""
    first, last = memories(build("1F1B", 2, 4), Held())
    of_last = {str(moment.action): moment.bytes["received"] for moment in last.moments if moment.action is not None}
    assert of_last["1F0"] == 2 * OUTPUT
    assert of_last["1B0"] == 2 * OUTPUT + OUTPUT  # asked for: what 1F1 needs
    assert of_last["1F1"] == 2 * OUTPUT + OUTPUT  # being sent: the gradient of 1B0
    assert of_last["1B3"] == 2 * OUTPUT + OUTPUT  # nothing to ask for, and the last gradient
    of_first = [moment.bytes["received"] for moment in first.moments if str(moment.action) == "0B3"]
    assert of_first[0] == 0  # its last block's gradient is working memory
    assert of_first[-1] == 2 * OUTPUT  # which the code keeps to the end, with what it had sent
    stays = [moment.bytes["received"] for moment in memories(build("1F1B", 2, 4), GLOO)[1].moments]
    assert max(stays) == 2 * OUTPUT + 3 * OUTPUT  # all gradients before the last one's


def test_between_both_parts_of_a_backward_its_products_alone_keep_something_by_hand() -> None:
    schedule = Schedule("by hand", (tuple(Action(0, kind, 0) for kind in "FIW"), tuple(Action(1, k, 0) for k in "FIW")))
    for memory in memories(schedule, Held()):
        first, second = (
            [m for m in memory.moments if m.action and m.action.kind == kind and m.part.startswith("blocks")]
            for kind in "IW"
        )
        each, weights = BLOCKS // 2, 4 * NUMEL
        before = [each * KEPT - done * (KEPT - OWED) for done in range(each)]
        freed = [0 if memory.stages == (0,) else FREED, *[FREED] * (each - 1)]  # what was sent lives
        assert [moment.bytes["activations"] for moment in first] == [b - f for b, f in zip(before, freed)]
        assert {moment.bytes["gradients"] for moment in first} == {0}  # each parameter's comes later
        assert {moment.bytes["activations"] for moment in second} == {each * OWED}
        assert [moment.bytes["gradients"] for moment in second] == [n * weights for n in range(1, each + 1)]
        assert memory.moments[-1].bytes["activations"] == 0
    sent = [moment.bytes["received"] for moment in memories(schedule, Held())[0].moments if str(moment.action) == "0I0"]
    assert sent == [0, OUTPUT, OUTPUT, OUTPUT, OUTPUT]  # its gradient is among what the last block owes


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=10, deadline=None)
@given(ranks=st.sampled_from([1, 2, 4]), more=st.integers(0, 5), held=st.sampled_from([Held(), GLOO]))
def test_every_order_keeps_what_is_in_flight_and_ends_with_nothing(
    name: str, ranks: int, more: int, held: Held
) -> None:
    schedule = build(name, ranks, SCHEDULES[name].microbatches * ranks + more)
    found = memories(schedule, held)
    assert sum(memory.parameters for memory in found) == BLOCKS * NUMEL
    for rank, memory in enumerate(found):
        assert list(memory.stages) == schedule.stages_of(rank)
        end = memory.moments[-1]
        assert end.action is None
        assert end.bytes["activations"] == end.bytes["received"] == 0
        assert min(min(moment.bytes.values()) for moment in memory.moments) >= 0
        changes = {"F": KEPT, "B": -KEPT, "I": OWED - KEPT, "W": -OWED}
        each = [changes[action.kind] * BLOCKS // schedule.stages for action in schedule.rows[rank]]
        most = max(accumulate(each))
        assert most - KEPT <= at_peak(memory, "activations") <= most  # before the last block, and its own is working
        gradients = at_peak(memory, "gradients")
        assert gradients >= 4 * memory.parameters
