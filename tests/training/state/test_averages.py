"""Averages of weights, updated after each batch: a module's buffers, as latent diffusion's LitEma, or by callbacks.

Callbacks keep them by name in whole tensors, of which each stage updates its own parameters'.
"""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shard import checkpoint
from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import trainer_of

PLAN = {"net.blocks.*.0": "colwise", "net.blocks.*.2": "rowwise"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Averages(nn.Module):
    """Buffers named after the parameters; ``whole`` updates them from whole tensors."""

    def __init__(self, net: nn.Module, *, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.register_buffer("updates", torch.tensor(0))
        for name, parameter in net.named_parameters():
            self.register_buffer(name.replace(".", ""), parameter.detach().clone())

    @torch.no_grad()
    def forward(self, net: nn.Module) -> None:
        self.updates += 1
        decay = torch.tensor(0.9)
        averages = dict(self.named_buffers())
        for name, parameter in net.named_parameters():
            average: Any = averages[name.replace(".", "")]
            value: Any = parameter
            if self.whole and hasattr(value, "full_tensor"):
                value = value.full_tensor()
            if parameter.ndim > 1:
                average.sub_((1.0 - decay) * (average - value))
            else:
                average.sub_(0.1 * torch.sub(input=average, other=value.detach()))


class Module(L.LightningModule):
    def __init__(self, *, whole: bool = False) -> None:
        super().__init__()
        self.net = Net()
        self.averages = Averages(self.net, whole=whole)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.averages(self.net)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=0.01)


class Drawn(Module):
    """Draws weights towards their averages."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        averages = dict(self.averages.named_buffers())
        for name, parameter in self.net.named_parameters():
            average = averages[name.replace(".", "")]
            if parameter.ndim > 1:
                parameter.copy_(0.5 * parameter + 0.5 * average)
            else:
                parameter.add_(average - parameter, alpha=0.5)


class OfAll(Module):
    """A buffer of what a stage sees."""

    def on_train_batch_end(self, *_: Any) -> None:
        averages: Any = self.averages
        averages.updates.fill_(sum(p.numel() for _, p in self.net.named_parameters()))


class OfSamples(Module):
    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.net.head.bias.add_(batch.mean(0)[:3])


def batches() -> list[Tensor]:
    return list(torch.linspace(-3, 3, 3 * 8 * 8).sin().view(3, 8, 8))


def test_averages_of_each_stage_and_data_rank_are_saved_and_plain_tensors_meet_sharded_parameters() -> None:
    drawn, averaged = Trains(Drawn, batches, "dp2"), Trains(Module, batches, ["pp2", "dp2"])
    assert_train_alike({"averaged": averaged, "drawn towards their averages": drawn})


@pytest.mark.long
def test_plain_tensors_meet_whole_and_split_parameters_between_steps() -> None:
    split = {"layouts": "tp2", "options": {"tensor_parallel_plan": PLAN}}
    whole = Trains(partial(Module, whole=True), batches, ["pp2", "dp2"])
    ways = {"drawn": Trains(Drawn, batches, **split), "averaged": Trains(Module, batches, **split)}
    assert_train_alike({"from whole ones": whole, **ways})


def test_a_buffer_of_all_parameters_is_refused_on_stages() -> None:
    with pytest.raises(StepError, match=r"averages\.updates is a buffer that every pipeline stage holds"):
        assert_trains_alike(OfAll, batches, "pp2")


def test_a_plain_tensor_of_a_data_ranks_samples_is_refused() -> None:
    with pytest.raises(StepError, match=r"of shape \(3,\) meets a sharded parameter, and has other values"):
        assert_trains_alike(OfSamples, batches, "dp2")


LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "pp2": {"pipeline_parallel_size": 2},
    "dp2": {"data_parallel_size": 2},
}


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)), nn.Linear(8, 3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Keeps(L.Callback):
    """Whole tensors, of all parameters before they are laid out, and of those that a stage sees afterwards."""

    def __init__(self) -> None:
        self.early: dict[str, Tensor] = {}
        self.late: dict[str, Tensor] = {}

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        self.early = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            self.early[name].mul_(0.9).add_(parameter, alpha=0.1)
        for name, parameter in module.net.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.clone()
            self.late[name] = self.late.get(name, 0.0) + whole

    def state_dict(self) -> dict[str, Any]:
        return {"early": self.early}

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["late"] = [{"of": self.late}]


def save(layout: str, folder: Path) -> None:
    warnings.simplefilter("ignore")
    sizes = LAYOUTS[layout]
    samples = torch.linspace(-3, 3, 3 * 8 * 8).sin().view(24, 8)
    trainer = trainer_of(sizes or None, max_epochs=1, callbacks=[Keeps()])
    size = 8 // sizes.get("data_parallel_size", 1)
    trainer.fit(Plain(), DataLoader(samples, batch_size=size))  # type: ignore[arg-type]
    trainer.save_checkpoint(folder / f"{layout}.ckpt")


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2", marks=pytest.mark.long)])
def test_each_stages_averages_are_saved(layout: str, tmp_path: Path) -> None:
    run_ranks(save, 1, "one process", tmp_path, init=False)
    run_ranks(save, 2, layout, tmp_path, elastic=True)
    checkpoint.gather(tmp_path / f"{layout}.ckpt", tmp_path / "gathered.ckpt")
    expected = torch.load(tmp_path / "one process.ckpt", weights_only=False)
    found = torch.load(tmp_path / "gathered.ckpt", weights_only=False)
    torch.testing.assert_close(found["callbacks"]["Keeps"], expected["callbacks"]["Keeps"])
    torch.testing.assert_close(found["late"], expected["late"])
    assert len(expected["late"][0]["of"]) == 10
