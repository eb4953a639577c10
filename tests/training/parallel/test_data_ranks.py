"""Networks and steps that fully sharded data parallelism makes special, compared with one plain process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import grad
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.testing import RanksFailed, run_ranks
from tests.parity import (
    Case,
    Model,
    Seen,
    assert_alike,
    combine,
    compare,
    largest_difference,
    layout,
    on_ranks,
    train,
    trainer_of,
)
from tests.training.parallel.small import Descends

DATA = layout(data=2)


def gained(block: Any, _inputs: Any, output: Tensor) -> Tensor:
    return output * block.gain


class Scaled(Model):
    """Parameters without dimensions: CLIP's temperature, and one in a block."""

    def __init__(self) -> None:
        super().__init__()
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
    first = on_ranks(DATA, scale, 2, path, False)
    [second] = run_ranks(scale, 1, layout(), 3, path, True, elastic=True)
    plain = scale(None, 3, "", False)
    assert first.norm == pytest.approx(plain.norm, rel=1e-6)
    assert [*first.losses, *second.losses] == pytest.approx(plain.losses, rel=5e-6)
    assert largest_difference(second.parameters, plain.parameters) < 5e-5


class Pairs(Model):
    """Containers that are never called, and penalties: on gradients by inputs, on theirs, and on all parameters."""

    def __init__(self) -> None:
        super().__init__()
        del self.model
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)]) for _ in range(3))
        self.head = nn.Linear(16, 64)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        x = self.embed(batch["x"])
        each = self.each(x, batch["y"])
        if not torch.is_grad_enabled():
            return each.mean()
        (slope,) = grad(each.sum(), x, create_graph=True)
        (bend,) = grad(slope.square().sum(), x, create_graph=True)
        with torch.no_grad():
            self.each(x, batch["y"])  # frees what the graphs use
        parameters = (p.full_tensor() if isinstance(p, DTensor) else p for p in self.parameters())
        penalty = slope.square().mean() + bend.square().mean()
        return each.mean() + penalty + 0.01 * sum(p.square().sum() for p in parameters)

    def each(self, x: Tensor, y: Tensor) -> Tensor:
        for mix, feed in self.layers:  # type: ignore[misc]
            x = x + feed(F.gelu(mix(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten(), reduction="none")


class Adversaries(L.LightningModule):
    """Two optimizers by hand, of which each freezes the other's network; gradients by inputs before each steps."""

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
            seen = real.clone().requires_grad_()
            torch.autograd.grad(self.judges(seen).sum(), seen)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.log("train_loss", loss.detach() + self.judges(real).mean(), sync_dist=True)  # by the new weights

    def of_maker(self, real: Tensor, noise: Tensor) -> Tensor:
        return -self.judges(self.makes(noise)).mean()

    def of_judge(self, real: Tensor, noise: Tensor) -> Tensor:
        between = (0.5 * real + 0.5 * self.makes(noise).detach()).requires_grad_()
        slope = self.slope(self.judges(between).sum(), between)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        self.manual_backward(0.1 * self.judges(real).square().mean())  # isn't of what was differentiated
        return self.judges(self.makes(noise).detach()).mean() - self.judges(real).mean() + penalty

    def slope(self, of: Tensor, by: Tensor) -> Tensor:
        return torch.autograd.grad(of, by, create_graph=True)[0]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in (self.makes, self.judges)], []


class InAThread(Adversaries):
    """A thread numbers what it records anew, and the next backward runs that last: so do those of accelerators."""

    def slope(self, of: Tensor, by: Tensor) -> Tensor:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(super().slope, of, by).result()


OPTIONS = {"steps": 4, "trainer": {"limit_val_batches": 0, "val_check_interval": 1.0}}


def test_containers_penalties_and_toggled_optimizers() -> None:
    assert_alike(DATA, *(Case(kind, options=OPTIONS, loss=1e-5) for kind in (Pairs, InAThread)))


class Named(Adversaries):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, inputs=list(self.judges.parameters()))


class Creating(Adversaries):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, create_graph=True)


@pytest.mark.parametrize(("kind", "match"), [(Named, "gradients by parameters"), (Creating, "create_graph=True")])
@pytest.mark.long
def test_backwards_that_would_lose_gradients_are_refused(kind: Any, match: str) -> None:
    with pytest.raises(RanksFailed, match=match):
        run_ranks(train, 2, "gpt", DATA, module=kind, elastic=True, **OPTIONS)


class Normalizing(Model):
    """BatchNorm before the blocks, in them, and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        kinds: list[dict[str, Any]] = [{"momentum": None}, {}, {"affine": False}, {"eps": 1e-3}]
        stem, *norms = (nn.BatchNorm1d(32, **kind) for kind in kinds)
        blocks = (nn.Sequential(nn.Linear(32, 32), Columns(norm), nn.Tanh()) for norm in norms)
        self.model = nn.Sequential(nn.Embedding(64, 32), Columns(stem), *blocks, nn.Linear(32, 64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)  # Adam would make steps of the rounding of a bias's gradient


class Columns(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Statistics(L.Callback):
    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.kept = {name: b.detach().cpu().clone() for name, b in module.named_buffers() if type(b) is Tensor}


def normalize(sizes: dict[str, int] | None) -> tuple[Seen, dict[str, Tensor]]:
    statistics = Statistics()
    trainer = {"sync_batchnorm": True, "gradient_clip_val": 0.05}
    return train("gpt", sizes, module=Normalizing, trainer=trainer, callbacks=[statistics]), statistics.kept


def test_synchronized_batch_norm_normalizes_by_all_samples() -> None:
    per_rank = run_ranks(normalize, 2, DATA, elastic=True)
    ours, (plain, kept) = combine([seen for seen, _ in per_rank], DATA), normalize(None)
    compare(ours, plain, Case(norm=2e-6, gradients=1e-7, parameters=5e-5))  # metrics by running statistics
    for _, own in per_rank:
        assert all(torch.allclose(own[name], kept[name], rtol=1e-5, atol=1e-6) for name in own)


@pytest.mark.long
def test_it_is_synchronized_within_a_stage() -> None:
    sizes = layout(pipeline=2, data=2)
    per_rank = [kept for _, kept in run_ranks(normalize, 4, sizes, elastic=True)]
    for one, other in (per_rank[:2], per_rank[2:]):
        assert one
        assert all(torch.equal(one[name], other[name]) for name in one)


class Normalized(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.blocks(batch[0]).square().mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    validation_step = training_step


def validated(folder: Path, sizes: dict[str, int]) -> list[float]:
    """Before saving, and after loading."""
    L.seed_everything(1)
    samples = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8)
    trainer = trainer_of(sizes, max_epochs=1)
    trainer.fit(trained := Normalized(), samples)
    (before,) = trainer.validate(trained, samples, verbose=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    trainer = trainer_of(sizes, max_epochs=1)
    (after,) = trainer.validate(Normalized(), samples, ckpt_path=str(folder / "last.ckpt"), verbose=False)
    return [before["loss"], after["loss"]]


def test_batch_norms_statistics_are_the_same_before_saving_and_after_loading(tmp_path: Path) -> None:
    for before, after in run_ranks(validated, 2, tmp_path, {"data_parallel_size": 2}, elastic=True):
        assert before == pytest.approx(after, rel=1e-6)
