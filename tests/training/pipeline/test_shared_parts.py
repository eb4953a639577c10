"""Modules that all blocks are given and use, and that the network registers too, such as a rotary embedding."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.errors import StepError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.parity import QUIET

WIDTH = 8


class Rotary(nn.Module):
    angles: Tensor

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 1, WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos()


class Projection(nn.Module):
    """Random numbers that are never called, as all adapters of VeRA share them."""

    down: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("down", torch.randn(WIDTH, WIDTH))


class Block(nn.Module):
    def __init__(self, *shared: nn.Module) -> None:
        super().__init__()
        self.shared = nn.ModuleList(shared)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for shared in self.shared:
            y = y @ shared.down if isinstance(shared, Projection) else shared(y)
        return x + self.linear(y).tanh()


class Network(nn.Module):
    """Registers what its blocks share: with buffers that are saved or not, with parameters, or with neither."""

    def __init__(self, *shared: nn.Module, hooked: bool = False) -> None:
        super().__init__()
        self.shared = nn.ModuleList(shared)
        self.blocks = nn.ModuleList(Block(*shared) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []
        if hooked:
            for each in shared:
                each.register_forward_hook(self.note)

    def note(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self.seen.append(output)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = []
        for block in self.blocks:
            x = block(x)
        return self.head(x + sum(self.seen))


class Module(L.LightningModule):
    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        rotary, saved = Rotary(), Rotary(persistent=True)
        self.network = Network(rotary, saved, Projection(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), hooked=hooked)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.mse_loss(self.network(batch), batch.roll(1, -1))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> list[Tensor]:
    return list(torch.randn(3, 8, WIDTH, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("hooked", [False, True], ids=["", "with a hook"])
def test_trains_as_in_one_process(hooked: bool) -> None:
    # held by the two stages of a rank, or by one stage of each of four
    interleaved = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}
    assert_trains_alike(partial(Module, hooked), batches, interleaved if hooked else "pp4")


def fit(path: Path, resume: Path | None, **layout: Any) -> dict[str, Tensor]:
    """One more step, saved, and this rank's parameters and buffers."""
    torch.manual_seed(0 if resume is None else 1)
    module = Module()
    trainer = L.Trainer(
        strategy=HybridShardStrategy(**layout), devices=2, max_steps=1 if resume is None else 2, **QUIET
    )
    trainer.fit(module, DataLoader(batches(), batch_size=None), ckpt_path=resume)  # type: ignore[arg-type]
    trainer.save_checkpoint(path)
    return {name: full_tensor(value) for name, value in module.state_dict().items()}


def test_its_buffers_are_saved_once_by_each_of_their_names_and_loaded(tmp_path: Path) -> None:
    pipeline: dict[str, Any] = {"pipeline_parallel_size": 2, "microbatches": 2}
    run_ranks(fit, 2, tmp_path / "one", None, **pipeline, elastic=True)
    torch.manual_seed(0)
    plain = Module().state_dict()
    assert set(checkpoint.read(tmp_path / "one")) == set(plain)
    for resumed in (pipeline, {"data_parallel_size": 2}):
        for own in run_ranks(fit, 2, tmp_path / "two", tmp_path / "one", **resumed, elastic=True):
            held = {name: value for name, value in own.items() if name.endswith("down")}
            assert held
            assert all(torch.equal(value, plain[name]) for name, value in held.items())


class Counts(nn.Module):
    """Counts its calls, of which a stage makes its own blocks' only."""

    calls: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "data":
            self.calls.data += 1
        elif self.how == "anew":
            self.calls = self.calls + 1
        else:
            self.calls += 1
        return x


class Counting(Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.network = Network(Counts(how))


@pytest.mark.parametrize("how", ["data", "anew", pytest.param("in place", marks=pytest.mark.long)])
def test_one_that_changes_its_buffers_is_refused(how: str) -> None:
    with pytest.raises(StepError, match=r"changes (the buffer )?network\.shared\.0\.calls.*, and .* stage"):
        assert_trains_alike(partial(Counting, how), batches, "pp2")
