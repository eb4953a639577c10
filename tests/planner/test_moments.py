"""What a rank holds over a step: by hand for a few stages, and for the orders of all schedules."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.dryrun.counting.counts import AROUND, LOSS, Cost, Counts, ParameterCount, PartCount, TwoParts
from lightning_shard.dryrun.memory.moments import stage_memories
from lightning_shard.dryrun.memory.peak import Held, StageMemory, stages_of
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Action, Schedule

BLOCKS, OUTPUT, KEPT, FREED, NUMEL = 8, 100, 1000, 100, 5
OWED = 300
GLOO = Held(sends_stay=True)
NOTHING = Cost()


def network(shared: str = "") -> Counts:
    """Blocks that keep 1000 bytes, of which 100 are their output, that the next block is the last to use.

    Between both parts of a backward they keep 300, of which 100 are the gradient that they were given.
    """

    def block(index: int) -> PartCount:
        names = [f"blocks.{index}.weight", *([shared] if shared else [])]
        parameters = tuple(ParameterCount(name, (NUMEL,), (NUMEL,), torch.float32) for name in names)
        parts = TwoParts(
            owed=OWED, given=OUTPUT, freed=FREED, weights_peak=4 * NUMEL, weights_adding_peak=50, late=(0,)
        )
        return PartCount(f"blocks.{index}", parameters, OUTPUT, Cost(kept=KEPT, freed=FREED, parts=parts))

    blocks = tuple(map(block, range(BLOCKS)))
    return Counts(blocks, everywhere=(PartCount(AROUND),), loss=PartCount(LOSS), in_two_parts=True)


def memories(schedule: Schedule, held: Held, counts: Counts | None = None) -> tuple[StageMemory, ...]:
    each = BLOCKS // schedule.stages
    blocks = [range(stage * each, (stage + 1) * each) for stage in range(schedule.stages)]
    layout = Layout(pipeline_parallel_size=len(schedule.rows))
    return stage_memories(stages_of(counts or network(), layout, blocks, held), schedule)


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


def test_gradients_that_come_in_two_parts_are_reduced_when_all_are_there() -> None:
    schedule = Schedule("by hand", (tuple(Action(0, kind, i) for i in range(2) for kind in "FIW"),))
    layout = Layout(data_parallel_size=2)
    whole, padded, shard = 4 * 5, 4 * 6, 4 * 3
    for each in (False, True):
        held = Held(reduce_each_microbatch=each)
        [memory] = stage_memories(stages_of(network(), layout, [range(BLOCKS)], held), schedule)
        gradients = [m.bytes["gradients"] for m in memory.moments if str(m.action) == "0W1"]
        assert gradients[-1] == (BLOCKS - 1) * shard + padded + max(whole, shard) + each * shard
        assert memory.moments[-1].bytes["gradients"] == BLOCKS * shard
    kinds = [m.bytes["gathered"] for m in memory.moments]
    assert kinds[-1] == 0


def test_what_a_later_block_was_the_last_to_use_is_free_in_a_backward() -> None:
    [memory] = memories(build("GPipe", 1, 1), Held())
    forward, backward = (
        [m.bytes["activations"] for m in memory.moments if m.action and m.action.kind == kind and m.part != LOSS]
        for kind in "FB"
    )
    assert forward[-1] == (BLOCKS - 1) * KEPT
    assert max(backward) == BLOCKS * KEPT - FREED


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


def test_a_weight_of_two_stages_of_a_rank_is_held_once() -> None:
    first, last = memories(build("Interleaved1F1B", 2, 4), Held(), network(shared="tied"))
    assert first.parameters == last.parameters == BLOCKS // 2 * NUMEL + NUMEL


def test_reducing_makes_shards_when_whole_gradients_are_gone() -> None:
    layout = Layout(data_parallel_size=2)
    [memory] = stage_memories(stages_of(network(), layout, [range(BLOCKS)], Held()), build("1F1B", 1, 1))
    whole, shard = 4 * 5, 4 * 3  # 5 elements on 2 ranks: 3 on the first, padded to 6 in the buffer
    first = next(moment for moment in memory.moments if moment.bytes["gradients"])
    assert first.bytes["gradients"] == 2 * shard + max(whole, shard)


def one_block(parameters: tuple[ParameterCount, ...], cost: Cost, loss: Cost = NOTHING) -> Counts:
    return Counts((PartCount("block", parameters, OUTPUT, cost),), loss=PartCount(LOSS, plain=loss))


def weight(name: str = "w", **what: object) -> ParameterCount:
    return ParameterCount(name, (NUMEL,), (NUMEL,), torch.float32, **what)  # type: ignore[arg-type]


def steps_of(counts: Counts, layout: Layout, microbatches: int = 1) -> list[tuple[str, dict[str, int]]]:
    """Each moment's action and part, with its bytes."""
    [memory] = stage_memories(stages_of(counts, layout, [range(1)], Held()), build("GPipe", 1, microbatches))
    return [(f"{m.action.kind} {m.part}" if m.action else "step", dict(m.bytes)) for m in memory.moments]


def test_values_at_hand_count_while_the_part_after_them_runs() -> None:
    """Logits, say: nothing keeps them for a backward."""
    moments = dict(steps_of(one_block((), Cost(), loss=Cost(forward_peak=3, carried=40)), Layout()))
    assert moments[f"F {LOSS}"]["working"] == 43


def test_gradients_that_a_part_makes_are_no_working_memory() -> None:
    cost = Cost(backward_peak=50, adding_peak=50, of_gradients=20)
    steps = steps_of(one_block((weight(),), cost), Layout(), microbatches=2)
    first, _, second, *_ = [held for what, held in steps if what == "B block"]
    assert (first["gradients"], first["working"]) == (20, 30 + OUTPUT)
    assert (second["gradients"], second["working"]) == (4 * NUMEL, 50 + OUTPUT)  # whole ones, to which it adds


def test_the_last_block_is_being_gathered_while_the_loss_has_its_backward() -> None:
    moments = dict(steps_of(one_block((weight(),), Cost()), Layout(data_parallel_size=2)))
    assert moments[f"B {LOSS}"]["gathered"] == 4 * 6  # the buffer: 5 elements on 2 ranks, padded
    assert moments[f"F {LOSS}"]["gathered"] == 4 * 6


def test_experts_are_gathered_and_reduced_apart_from_their_block() -> None:
    """Dealt to two ranks, which share nothing then: their copy needs no buffer, and they are done first."""
    counts = one_block((weight(), weight("e", is_expert=True)), Cost(kept=1000, experts_done=-800 - OUTPUT))
    steps = steps_of(counts, Layout(data_parallel_size=2, expert_parallel_size=2))
    whole, padded, shard = 4 * 5, 4 * 6, 4 * 3
    [forward] = [held for what, held in steps if what == "F block"]
    assert forward["gathered"] == padded + whole
    working, experts, block, *_ = [held for what, held in steps if what == "B block"]
    assert working["gathered"] == padded + whole
    assert (experts["gathered"], experts["gradients"]) == (padded, whole + whole)  # a buffer, and what is in it
    assert experts["activations"] == 1000 - 800
    assert (block["gathered"], block["activations"]) == (0, 0)
    assert block["gradients"] == whole + padded + max(whole, shard)  # the experts' are done, and their buffer is free
