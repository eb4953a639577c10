"""What code keeps beside objects, on two stages: under global names, and as attributes of classes and functions."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import VOCABULARY, Model, layout, train

WIDTH = 8
LOSSES: list[Tensor] = []
TABLE: dict[str, Any] = {"sum": 0.0}
CACHE: dict[int, Tensor] = {}
CALLS = 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result = x + torch.tanh(self.linear(x))
        self.tell(result.square().mean())
        return result

    def tell(self, loss: Tensor) -> None:
        pass


class OfBlocks(Model):
    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def between(self, hidden: Tensor) -> None:
        pass

    def beside(self) -> Any:
        return 0.0

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        hidden = self.embed(batch["x"])
        for block in self.blocks:
            hidden = block(hidden)
            self.between(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten()) + self.beside()


class TellsGlobal(Block):
    def tell(self, loss: Tensor) -> None:
        add_loss(loss)


def add_loss(loss: Tensor) -> None:
    LOSSES.append(loss)


class GlobalList(OfBlocks):
    block = TellsGlobal

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        LOSSES.clear()
        return super().training_step(batch, batch_idx)

    def beside(self) -> Any:
        return sum(LOSSES)


class GlobalTable(OfBlocks):
    def between(self, hidden: Tensor) -> None:
        TABLE["sum"] = TABLE["sum"] + hidden.detach().square().mean()

    def beside(self) -> Any:
        loss, TABLE["sum"] = TABLE["sum"], 0.0
        return loss


class Caches(Block):
    """And counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        global CALLS  # noqa: PLW0603
        CALLS += 1
        length = x.shape[1]
        if length not in CACHE:
            CACHE[length] = torch.linspace(0, 1, length)
        return super().forward(x) * CACHE[length][:, None]


class Loads(OrderedDict[str, Any]):
    """As transformers' mappings of all models: whoever goes over it imports each."""

    def refuse(self, *_: Any) -> Any:
        raise ImportError("gone over")

    __iter__ = keys = values = items = refuse


MODELS = Loads()


class Fine(OfBlocks):
    block = Caches
    models = MODELS

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        TABLE["sum"] = 0.0
        assert len(MODELS) == len(self.models) == 0
        return super().training_step(batch, batch_idx)

    def between(self, hidden: Tensor) -> None:
        TABLE["sum"] = TABLE["sum"] + hidden.square().mean()

    def beside(self) -> Any:
        return TABLE["sum"]


STEPS = 0
SEEN: list[float] = []


class Counts(Fine):
    """With state that the step goes on from, and the loss doesn't read."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        global STEPS  # noqa: PLW0603
        STEPS += 1
        SEEN.append(float(batch["x"].sum()))
        return super().training_step(batch, batch_idx)


def count(sizes: dict[str, Any]) -> tuple[list[float], int, list[float]]:
    losses, _ = fit(Counts, sizes)
    return losses, STEPS, SEEN


def fit(kind: type[OfBlocks], sizes: dict[str, Any] | None) -> tuple[list[float], int]:
    """The losses, and how often blocks said that they were called."""
    settings, options = {"limit_val_batches": 0, "val_check_interval": 1.0}, {}
    if sizes is not None:
        sizes, options = layout(pipeline=2), sizes
    return train("gpt", sizes, steps=2, module=kind, trainer=settings, **options).losses, CALLS


STAGES = {"microbatches": 2}


@pytest.mark.parametrize(
    ("kind", "said"),
    [(GlobalList, "changes the list .*LOSSES"), (GlobalTable, "what the step before has left")],
)
def test_what_other_stages_do_not_see_is_refused(kind: type[OfBlocks], said: str) -> None:
    with pytest.raises(RanksFailed, match=said):
        run_ranks(fit, 2, kind, STAGES, elastic=True)


def test_sums_that_a_step_begins_anew_and_caches_are_as_in_one_process() -> None:
    expected, _ = fit(Fine, None)
    (losses, first), (same, last) = run_ranks(fit, 2, Fine, STAGES, elastic=True)
    assert losses == same == pytest.approx(expected, rel=1e-5)
    assert first + last == 2 * 2 * 4  # what is run to look at a step isn't counted


def test_stages_of_one_rank_count_once_beside_objects_too() -> None:
    expected, _ = fit(Fine, None)
    sizes = {**STAGES, "schedule": "Interleaved1F1B"}
    for losses, steps, seen in run_ranks(count, 2, sizes, elastic=True):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert steps == len(seen) == 2 * 2  # batches and microbatches, not once for each of two stages
        assert len(set(seen)) == len(seen)
