"""Bad input to a fit is refused with value, constraint and remedy, on every rank, and nothing hangs."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.errors import (
    BatchError,
    ConfigurationError,
    LayoutError,
    PlacementError,
    PlanError,
)
from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import Model, layout, loader, trainer_of
from tests.refusals import Refusal, assert_refused

PIPELINE = layout(pipeline=2)
TENSOR = layout(tensor=2)
PLAN = {"mlp.up": "colwise", "mlp.down": "rowwise"}


def gpt() -> L.LightningModule:
    return Model()


# -- steps


def fit_and_die(make: Callable[[], L.LightningModule], accounts: str) -> None:
    """A fit that ends as a script does: an error ends the process, and with it its connections."""
    L.seed_everything(3)
    trainer = trainer_of({"pipeline_parallel_size": 2}, max_steps=2)
    try:
        trainer.fit(make(), loader(16))
    except Exception:
        Path(accounts, f"{trainer.global_rank}").write_text(traceback.format_exc())
        os._exit(1)


@pytest.mark.parametrize(
    ("make", "fails", "says"),
    [
        ("CallsTwice", 0, r"The network \(\w+\) was called a second time within one step"),
        pytest.param("NeverCalls", 1, "training_step returned without calling the network", marks=pytest.mark.long),
        ("FailsOnLastStage", 0, "ZeroDivisionError"),
        pytest.param("RecomputesReentrantly", 1, "use_reentrant=False", marks=pytest.mark.long),
    ],
)
def test_a_step_that_one_stage_cant_run_stops_all_with_the_first_cause(
    make: str, fails: int, says: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed):
        run_ranks(fit_and_die, 2, globals()[make], str(tmp_path), elastic=True, timeout_s=50)
    accounts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert re.search(says, accounts[fails])
    assert re.search(f"(?s)The first failure was on rank {fails}: .*{says}", accounts[1 - fails]), accounts[1 - fails]


def test_a_plan_that_only_one_stage_could_see_to_be_wrong() -> None:
    plan = {"tensor_parallel_plan": {"head": "colwise"}}
    sizes = layout(pipeline=2, tensor=2)
    assert_refused({"it": Refusal(sizes, OddHead, PlanError, "head.weight .* has 63 out features", plan)}, ranks=4)


# -- modules


class Net(nn.Module):
    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


class Plain(L.LightningModule):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.model: nn.Module = Net(layers)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class NoBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(64, 16)})


class Lazy(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.LazyLinear(16)


class OddWidth(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model.layers = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(16, 3)}) for _ in range(2))


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class NormalizesAgain(Plain):
    """One block at four places, which keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))] * 4)


class CallsTwice(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.model(batch["x"])
        return super().training_step(batch, batch_idx)


class NeverCalls(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return torch.zeros((), requires_grad=True)


class FailsOnLastStage(Plain):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss / (1 // 0)


class Recomputes(Net):
    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint as recompute

        hidden = self.embed(x)
        for layer in self.layers:
            hidden = recompute(layer, hidden, use_reentrant=True)
        return self.head(hidden)


class RecomputesReentrantly(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model = Recomputes()


class StepsEarly(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.AdamW(self.parameters())
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.made.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.made


class TrainsNothing(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)


class OddHead(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.Linear(16, 63)


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(8))


class CountsOnMeta(Plain):
    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model.places = Places()


class TiedByHand(Manual):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 64, bias=False)
        self.other.weight = self.model.embed.weight  # type: ignore[union-attr]


# -- what is refused on two ranks before the first step

DATA = layout(data=2)
REFUSED = {
    "an optimizer that stepped before the module was sharded": Refusal(
        layout(data=2), StepsEarly, ConfigurationError, "made before the module was sharded: make it in configure_opt"
    ),
    "nothing to train": Refusal(PIPELINE, TrainsNothing, PlacementError, "No parameter requires gradients"),
    "three stages": Refusal(
        {**layout(pipeline=3), "data_parallel_size": "auto"},
        gpt,
        LayoutError,
        r"\(3\).* must divide the number of processes \(2\).*\[1, 2\]",
        ranks=2,
    ),
    "four data ranks": Refusal(
        layout(data=4),
        gpt,
        LayoutError,
        r"data_parallel_size \(4\) = 4 must equal the number of processes \(2\).*data_parallel_size=2",
        ranks=2,
    ),
    "no blocks": Refusal(PIPELINE, NoBlocks, PlacementError, r"no list of repeated blocks.*pipeline_blocks"),
    "a lazy layer in stages": Refusal(PIPELINE, Lazy, ConfigurationError, r"model\.head\.weight has no shape yet"),
    "counts of too few blocks": Refusal(PIPELINE, gpt, PlacementError, "4", {"placement": [1, 2]}),
    "a pattern without a match": Refusal(
        TENSOR,
        gpt,
        PlanError,
        r"'blocks\.\*\.attention\.q' matches no module",
        {"tensor_parallel_plan": {**PLAN, "blocks.*.attention.q": "colwise"}},
    ),
    "no plan": Refusal(TENSOR, gpt, PlanError, r"needs a plan and Model brings none: pass tensor_parallel_plan"),
    "a size that a plan can't split": Refusal(
        TENSOR,
        OddWidth,
        PlanError,
        r"3 out features, which tensor_parallel_size \(2\) must divide",
        {"tensor_parallel_plan": {"0.mix": "colwise"}},
    ),
    "every fifth of four blocks": Refusal(
        PIPELINE,
        gpt,
        ConfigurationError,
        r"activation_checkpointing=5 is every 5th block, and there are 4: use a smaller number, or True",
        {"activation_checkpointing": 5},
    ),
    "a block of two stages with statistics": Refusal(
        PIPELINE,
        NormalizesAgain,
        PlacementError,
        r"model\.layers\.0\.1 is in several places, on several pipeline stages, and has statistics",
    ),
    "a batch that can't be cut": Refusal(
        PIPELINE, gpt, BatchError, r"batch of 6 samples can't be cut into 4.*multiple of 4.*drop_last", batch=6
    ),
    "numbers on meta that nothing sets": Refusal(
        DATA, CountsOnMeta, ConfigurationError, "'places' of the .* nothing initialises it"
    ),
    "a tie over two modules with manual optimization": Refusal(
        DATA, TiedByHand, ConfigurationError, "can't be one tied parameter of two modules"
    ),
}


def test_every_rank_refuses() -> None:
    assert_refused(REFUSED)
