"""State that a microbatch leaves: refused where the next one reads it, and of no matter where it doesn't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from tests.training.pipeline.test_crossing import WIDTH, WORDS, Net, batches, loss, seeded
from tests.training.pipeline.test_stages_of_a_rank import INTERLEAVED
from tests.training.pipelines import assert_alike, on_stages


class Keeps(Net):
    """Does something between blocks and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = self.at_first()

    def at_first(self) -> Any:
        return {"sum": 0.0}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden)
            self.between(hidden)
        return self.after(self.head(self.norm(hidden)))

    def between(self, hidden: Tensor) -> None:
        pass

    def after(self, logits: Tensor) -> Tensor:
        return logits


class SumInDict(Keeps):
    def between(self, hidden: Tensor) -> None:
        self.kept["sum"] = self.kept["sum"] + hidden.square().mean()

    def after(self, logits: Tensor) -> Tensor:
        logits = logits * self.kept["sum"]
        self.kept["sum"] = 0.0
        return logits


class AverageOfAll(Keeps):
    """Of losses, or the like; of one value twice it is the same."""

    def at_first(self) -> Any:
        return []

    def after(self, logits: Tensor) -> Tensor:
        self.kept.append(logits.detach().square().mean())
        return logits / torch.stack(self.kept).mean()


class Center(Keeps):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WORDS))

    def after(self, logits: Tensor) -> Tensor:
        result = logits - self.center
        self.center = 0.9 * self.center + 0.1 * logits.detach().mean((0, 1))
        return result


class CountsFirst(Keeps):
    def at_first(self) -> Any:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        self.kept += 1
        return super().forward(x) if self.kept % 2 else super().forward(x) * 0.5


class Recurrent(Keeps):
    """Truncated in time: goes on from the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def at_first(self) -> Any:
        return None

    def forward(self, x: Tensor) -> Tensor:
        hidden, state = self.cell(self.embed(x), self.kept)
        self.kept = state.detach()
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


@pytest.mark.parametrize("network", [SumInDict, AverageOfAll, Center, CountsFirst, Recurrent])
@pytest.mark.parametrize("schedule", [None, pytest.param(INTERLEAVED, marks=pytest.mark.long)])
def test_what_a_microbatch_leaves_for_the_next_is_refused(network: type[Net], schedule: Any) -> None:
    options = {"schedule": schedule, "microbatches": 4} if schedule else {}
    with pytest.raises(StepError, match=r"depends on what the step before has left|changes .* after calling"):
        on_stages(seeded(network), loss, batches(), 2, **options)


class SetAnew(SumInDict):
    def forward(self, x: Tensor) -> Tensor:
        self.kept["sum"] = 0.0
        return super().forward(x)

    def after(self, logits: Tensor) -> Tensor:
        return logits * self.kept["sum"]


class History(Keeps):
    """Nobody reads it in a step."""

    def at_first(self) -> Any:
        return {"all": [], "steps": 0}

    def between(self, hidden: Tensor) -> None:
        self.kept["all"].append(hidden.detach())

    def after(self, logits: Tensor) -> Tensor:
        self.kept["steps"] += 1
        return logits


@pytest.mark.parametrize("network", [SetAnew, History])
def test_what_the_next_step_does_not_read_is_of_no_matter(network: type[Net]) -> None:
    assert_alike(seeded(network), loss, batches(), 2)
