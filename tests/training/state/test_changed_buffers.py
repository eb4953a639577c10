"""Buffers that data ranks change to different values are told of, with the remedy; equal ones aren't."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import Descends

WIDTH = 8


class Module(Descends):
    """Counts its steps in a buffer, and knows the mean of what it has seen."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.norm = nn.BatchNorm1d(WIDTH) if "norm" in kind else nn.Identity()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("codes", torch.ones(512, WIDTH))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.norm(self.blocks(batch[0]))
        self.steps += 1
        if "center" in self.kind:
            seen = x.detach().mean(0)
            self.center.lerp_(self.all_gather(seen).mean(0) if "reduced" in self.kind else seen, 0.1)
        if "codes" in self.kind:
            nearest = int(batch[0].square().sum() * 10) % len(self.codes)
            self.codes[nearest].lerp_(x.detach().mean(0), 0.01)
        return F.mse_loss(x, batch[0])


def fit(kind: str, sizes: dict[str, int]) -> list[str]:
    L.seed_everything(1, verbose=False)
    ranks = 2 * sizes.get("tensor_parallel_size", 1) * sizes.get("pipeline_parallel_size", 1)
    loader: Any = DataLoader(TensorDataset(torch.randn(48, WIDTH)), batch_size=4)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = trainer_of(
            {"data_parallel_size": 2, **sizes}, ranks, sync_batchnorm="synchronized" in kind, max_epochs=1
        )
        trainer.fit(Module(kind), loader)
    return [text for each in said if "changed buffers" in (text := str(each.message))]


def fit_each(kinds: list[str]) -> list[list[str]]:
    return [fit(kind, {}) for kind in kinds]


def test_buffers_that_differ_are_told_of_once() -> None:
    told = {
        "norm": "For norm.running_mean and 1 more, Trainer(sync_batchnorm=True)",
        "center": "For center, reduce what updates it, as by self.all_gather(x).mean(0).",
        "norm, center": "statistics. For center, reduce",
        "codes": "For codes, reduce",
        "synchronized norm": "",
        "reduced center": "",
        "": "",
    }
    first, second = run_ranks(fit_each, 2, [*told], elastic=True)
    assert second == [[]] * len(told)
    for kind, texts in zip(told, first, strict=True):
        assert len(texts) == bool(told[kind]), kind
        assert all(told[kind] in text for text in texts), kind
