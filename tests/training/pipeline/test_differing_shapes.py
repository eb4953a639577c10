"""Batches of other lengths on other data ranks: pipelines that search for what crosses at different times."""

from __future__ import annotations

from functools import cache
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import largest_difference, trainer_of
from tests.training.parallel.small import Descends

WIDTH = 16


TEXTS = [torch.full((3 + index * 7 % 5,), index) for index in range(32)]
"""Of 3 to 7 tokens."""


def padded(texts: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(texts, batch_first=True)


class Model(Descends):
    """The mean over the embedded text crosses to all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(TEXTS), WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, len(TEXTS))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embed(batch)
        text = hidden.mean(1, keepdim=True)
        for block in self.blocks:
            hidden = hidden + block(hidden) + text
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)


class WithExperts(Model):
    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 8}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
        self.model = hf.MixtralForCausalLM(hf.MixtralConfig(vocab_size=len(TEXTS), **sizes, **heads))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss


class Generates(WithExperts):
    """Longer texts on one data rank than on the other."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        for _ in range(2 + self.trainer.strategy.layout.data_rank):  # type: ignore[attr-defined]
            following = self.model(input_ids=batch).logits[:, -1].argmax(-1)
            batch = torch.cat([batch, following[:, None]], 1)
        self.log("val_loss", (batch % 2).float().mean(), sync_dist=True)


def fit(kind: type[Model], settings: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    L.seed_everything(1)
    trainer = trainer_of({"pipeline_parallel_size": 2, "microbatches": 2, **settings}, 4, max_epochs=1)
    loader: Any = DataLoader(TEXTS, batch_size=4, collate_fn=padded)
    trainer.fit(kind(), loader, loader)
    parameters = trainer.strategy.gather_full_parameters()  # type: ignore[attr-defined]
    return float(trainer.callback_metrics["val_loss"]), parameters


@cache
def without_settings(kind: type[Model]) -> tuple[float, dict[str, Tensor]]:
    return run_ranks(fit, 4, kind, {}, elastic=True)[0]  # type: ignore[no-any-return]


FREED: dict[str, Any] = {"reshard_after_forward": True}
DEALT: dict[str, Any] = {"expert_parallel_size": 2}
LONG = [
    (Model, {**FREED, "reduce_each_microbatch": True}),
    (Model, {**FREED, "schedule": "Interleaved1F1B"}),
    (WithExperts, DEALT),
    (WithExperts, {**DEALT, **FREED, "schedule": "Interleaved1F1B"}),
]


@pytest.mark.parametrize(
    ("kind", "settings"), [(Model, FREED), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)]
)
def test_forwards_that_are_collective_over_data_ranks_are_made_alike(
    kind: type[Model], settings: dict[str, Any]
) -> None:
    loss, plain = without_settings(kind)
    other, parameters = run_ranks(fit, 4, kind, settings, elastic=True)[0]
    assert other == pytest.approx(loss, rel=1e-5)
    assert largest_difference(parameters, plain) < 1e-6


@pytest.mark.long
def test_but_not_where_experts_are_dealt() -> None:
    with pytest.raises(RanksFailed, match="Data ranks call the network a different number of times within one step"):
        run_ranks(fit, 4, Generates, DEALT, elastic=True)
