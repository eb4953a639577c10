"""Parts of a model that don't train, on some stages nothing at all, and what is unfrozen in mid-run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning

from tests.parity import Case, Model, Seen, assert_alike, largest_difference, layout, on_ranks, train
from tests.training.parallel.small import SaveAtEnd


class HeadOnly(Model):
    """Freezes where the model is cut already, so that the first stage has nothing to train."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.model.requires_grad_(False)
        self.model.head.requires_grad_(True)
        return torch.optim.AdamW(self.model.head.parameters(), lr=1e-2)


class Unfreeze(BaseFinetuning):
    """The embeddings and blocks, which lie on both stages, at the second epoch; the last norm stays frozen."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        model: Any = pl_module.model
        self.freeze([model.token_embedding, model.position_embedding, model.blocks, model.norm])

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        model: Any = pl_module.model
        if epoch == 1:
            self.unfreeze_and_add_param_group([model.token_embedding, model.blocks], optimizer, lr=1e-3)


class Finetuned(Model):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        model: Any = self.model
        self.log("embedding has a gradient", float(model.token_embedding.weight.grad is not None))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def finetune(sizes: dict[str, int] | None, epochs: int, path: str, resume: bool) -> Seen:
    settings = {"max_epochs": epochs, "val_check_interval": 1.0, "limit_train_batches": 2}
    callbacks = [Unfreeze(), *([SaveAtEnd(path)] if sizes and not resume else [])]
    resumed = path if resume else None
    return train(
        "gpt", sizes, module=Finetuned, trainer=settings, callbacks=callbacks, steps=-1, samples=32, resume=resumed
    )


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [(layout(pipeline=2), layout(data=2)), pytest.param(layout(data=2), layout(pipeline=2), marks=pytest.mark.long)],
    ids=["pp2 then dp2", "dp2 then pp2"],
)
def test_unfreezing_in_mid_run_and_going_on_elsewhere(
    saved: dict[str, int], resumed: dict[str, int], tmp_path: Path
) -> None:
    path = str(tmp_path / "unfrozen.ckpt")
    first = on_ranks(saved, finetune, 2, path, False)
    second = on_ranks(resumed, finetune, 3, path, True)
    plain = finetune(None, 3, "", False)
    assert first.metrics["embedding has a gradient"] == 1, "also on the stage that hasn't it"
    assert [*first.losses, *second.losses] == pytest.approx(plain.losses, rel=5e-6)
    assert largest_difference(second.parameters, plain.parameters) < 2e-5


class ByHand(Model):
    """Freezes the embeddings and first blocks from the second epoch on, and none from the third, in its own hook."""

    def on_train_epoch_start(self) -> None:
        model: Any = self.model
        for part in (model.token_embedding, model.position_embedding, *model.blocks[:3]):
            part.requires_grad_(self.current_epoch != 1)


EPOCHS = {"max_epochs": 3, "val_check_interval": 1.0, "limit_train_batches": 2}
BY_HAND = Case(ByHand, options={"trainer": EPOCHS, "steps": -1, "samples": 32}, loss=5e-6)


def test_a_stage_may_have_nothing_to_train_and_what_trains_may_change_where_an_epoch_begins() -> None:
    head_only, _ = assert_alike(layout(pipeline=2), Case(HeadOnly), BY_HAND)
    assert head_only.gradients.keys() == {"model.head.weight"}


@pytest.mark.long
def test_what_trains_may_change_on_data_ranks_of_stages_too() -> None:
    assert_alike(layout(pipeline=2, data=2), BY_HAND)
