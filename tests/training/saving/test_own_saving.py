"""Modules that write their state dict themselves are saved whole by stages, each by the stage that holds it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, MinMaxObserver
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import trainer_of
from tests.training.parallel.small import Descends

WIDTH = 8


class Quantized(nn.Module):
    """Trains for 8-bit weights. ``FakeQuantize`` puts its scale into the state dict by code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.quantize = FakeQuantize(  # type: ignore[no-untyped-call]
            MinMaxObserver, -128, 127, dtype=torch.qint8, qscheme=torch.per_tensor_symmetric
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.quantize(self.linear.weight), self.linear.bias).tanh()


class Module(Descends):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Quantized() for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()  # type: ignore[no-any-return]


def fit(path: Path | None = None, resume: Path | None = None) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    data: Any = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    trainer = trainer_of({"pipeline_parallel_size": 2} if path else None, max_epochs=2 if resume else 1)
    module = Module()
    trainer.fit(module, DataLoader(data, batch_size=8), ckpt_path=resume)
    if path is None:
        return {name: value.clone() for name, value in module.state_dict().items()}
    trainer.save_checkpoint(path)
    return {name: full_tensor(value).clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def test_what_modules_write_into_the_state_dict_is_saved_by_their_stage(tmp_path: Path) -> None:
    [plain] = run_ranks(fit, 1, init=False)
    parts = run_ranks(fit, 2, tmp_path / "first", elastic=True)
    assert not parts[0].keys() & parts[1].keys()
    torch.testing.assert_close({**parts[0], **parts[1]}, plain)
    loaded = Module.load_from_checkpoint(tmp_path / "first", map_location="cpu").state_dict()
    torch.testing.assert_close(dict(loaded), plain)

    again = run_ranks(fit, 2, tmp_path / "second", tmp_path / "first", elastic=True)
    assert [part.keys() for part in again] == [part.keys() for part in parts]
