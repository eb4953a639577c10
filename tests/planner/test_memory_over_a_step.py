"""What a rank holds over a step: by hand for a few stages, and for the orders of all schedules.

What an optimizer keeps, and what its step takes for a time, are those of its real step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import lightning_shard
from lightning_shard.dryrun.counting.counts import (
    AROUND,
    LOSS,
    Cost,
    Counts,
    Ledger,
    ParameterCount,
    PartCount,
    TwoParts,
)
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.moments import stage_memories
from lightning_shard.dryrun.memory.optimizer import OptimizerState, ask
from lightning_shard.dryrun.memory.peak import Held, Stage, StageMemory
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Action, Schedule
from lightning_shard.plugin.settings import Settings

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


WIDTHS = 128, 8, 16
"""The largest first, and by far: a loop over parameters still has what it needed for the one before."""


class Module(L.LightningModule):
    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make
        self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in WIDTHS))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return torch.stack([layer(batch.new_zeros(len(layer.weight))).sum() for layer in self.layers]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make(self.parameters())


def planned(make: Callable[..., torch.optim.Optimizer], device_type: str) -> int:
    state = ask(Model.of(Module(make), torch.zeros(4), Settings("auto", None, None), stages=1, device_type=device_type))
    return state.steps_with([4 * width * width for width in WIDTHS])


def real(make: Callable[..., torch.optim.Optimizer], **how: Any) -> int:
    module = Module(make)
    optimizer = module.configure_optimizers()
    for group in optimizer.param_groups:
        group.update(how)
    for _ in range(2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        with (ledger := Ledger()):
            ledger.begin("step")
            optimizer.step()
    return ledger.growth["step"]


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "Adam, amsgrad": lambda of: torch.optim.Adam(of, amsgrad=True),
    "SGD": lambda of: torch.optim.SGD(of, 0.1, momentum=0.9, weight_decay=0.1),
    "RMSprop": torch.optim.RMSprop,
    "NAdam": torch.optim.NAdam,
}


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_a_gpu_a_step_works_on_all_parameters_at_once_on_the_cpu_on_one_after_the_other(
    name: str, device_type: str
) -> None:
    expected = real(OPTIMIZERS[name], foreach=device_type == "cuda")
    assert planned(OPTIMIZERS[name], device_type) == pytest.approx(expected, rel=0.02)


class Keeping(torch.optim.Optimizer):
    """Keeps what a function makes of each parameter."""

    def __init__(self, of: Any, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(of, {"lr": 0.1})
        self.make = make

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"kept": self.make(parameter.detach())}


KEEPING: dict[str, Callable[[torch.Tensor], Any]] = {
    "flat": lambda p: torch.zeros(p.numel(), dtype=torch.bfloat16),
    "in lists and dicts": lambda p: [torch.zeros_like(p), {"of": (torch.zeros_like(p), 5, None)}],
    "a history": lambda p: torch.zeros(4, *p.shape),
    "transposed": lambda p: p.mT.contiguous(),
    "a table": lambda p: torch.zeros(3, 256),
    "of rows and columns": lambda p: (torch.eye(p.shape[0]), torch.eye(p.shape[1]), torch.zeros(p.shape[0], 1)),
}


@pytest.mark.parametrize("name", KEEPING)
def test_all_that_an_optimizer_keeps_counts(name: str) -> None:
    def make(of: Any) -> torch.optim.Optimizer:
        return Keeping(of, KEEPING[name])

    module = Module(make)
    optimizer = module.configure_optimizers()
    optimizer.step()
    real = sum(
        leaf.nbytes for leaf in pytree.tree_leaves([*optimizer.state.values()]) if isinstance(leaf, torch.Tensor)
    )
    plan = lightning_shard.plan(Module(make), torch.zeros(4), layout={"data_parallel_size": 1}, device_type="cpu")
    assert plan.stages[0].peak.bytes["optimizer"] == real
    saved = sum(4 * width * width for width in WIDTHS) + real
    assert saved <= plan.checkpoint.bytes < saved + 20_000  # headers and a manifest


@pytest.mark.parametrize("keeps", [lambda p: torch.zeros(p.shape[0] + 1), lambda p: torch.zeros(p.numel() // 7)])
def test_state_whose_size_does_not_follow_from_a_parameters_is_refused(keeps: Callable[[torch.Tensor], Any]) -> None:
    module = Module(lambda of: Keeping(of, keeps))
    with pytest.raises(ConfigurationError, match=r"it keeps 'kept' of"):
        ask(Model.of(module, torch.zeros(4), Settings("auto", None, None), stages=1))
