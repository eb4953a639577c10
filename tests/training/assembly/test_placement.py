"""Blocks to stages: the bottleneck is the least possible, and what can't be placed is refused with a remedy."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_shard.errors import PlacementError
from lightning_shard.pipeline.cost import ModelCost, PartCost
from lightning_shard.pipeline.placement import place


def model(blocks, before=0, after=0):
    def part(name, flops):
        return PartCost(name, parameters=10 * flops, bytes=40 * flops, flops=flops)

    return ModelCost(
        tuple(part(str(index), flops) for index, flops in enumerate(blocks)),
        ((0, part("embedding", before)), (len(blocks), part("norm", 0)), (len(blocks), part("head", after))),
    )


def all_stage_costs(blocks, before, after, stages):
    """The stage costs of every contiguous placement."""
    for cuts in combinations(range(1, len(blocks)), stages - 1):
        costs = [sum(blocks[start:stop]) for start, stop in pairwise([0, *cuts, len(blocks)])]
        costs[0] += before
        costs[-1] += after
        yield costs


@given(
    blocks=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    before=st.integers(0, 30),
    after=st.integers(0, 30),
    data=st.data(),
)
def test_auto_is_the_best_of_all_placements(blocks, before, after, data):
    stages = data.draw(st.integers(1, len(blocks)))
    placement = place(model(blocks, before, after), stages, "auto")
    costs = [stage.cost for stage in placement.stages]
    best = min((max(other), sum(cost**2 for cost in other)) for other in all_stage_costs(blocks, before, after, stages))
    assert (max(costs), sum(cost**2 for cost in costs)) == best


@given(
    blocks=st.lists(st.integers(0, 20), min_size=1, max_size=12),
    policy=st.sampled_from(["auto", "even"]),
    data=st.data(),
)
def test_every_block_is_on_one_stage_in_order_and_every_stage_has_one(blocks, policy, data):
    cost = model(blocks, 3, 5)
    placement = place(cost, data.draw(st.integers(1, len(blocks))), policy)
    assert [block for stage in placement.stages for block in stage.blocks] == list(range(len(blocks)))
    assert all(placement.counts)
    for block in range(len(blocks)):
        assert block in placement.stages[placement.stage_of(block)].blocks
    assert sum(stage.parameters for stage in placement.stages) == 10 * (sum(blocks) + 8)
    assert sum(stage.bytes for stage in placement.stages) == 40 * (sum(blocks) + 8)


def test_an_expensive_head_takes_blocks_from_the_last_stage():
    placement = place(model([4] * 8, before=0, after=8), 4, "auto")
    assert placement.counts[-1] == 1
    assert max(stage.cost for stage in placement.stages) == 12
    assert placement.stages[0].parts == ("embedding",)
    assert placement.stages[-1].parts == ("norm", "head")


def test_blocks_without_operations_are_placed_by_parameters_and_without_these_by_number():
    by_parameters = ModelCost(
        tuple(PartCost(str(i), parameters=p, bytes=0, flops=0) for i, p in enumerate([9, 1, 1, 1]))
    )
    assert place(by_parameters, 2).counts == (1, 3)
    by_number = ModelCost(tuple(PartCost(str(i), parameters=0, bytes=0, flops=0) for i in range(4)))
    assert place(by_number, 2).counts == (2, 2)


@pytest.mark.parametrize(
    ("stages", "policy", "reason"),
    [
        (5, "auto", r"5 stages need at least 5 blocks, and the network has 4: use pipeline_parallel_size=4"),
        (0, "auto", r"stages \(0\) must be an integer of at least 1"),
        (2, [2, 3], r"\[2, 3\]\) places 5 blocks, and the network has 4: for example \[2, 2\]"),
        (2, [4, 0], r"\[4, 0\]\) must give every stage at least 1 block"),
        (2, [1.5, 2.5], r"must give every stage at least 1 block, as an integer"),
        (3, [2, 2], r"one number for each of the 3 stages, and holds 2: for example \[2, 1, 1\]"),
        (2, "best", r'placement \(\'best\'\) must be "auto", "even"'),
        (2, 4, r'placement \(4\) must be "auto"'),
    ],
)
def test_what_can_not_be_placed_is_refused_with_what_would_fit(stages, policy, reason):
    with pytest.raises(PlacementError, match=reason):
        place(model([1] * 4), stages, policy)


def test_the_table_has_a_row_per_stage_and_fits_a_terminal():
    big = ModelCost(
        tuple(PartCost(f"model.layers.{i}", 1_500_000_000, 6_000_000_000, 3_000_000_000) for i in range(96)),
        (
            (0, PartCost("model.embed_tokens", 600_000_000, 2_400_000_000, 0)),
            (96, PartCost("model.norm", 12288, 49152, 24576)),
            (96, PartCost("lm_head", 600_000_000, 2_400_000_000, 1_200_000_000)),
        ),
    )
    placement = place(big, 8, devices=[f"node{i // 4}:cuda:{i % 4}" for i in range(8)])
    text = str(placement)
    print(text)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in text
    assert lines[0].split() == ["stage", "blocks", "also", "parameters", "bytes", "cost", "device"]
    assert len(lines) == 1 + 8 + 1
    assert lines[1].split()[:2] == ["0", "0-11"]
    assert "model.embed_tokens" in lines[1]
    assert "lm_head" in lines[8]
    assert "145.2 G" in lines[9]
    shares = [float(line.split(" %")[0].split()[-1]) for line in lines[1:9]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
