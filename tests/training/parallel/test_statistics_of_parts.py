"""Statistics of a block's layers that the network calls by themselves, of parts that run where they aren't held, and of
one sample of all ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.parallel import batch_norm
from lightning_shard.parallel.batch_norm import synchronize
from lightning_shard.testing import assert_trains_alike
from tests.alike import Trains, assert_train_alike
from tests.training.parallel.small import Descends

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x)).tanh()


class Module(Descends):
    """As torch_geometric's DeepGCN: the first block's layer begins, and its norm ends."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        first: Block = self.blocks[0]  # type: ignore[assignment]
        x = first.layer(batch)
        for block in self.blocks[1:]:
            x = block(x)
        return (self.head(first.norm(x)) - batch).square().mean()


def batches() -> list[Tensor]:
    made = torch.Generator().manual_seed(0)
    return [torch.randn(size, WIDTH, generator=made) for size in (8, 8, 6, 8)]


WHOLE = {"pipeline_parallel_size": 2, "microbatches": 1}


class NormsLate(Module):
    """Its loop names the norm, which is so taken for one that runs between the blocks, and runs after them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for i, block in enumerate(self.blocks):
            x = self.norm(x) if i > len(self.blocks) else block(x)
        return (self.head(self.norm(x)) - batch).square().mean()


class WithAnExample(L.LightningModule):
    """Says in which order blocks and parts run."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = batches()[0]

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.training_step(x, 0)
        return loss


class NormsLateWithAnExample(WithAnExample, NormsLate):
    pass


def test_a_part_that_changes_its_statistics_on_a_stage_that_doesnt_save_them_is_refused() -> None:
    with pytest.raises(StepError, match=r"changes the buffer norm.running_mean.*example_input_array"):
        assert_trains_alike(NormsLate, batches, WHOLE)


def test_they_are_those_of_one_process() -> None:
    several = {**WHOLE, "schedule": "Interleaved1F1B"}
    with_example = Trains(NormsLateWithAnExample, batches, WHOLE)
    assert_train_alike({"of a block": Trains(Module, batches, several), "of a part after blocks": with_example})


class NormsBetween(Module):
    """An earlier stage runs a norm of a later one, too, on what it doesn't know: it comes before that one's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        one, two, *rest = self.blocks
        x = rest[1](rest[0](self.norm(two(one(batch)))))
        return (self.head(x) - batch).square().mean()


class NormsBetweenWithAnExample(WithAnExample, NormsBetween):
    pass


class Tallies(nn.Module):
    """Adds up what it is given: in microbatches too the same at the end of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum(0)
        return x


class TalliesBetween(NormsBetweenWithAnExample):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.norm = nn.Sequential(nn.Linear(WIDTH, WIDTH), Tallies())


@pytest.mark.long
def test_a_part_before_a_later_stage_runs_is_that_stages_whatever_an_earlier_one_reads_of_it() -> None:
    placed = {**WHOLE, "placement": [2, 2]}
    in_two = Trains(TalliesBetween, batches, {**placed, "microbatches": 2})
    assert_train_alike({"whole": Trains(NormsBetweenWithAnExample, batches, placed), "in microbatches": in_two})


def test_one_value_per_channel_is_refused_and_changes_no_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "summed_both_ways", lambda part, group: part)
    layer, group = nn.BatchNorm1d(3), object()
    plain: Any = group
    synchronize(layer, plain)
    with pytest.raises(StepError, match=r"one value per channel .*shape \(1, 3\).*drop_last=True"):
        layer(torch.randn(1, 3))
    assert torch.equal(layer.running_var, torch.ones(3))
    layer(torch.randn(2, 3))
    assert layer.running_var.isfinite().all()
