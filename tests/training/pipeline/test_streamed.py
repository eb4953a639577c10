"""Evaluations fill the pipeline over batches: results and hooks are those of one batch after the other."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.parity import trainer_of

BATCHES = 7


class Net(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)))
        self.begun = self.ended = 0

    def on_predict_epoch_start(self) -> None:
        self.blocks.train()  # so that what is drawn shows too

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.begun += 1
        return {"x": self.blocks(batch), "at": float(batch_idx)}

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.blocks(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Late(Net):
    """Changes after the network what it reads before."""

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        result = super().predict_step(batch + self.ended, batch_idx)
        self.ended = batch_idx + 1
        return result


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.written: list[Any] = []
        self.kept: list[int] = []

    def write_on_batch_end(  # type: ignore[override]
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Tensor, batch_idx: int, loader: int
    ) -> None:
        ends = trainer.strategy._steps._step._ends.values()
        self.kept.append(sum(len(end.channel._sending) for end in ends))
        self.written.append((loader, batch_idx, module.begun, batch.clone(), prediction["x"], prediction["at"]))


def loader(seed: int, size: int, rest: int = 0) -> DataLoader[Tensor]:
    samples = torch.randn(BATCHES * size + rest, 4, generator=torch.Generator().manual_seed(seed))
    return DataLoader([*samples], batch_size=size)  # type: ignore[arg-type]


def evaluate(stages: int, kind: type[Net], size: int, streams: bool) -> tuple[list[Any], Any, Any]:
    L.seed_everything(1)
    writer = Writer()
    trainer = trainer_of({"pipeline_parallel_size": stages, "microbatches": stages}, stages, callbacks=[writer])
    module = kind()
    in_order = mock.patch("lightning_shard.plugin.strategy.runs_in_order", return_value=True)
    on_all_stages = mock.patch("lightning_shard.lightning_private.write_no_predictions")
    with on_all_stages, nullcontext() if streams else in_order:
        found = trainer.predict(module, [loader(1, size), loader(2, size, rest=size // 2)])
        validated = trainer.validate(module, loader(3, size), verbose=False)
    # what was sent of earlier batches isn't kept: so many batches may be under way
    assert max(writer.kept) <= trainer.global_rank * stages
    return writer.written, found, validated


def both_ways(stages: int) -> list[list[int]]:
    """How many microbatches this stage had begun, when each batch was written, more than one after the other."""
    ahead = []
    for kind, size in ((Net, 2 * stages), (Late, 1)):
        written, found, validated = evaluate(stages, kind, size, True)
        expected, found_in_order, validated_in_order = evaluate(stages, kind, size, False)
        assert len(written) == len(expected) == 2 * BATCHES + (size > 1)
        for own, before in zip(written, expected):
            assert own[:2] == before[:2]
            assert own[5] == own[1]
            assert torch.equal(own[3], before[3])
            assert torch.equal(own[4], before[4])
        assert torch.equal(found[1][-1]["x"], found_in_order[1][-1]["x"])
        assert validated == validated_in_order
        ahead.append([own[2] - before[2] for own, before in zip(written, expected)])
    return ahead


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.long)])
def test_streamed_results_are_those_of_one_batch_after_the_other(stages: int) -> None:
    for rank, (plain, late) in enumerate(run_ranks(both_ways, stages, stages, elastic=True)):
        assert max(plain) == rank * stages  # so many stages follow, as the last one is on rank 0
        # at the end of each loader, and before a batch of other shapes
        assert plain[BATCHES - 1] == plain[2 * BATCHES - 1] == plain[-1] == 0
        assert not any(late)
