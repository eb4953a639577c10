"""A run that goes on in another precision, with the optimizer's state in that one, as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, layout
from tests.training.habits.harness import Net

AFTER = {"32-true": torch.float32, "bf16-true": torch.bfloat16}


class Module(L.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.kind = Net(), optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch.to(self.net.embed.weight.dtype)) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(sizes: dict[str, int], folder: Path) -> dict[str, tuple[set[torch.dtype], int]]:
    found: dict[str, tuple[set[torch.dtype], int]] = {}
    loader: Any = DataLoader(list(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)
    for optimizer in ("AdamW", "SGD"):
        path = str(folder / optimizer)
        for first, then in (("32-true", "bf16-true"), ("bf16-true", "32-true")):
            for precision, steps in ((first, 2), (then, 4)):
                strategy = HybridShardStrategy(**sizes)
                settings: dict[str, Any] = {**QUIET, "devices": 2, "max_steps": steps, "precision": precision}
                trainer = L.Trainer(strategy=strategy, **settings)
                trainer.fit(Module(optimizer), loader, ckpt_path=path if precision == then else None)
                if precision == first:
                    trainer.save_checkpoint(path)
            states = trainer.optimizers[0].state.values()
            dtypes = {
                value.dtype for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim
            }
            found[f"{optimizer} {then}"] = dtypes, trainer.global_step
    return found


@pytest.mark.parametrize(
    "sizes", [layout(pipeline=2), pytest.param(layout(data=2), marks=pytest.mark.long)], ids=["pp2", "dp2"]
)
def test_a_run_goes_on(sizes: dict[str, int], tmp_path: Path) -> None:
    for found in run_ranks(run, 2, sizes, tmp_path, elastic=True):
        assert len(found) == 4
        for name, (dtypes, steps) in found.items():
            assert dtypes == {AFTER[name.split()[1]]}, name
            assert steps == 4
