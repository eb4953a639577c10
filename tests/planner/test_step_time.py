"""A step's time: the arithmetic of a known layer by hand, and what must hold for all layouts and devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.dryrun.counting.counts import AROUND, LOSS, TENSOR, Cost, Counts, ParameterCount, PartCount, Work
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import Held, Stage
from lightning_shard.dryrun.timing.devices import PRODUCTS, Achieved, Device, Group, Groups, Link, Links, Rates, device
from lightning_shard.dryrun.timing.layout import DATA, IDLE, Timing
from lightning_shard.layout import Layout
from lightning_shard.pipeline.schedules.named import build

some = settings(max_examples=30, deadline=None)
NOTHING_SET = Held()
NO_STATE = OptimizerState()
FREE = Link(float("inf"), 0.0)
IDEAL = Achieved(1.0, 1.0, 1.0)
PLAIN = Device("plain", {"bfloat16": 1e12}, 10**12, 1e18, Link(1e9, 0.0), Link(1e8, 0.0), 8, IDEAL)
"""Computes 1 per ps, and has memory that never bounds it."""


def cost(flops: int, beside: int = 0, traffic: int = 0) -> Cost:
    """A backward costs twice a forward."""
    sent = {TENSOR: traffic} if traffic else {}
    forward = Work(flops, beside, beside, sent, dict.fromkeys(sent, 1))
    sent = {TENSOR: 2 * traffic} if traffic else {}
    return Cost(forward, Work(2 * flops, 2 * beside, 2 * beside, sent, dict.fromkeys(sent, 2)))


def network(
    blocks: int = 4, flops: int = 10**12, *, numel: int = 1000, output: int = 0, traffic: int = 0, **options: Any
) -> Counts:
    def block(index: int) -> PartCount:
        name = f"blocks.{index}"
        plain = cost(flops, traffic=traffic)
        again = replace(plain, backward=replace(plain.backward, flops=3 * flops))
        parameter = ParameterCount(f"{name}.weight", (numel, 1), (numel, 1), torch.float32)
        return PartCount(name, (parameter,), output, plain, again, again)

    return Counts(
        tuple(map(block, range(blocks))), everywhere=(PartCount(AROUND),), loss=PartCount(LOSS), tokens=100, **options
    )


def even(blocks: int, stages: int) -> list[range]:
    each = blocks // stages
    return [range(stage * each, (stage + 1) * each) for stage in range(stages)]


def timing(
    counts: Counts,
    layout: Layout,
    profile: Device = PLAIN,
    *,
    schedule: str = "1F1B",
    microbatches: int = 1,
    held: Held = NOTHING_SET,
    optimizer: OptimizerState = NO_STATE,
) -> Timing:
    stages = even(len(counts.blocks), layout.pipeline_parallel_size)
    order = build(schedule, layout.pipeline_parallel_size, microbatches)
    made = [Stage(counts, layout, own, held, optimizer) for own in stages]
    return Timing.of(made, order, Rates(profile, "bfloat16"))


def test_one_layer_of_gpt_3_by_hand() -> None:
    """Width 12,288, 2,048 tokens, bfloat16 on an H100; 12 matrices of width², and attention."""
    width, tokens, peak = 12_288, 2_048, 989.4e12
    products = 2 * tokens * 12 * width**2 + 4 * tokens**2 * width  # 24 T D² + 4 T² D: 7.63e12
    assert products == pytest.approx(7.628e12, rel=1e-3)
    beside = 2 * 20 * tokens * width  # twenty readings and writings of the hidden state
    counts = Counts((PartCount("block", (), 0, cost(products, beside)),), tokens=tokens)
    found = timing(counts, Layout(), device("h100")).simulated(flops_per_sample=3 * products)
    forward = products / (0.6 * peak) + beside / (0.8 * 3.35e12)  # 12.85 ms and 0.376 ms
    assert forward == pytest.approx(12.85e-3 + 0.376e-3, rel=1e-3)
    assert found.step == pytest.approx(3 * forward)
    assert found.mfu == pytest.approx(3 * products / (3 * forward * peak))
    assert found.tokens_per_s == pytest.approx(tokens / (3 * forward))
    assert found.dominates == PRODUCTS
    assert "60 % of peak operations" in found.assumed[0]


def test_a_pipeline_of_equal_stages_by_hand() -> None:
    counts = network(8, output=10**7)
    layout = Layout(pipeline_parallel_size=4)
    found = timing(counts, layout, microbatches=8).simulated()
    assert found.timeline.schedule.name == "1F1B"
    assert found.step > (8 + 3) * 3 * 2  # two blocks a stage, a second a block, and transfers of 10 ms on top
    assert found.step == pytest.approx((8 + 3) * 3 * 2, rel=0.02)
    free = timing(counts, layout, replace(PLAIN, inside=FREE), microbatches=8).simulated()
    assert free.step == pytest.approx((8 + 3) * 3 * 2)
    assert free.bubble == pytest.approx(3 / 11)
    assert free.spent[IDLE] == pytest.approx(3 * 3 * 2)
    assert found.sent == {"pipeline": 8 * 2 * 10**7}  # an inner stage sends values on and gradients back


def test_gathering_goes_on_beside_computation_or_after_it() -> None:
    """4 blocks of 4 GB: of two ranks each sends 2 GB for one, 2 s of a link; a forward takes 1 s, a backward 2 s."""
    counts = network(4, numel=10**9)
    layout = Layout(data_parallel_size=2)
    beside = timing(counts, layout).simulated()
    # forward: 4 gathers in a row and the last block; backward: the first gather waits, then each in turn with a reduce
    assert beside.step == pytest.approx(4 * 2 + 1 + 8 * 2)
    assert beside.spent[DATA] == pytest.approx(beside.step - 12)
    assert beside.sent[DATA] == 3 * 4 * 2e9
    once = timing(counts, layout, held=Held(reshard_after_forward=False)).simulated()
    # forward as above; backward: each block's reduce while the block before computes, which takes as long
    assert once.step == pytest.approx(4 * 2 + 1 + 4 * 2 + 2)


def test_tensor_parallel_collectives_are_waited_for() -> None:
    counts = network(1, traffic=10**9, tensor_parallel_size=2)
    found = timing(counts, Layout(tensor_parallel_size=2)).simulated()
    assert found.step == pytest.approx(3 + 3 * 1)
    assert found.spent[TENSOR] == pytest.approx(3)
    assert found.sent == {TENSOR: 3 * 10**9}


# -- links


def test_which_links_an_axis_uses_follows_from_the_order_of_ranks() -> None:
    groups = Groups(Layout(pipeline_parallel_size=2, data_parallel_size=4, tensor_parallel_size=4), 8)
    assert groups.tensor == Group(4, 1, 4)
    assert groups.shards == Group(4, 2, 2)  # 4 ranks, 4 apart: two on each machine
    assert groups.between(0, 1) == Group(2, 2, 1)
    small = Groups(Layout(pipeline_parallel_size=4, tensor_parallel_size=2), 4)
    assert [small.between(cut, cut + 1).is_inside for cut in range(3)] == [True, False, True]
    replicated = Groups(Layout(data_parallel_size=16, data_parallel_replicas=2, expert_parallel_size=4), 8)
    assert (replicated.shards, replicated.replicas) == (Group(8, 1, 8), Group(2, 2, 1))
    assert (replicated.expert, replicated.expert_shards) == (Group(4, 1, 4), Group(2, 1, 2))
    uneven = Groups(Layout(data_parallel_size=4, tensor_parallel_size=3), 8)
    assert uneven.tensor == Group(3, 2, 1)  # of the third group one rank is on the other machine


def test_collectives_by_hand() -> None:
    links = Links(replace(PLAIN, inside=Link(100.0, 1.0), between=Link(10.0, 2.0)))
    inside, across = Group(4, 1, 4), Group(4, 2, 2)
    assert links.gather(inside, 400) == pytest.approx(300 / 100 + 3 * 1)
    assert links.reduce(inside, 400) == pytest.approx(2 * (300 / 100 + 3 * 1))
    # two adapters on each machine; of a ring of 4 two links cross
    assert links.gather(across, 400) == pytest.approx(300 / 20 + 3 / 4 * (2 * 1 + 2 * 2))
    assert links.exchange(across, 300) == pytest.approx(200 / 10 + 2)
    assert links.exchange(inside, 300) == pytest.approx(300 / 100 + 1)
    assert links.transfer(Group(2, 2, 1), 50) == pytest.approx(5 + 2)
    assert links.transfer(Group(2, 1, 2), 50) == pytest.approx(0.5 + 1)
    assert links.gather(Group(1), 400) == 0
    assert links.gather(across, 0) == 0  # as of experts, where there are none


# -- properties


@st.composite
def runs(draw: st.DrawFn) -> tuple[Counts, Layout, dict[str, Any]]:
    stages = draw(st.sampled_from([1, 2, 4]))
    tensor, replicas, shards = (draw(st.sampled_from([1, 2, 4])) for _ in range(3))
    counts = network(
        4,
        draw(st.integers(1, 10**12)),
        numel=draw(st.integers(1, 10**9)),
        output=draw(st.integers(0, 10**9)),
        traffic=draw(st.integers(1, 10**9)) if tensor > 1 else 0,
    )
    layout = Layout(stages, replicas * shards, replicas, tensor)
    held = Held(
        activation_checkpointing=draw(st.sampled_from([None, True, 2])),
        reduce_each_microbatch=draw(st.booleans()),
        reshard_after_forward=draw(st.sampled_from([None, True, False])),
        accumulates=draw(st.integers(1, 2)),
    )
    schedule = draw(st.sampled_from(["1F1B", "Eager1F1B", "GPipe"]))
    microbatches = draw(st.integers(stages, 3 * stages))
    return counts, layout, {"held": held, "schedule": schedule, "microbatches": microbatches}


@some
@given(run=runs(), which=st.sampled_from(["flops", "inside", "between", "memory"]), factor=st.floats(1, 100))
def test_a_faster_device_is_never_slower(run: Any, which: str, factor: float) -> None:
    counts, layout, options = run
    faster = {
        "flops": replace(PLAIN, flops={"bfloat16": factor * 1e12}),
        "inside": replace(PLAIN, inside=Link(factor * 1e9, 0.0)),
        "between": replace(PLAIN, between=Link(factor * 1e8, 0.0)),
        "memory": replace(PLAIN, memory_bandwidth=factor * 1e18),
    }[which]
    before, after = (timing(counts, layout, profile, **options).simulated().step for profile in (PLAIN, faster))
    assert after <= before * (1 + 1e-9)


@some
@given(run=runs())
def test_no_step_goes_below_its_bound(run: Any) -> None:
    counts, layout, options = run
    made = timing(counts, layout, **options)
    assert made.bound() <= made.simulated().step * (1 + 1e-9)
