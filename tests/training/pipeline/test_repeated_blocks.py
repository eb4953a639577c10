"""Blocks that run at several places, on several stages: all is as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shard.errors import StepError
from lightning_shard.pipeline.stages.tied import Tie
from lightning_shard.plugin.assembly.assemble import _apart
from tests.training.pipeline.test_crossing import WIDTH, WORDS, Block, batches, loss, seeded
from tests.training.pipelines import assert_alike, on_stages


class Looped(nn.Module):
    """One block that is called in a loop, as ALBERT's layer and a Universal Transformer's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WORDS)

    def call(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return block(hidden)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for _ in range(4):
            hidden = self.call(self.block, hidden)
        return self.head(hidden)


class Recomputing(Looped):
    """A stage would recompute what was computed elsewhere."""

    def call(self, block: nn.Module, hidden: Tensor) -> Tensor:
        return checkpoint(block, hidden, use_reentrant=False)


class Listed(Looped):
    """A list that holds blocks several times."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.listed())
        del self.block

    def listed(self) -> list[nn.Module]:
        return [self.block] * 4

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = self.call(block, hidden)
        return self.head(hidden)


class TiedBlocks(Listed):
    """Blocks of their own that share some weights."""

    def listed(self) -> list[nn.Module]:
        blocks = [Block() for _ in range(4)]
        for block in blocks[1:]:
            block.up.weight = blocks[0].up.weight
        blocks[3].norm = blocks[1].norm
        return [*blocks]


AT_FOUR_PLACES = ["net.block"] * 4


@pytest.mark.parametrize(
    ("network", "stages", "blocks"),
    [
        (Looped, 2, AT_FOUR_PLACES),
        (Looped, 2, [*AT_FOUR_PLACES, "net.block", "net.block"]),  # a place that isn't come to
        (Listed, 3, None),
        (TiedBlocks, 3, None),
    ],
)
def test_each_use_of_a_block_is_a_place(
    network: Callable[[], nn.Module], stages: int, blocks: list[str] | None
) -> None:
    assert_alike(seeded(network), loss, batches(), stages, blocks=blocks)


@pytest.mark.parametrize(
    ("network", "stages", "blocks", "says"),
    [
        (Recomputing, 2, AT_FOUR_PLACES, r"net\.block runs on several stages, and here within a torch\.utils"),
        (Looped, 2, AT_FOUR_PLACES[:3], "net.block ran 4 times within one step, and a pipeline expects it 3×"),
    ],
)
def test_what_a_pipeline_cant_tell_apart_is_refused(
    network: Callable[[], nn.Module], stages: int, blocks: list[str], says: str
) -> None:
    with pytest.raises(StepError, match=says):
        on_stages(seeded(network), loss, batches(), stages, blocks=blocks)


def test_units_hold_no_parameter_that_others_use() -> None:
    parameters = [("a.up", "b.up"), ("a.down",), ("c.up", "c.again"), ("d.up",)]
    assert _apart("abcd", parameters, ()) == ["c", "d"]
    assert _apart("abcd", parameters, [Tie(("d.up",), (0, 1))]) == ["c"]
