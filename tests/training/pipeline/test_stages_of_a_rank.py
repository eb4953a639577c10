"""Several stages on each rank of a pipeline: what crosses, what steps change, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError, PlacementError, StepError
from lightning_shard.plugin.steps.schedule_choice import candidates, fitting_schedules
from tests.paths import SCHEDULE_IN_A_V
from tests.training.pipeline.test_crossing import NETWORKS, WIDTH, Net, batches, loss, seeded
from tests.training.pipelines import Root, assert_alike, on_stages
from tests.training.state.test_state_of_steps import Counter, Nested

INTERLEAVED, V = "Interleaved1F1B", str(SCHEDULE_IN_A_V)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Stem(Net):
    """Statistics before the blocks, and around them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.BatchNorm1d(WIDTH)
        self.around = nn.BatchNorm1d(WIDTH, affine=False)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.stem(self.embed(x).transpose(1, 2)).transpose(1, 2)
        self.around(x[:, :1, None].float().expand(-1, WIDTH, 2))
        return self.leave(self.through(hidden))


ALL = {**NETWORKS, "Tied": Tied, "Stem": Stem}
FEW = {
    INTERLEAVED: ("UNet", "Conditioned", "EncoderAndDecoder", "Tied"),
    V: ("Collecting",),
    "InterleavedZeroBubble": ("UNet",),
    "ZBVZeroBubble": ("Tied", "Stem"),
    "DualPipeV": ("UNet",),
}


@pytest.mark.parametrize(
    ("network", "schedule"),
    [
        pytest.param(network, schedule, marks=() if network in few else pytest.mark.long)
        for schedule, few in FEW.items()
        for network in ALL
    ],
)
def test_a_network_on_four_stages_of_two_ranks_is_the_network_alone(network: str, schedule: str) -> None:
    assert_alike(seeded(ALL[network]), loss, batches(), 2, schedule=schedule)


@pytest.mark.parametrize("schedule", [INTERLEAVED, V], ids=["interleaved", "V"])
def test_statistics_around_the_blocks_are_of_each_microbatch_once(schedule: str) -> None:
    plain = seeded(Stem)()
    for x in batches():
        plain(x)
    roots: list[Root] = []
    on_stages(seeded(Stem), loss, batches(), 2, schedule=schedule, roots=roots)
    first: Any = roots[0 if schedule == INTERLEAVED else 1].net
    assert first.stem.num_batches_tracked == 4
    torch.testing.assert_close(first.stem.running_mean, plain.stem.running_mean)
    for root in roots:
        net: Any = root.net
        torch.testing.assert_close(dict(net.around.named_buffers()), dict(plain.around.named_buffers()))
        assert net.seen == 4


def test_what_the_last_stage_leaves_is_read_in_the_next_batch() -> None:
    assert_alike(seeded(Counter), loss, batches(), 2, schedule=INTERLEAVED, microbatches=1)


# -- refused


def test_an_iterator_that_stages_would_draw_from_in_turn_is_refused() -> None:
    with pytest.raises(StepError, match=r"draws from an iterator that the module keeps, and 2 stages.*1F1B"):
        on_stages(seeded(Nested), loss, batches(), 2, schedule=INTERLEAVED)


class Remembers(Net):
    """Adds to a tensor in place, in each microbatch or from the second on."""

    def __init__(self, later: bool) -> None:
        super().__init__()
        self.memory = torch.zeros(64)
        self.later, self.calls = later, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > self.later:
            self.memory.add_(1)
        return super().forward(x)


def test_a_tensor_that_a_step_changes_in_place_is_of_each_stage_or_refused() -> None:
    roots: list[Root] = []
    on_stages(seeded(partial(Remembers, False)), loss, batches(), 2, schedule=INTERLEAVED, roots=roots)
    for root in roots:
        net: Any = root.net
        assert set(net.memory.tolist()) == {float(net.calls)} == {4.0}
    with pytest.raises(StepError, match=r"changes net\.memory in place.*2 stages on this rank"):
        on_stages(seeded(partial(Remembers, True)), loss, batches(), 2, schedule=INTERLEAVED)


def test_how_many_stages_a_rank_has() -> None:
    assert candidates(INTERLEAVED, 2, None)[0].stages == 4
    assert candidates(INTERLEAVED, 2, None, [1] * 6)[0].stages == 6
    with pytest.raises(PlacementError, match="has 4 stages on 2 ranks, and the network has 3 blocks"):
        fitting_schedules(candidates(INTERLEAVED, 2, None), 3, "auto")
    with pytest.raises(
        ConfigurationError, match=r"\[2, 2\]\) has 2 numbers, and schedule='Interl.*has 4 stages: give one"
    ):
        candidates(INTERLEAVED, 2, None, [2, 2])
