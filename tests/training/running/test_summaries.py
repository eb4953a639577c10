"""What is printed where a run begins: ModelSummary's table of one process, and on rank 0 what is where, once."""

from __future__ import annotations

import logging
import warnings
from logging.handlers import BufferingHandler
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, PLANS, Model, layout, loader, trainer_of, world
from tests.training.models.unets import Batch, Diffusion, noisy_images

PIPELINE, TENSOR = layout(pipeline=2), layout(tensor=2)


class Summarized(Model):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 16, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Told(ModelSummary):
    """Keeps what it is to print."""

    told: Any = None

    @staticmethod
    def summarize(columns: Any, total: int, trainable: int, *_: Any, **__: Any) -> None:  # type: ignore[override]
        Told.told = dict(columns), total, trainable


def summarized(sizes: dict[str, int] | None) -> list[Any]:
    """What summaries of two Trainers of one module show."""
    devices, data = (1, 1) if sizes is None else (world(sizes), sizes["data_parallel_size"])
    module, shown = Summarized(), []
    for _ in range(2):
        options = None if sizes is None else {**sizes, "tensor_parallel_plan": PLANS["gpt"]}
        settings = {"max_steps": 1, "limit_val_batches": 0, "enable_model_summary": True}
        trainer = trainer_of(options, devices, callbacks=[Told(max_depth=2)], **settings)
        trainer.fit(module, loader(GLOBAL_BATCH // data))
        shown.append(Told.told)
    return shown


@pytest.mark.parametrize("sizes", [PIPELINE, pytest.param(TENSOR, marks=pytest.mark.long)], ids=["pp2", "tp2"])
def test_summaries_of_an_example_are_those_of_one_process(sizes: dict[str, int]) -> None:
    ours, plain = run_ranks(summarized, 2, sizes, elastic=True)[0], summarized(None)
    for (columns, *counts), (expected, *counts_of_one) in zip(ours, plain, strict=True):
        assert counts == counts_of_one
        assert columns == expected


class Evaluated(Diffusion):
    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(batch)


def printed() -> list[list[str]]:
    """The lines of placements, of: a fit and a validation; a lone validation; a fit without a summary."""
    logger, found = logging.getLogger("lightning.pytorch.utilities.rank_zero"), []

    def lines(*runs: tuple[Any, ...], module: L.LightningModule) -> list[str]:
        handler = BufferingHandler(1000)
        logger.addHandler(handler)
        for run in runs:
            run(module, DataLoader(noisy_images(), batch_size=None))  # type: ignore[arg-type]
        logger.removeHandler(handler)
        said = [line for record in handler.buffer for line in record.getMessage().splitlines()]
        begin = [place for place, line in enumerate(said) if line.startswith("stage  blocks")]
        return [line for place in begin for line in said[place - 1 : place + 4]]

    warnings.simplefilter("ignore")
    summaries = (True, True, False)
    both, alone, silent = (trainer_of(PIPELINE, max_steps=1, enable_model_summary=shown) for shown in summaries)
    found.append(lines(both.fit, both.validate, module=Evaluated()))  # type: ignore[arg-type]
    found.append(lines(alone.validate, module=Evaluated()))  # type: ignore[arg-type]
    found.append(lines(silent.fit, module=Evaluated()))  # type: ignore[arg-type]
    return found


def test_rank_0_prints_which_stage_has_what_once_a_run_in_80_columns_unless_summaries_are_off() -> None:
    (fit, validation, silent), *others = run_ranks(printed, 2, elastic=True)
    assert fit == validation
    assert len(fit) == 5
    assert fit[0] == "2 pipeline × 1 data × 1 tensor"
    assert [line.split()[0] for line in fit[1:]] == ["stage", "0", "1", "all"]
    assert "time, into" in fit[2]
    assert max(map(len, fit)) <= 80
    assert silent == []
    assert others == [[[], [], []]]
