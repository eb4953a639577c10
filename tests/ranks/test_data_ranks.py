"""Networks and steps that fully sharded data parallelism makes special, compared with one plain process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.testing import run_ranks
from tests.parity import Model, Seen, combine, largest_difference, layout, train, world

DATA = layout(data=2)


def gained(block: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output * block.gain


class Scaled(Model):
    """Parameters without dimensions: CLIP's temperature, and one in a block."""

    def __init__(self) -> None:
        super().__init__("gpt")
        self.logit_scale = nn.Parameter(torch.tensor(0.5))
        self.model.blocks[1].gain = nn.Parameter(torch.tensor(1.0))
        self.model.blocks[1].register_forward_hook(gained)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        logits = self.model(batch["x"]) * self.logit_scale.exp()
        return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


class Save(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == trainer.max_steps:
            trainer.save_checkpoint(self.path)


def scale(sizes: dict[str, int] | None, steps: int, path: str, resume: bool) -> Seen:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05, "val_check_interval": 1.0}
    callbacks = [Save(path)] if sizes and not resume else []
    resumed = path if resume else None
    return train("gpt", sizes, module=Scaled, trainer=settings, callbacks=callbacks, steps=steps, resume=resumed)


def test_parameters_without_dimensions_train_and_are_restored_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "scaled.ckpt")
    first = combine(run_ranks(scale, 2, DATA, 2, path, False, elastic=True), DATA)
    [second] = run_ranks(scale, 1, layout(), 3, path, True, elastic=True)
    plain = scale(None, 3, "", False)
    assert first.norm == pytest.approx(plain.norm, rel=1e-6)
    assert [*first.losses, *second.losses] == pytest.approx(plain.losses, rel=5e-6)
    assert largest_difference(second.parameters, plain.parameters) < 5e-5


class Pairs(Model):
    """Containers that are never called, and penalties: on gradients by inputs, and on all parameters."""

    def __init__(self) -> None:
        super().__init__("gpt")
        del self.model
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        hidden = x
        for mix, feed in self.layers:  # type: ignore[misc]
            hidden = hidden + feed(F.gelu(mix(hidden)))
        each = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["y"].flatten(), reduction="none")
        if not torch.is_grad_enabled():
            return each.mean()
        (slope,) = torch.autograd.grad(each.sum(), x, create_graph=True)
        parameters = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters())
        return each.mean() + slope.square().mean() + 0.01 * sum(p.square().sum() for p in parameters)


class Adversaries(L.LightningModule):
    """Two optimizers by hand, of which each freezes the other's network."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.makes = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        self.judges = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        real, noise = batch["x"] / 64, batch["y"] / 64
        for optimizer, loss_of in zip(self.optimizers(), (self.of_maker, self.of_judge)):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            loss = loss_of(real, noise)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("train_loss", loss, sync_dist=True)

    def of_maker(self, real: Tensor, noise: Tensor) -> Tensor:
        return -self.judges(self.makes(noise)).mean()

    def of_judge(self, real: Tensor, noise: Tensor) -> Tensor:
        between = (0.5 * real + 0.5 * self.makes(noise).detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.judges(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.judges(self.makes(noise).detach()).mean() - self.judges(real).mean() + penalty

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.makes, self.judges)], []


def train_kind(sizes: dict[str, int] | None, kind: Any) -> Seen:
    settings = {"limit_val_batches": 0, "val_check_interval": 1.0}
    return train("gpt", sizes, module=kind, trainer=settings, steps=4)


@pytest.mark.parametrize("kind", [Pairs, Adversaries])
def test_containers_penalties_and_toggled_optimizers(kind: Any) -> None:
    ours = combine(run_ranks(train_kind, world(DATA), DATA, kind, elastic=True), DATA)
    plain = train_kind(None, kind)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert largest_difference(ours.parameters, plain.parameters) < 2e-5
