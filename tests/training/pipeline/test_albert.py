"""ALBERT: one layer that runs again and again, over stages as on one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import nn

from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import Model, Seen, combine, largest_difference, layout, train

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "embedding_size": 16,
    "hidden_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "attention_probs_dropout_prob": 0.0,
}
CLIPPED = {"gradient_clip_val": 0.3}
"""Below the norm, so that one that counted a parameter twice would change every parameter."""


class Albert(Model):
    def __init__(self, dropout: float = 0.0, groups: int = 1) -> None:
        L.LightningModule.__init__(self)
        torch.manual_seed(1)
        config = transformers.AlbertConfig(**SIZES, hidden_dropout_prob=dropout, num_hidden_groups=groups)
        self.on_meta = False
        self.model: nn.Module = transformers.AlbertForMaskedLM(config)


def fit(sizes: dict[str, int] | None = None, **options: Any) -> Seen:
    made = options.pop("module", Albert)
    trainer = {**CLIPPED, **options.pop("trainer", {})}
    return train("albert", sizes, module=made, trainer=trainer, **options)


def saving(sizes: dict[str, int], folder: Path, resume: Path | None = None) -> Seen:
    keep = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    path = str(resume) if resume else None
    return fit(sizes, steps=4, callbacks=[keep], trainer={"enable_checkpointing": True}, resume=path)


def on_two_ranks(folder: Path) -> tuple[Seen, Seen]:
    """On two stages, and from the middle of that run on without stages."""
    first = saving(layout(pipeline=2), folder / "staged")
    return first, saving(layout(data=2), folder / "whole", folder / "staged" / "step=2.ckpt")


def assert_alike(ours: Seen, plain: Seen) -> None:
    assert plain.norm > CLIPPED["gradient_clip_val"]
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert ours.norm == pytest.approx(plain.norm, rel=1e-6)
    assert largest_difference(ours.gradients, plain.gradients) < 1e-7
    assert largest_difference(ours.parameters, plain.parameters) < 2e-5


def test_one_layer_on_two_stages_is_trained_saved_and_taken_up_as_one_parameter(tmp_path: Path) -> None:
    plain = fit(steps=4)
    first, second = zip(*run_ranks(on_two_ranks, 2, tmp_path, elastic=True))
    layer = "model.albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"
    assert all(layer in seen.parameters for seen in first)
    assert_alike(combine([*first], layout(pipeline=2)), plain)
    assert combine([*second], layout(data=2)).losses == pytest.approx(plain.losses[2:], rel=2e-6)
    stored = checkpoint.read(tmp_path / "staged" / "step=2.ckpt")
    assert checkpoint.verify(stored.path).ok
    assert {*stored} == Albert().state_dict().keys()
