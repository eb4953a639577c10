"""Where nothing is sharded, parameters aren't copied, and everything else is as where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import largest_difference, trainer_of, whole

TOKENS = torch.randint(0, 10, (32, 5), generator=torch.Generator().manual_seed(0))


class Odd(L.LightningModule):
    """Tied, frozen, unused and scalar parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(10, 8)
        self.mix = nn.GRU(8, 8, batch_first=True)  # which keeps its weights in a list too
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Linear(3, 3)
        self.blocks[1].requires_grad_(False)
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.mix(self.embedding(batch))[0]
        for block in self.blocks:
            x = torch.tanh(block(x))
        return F.cross_entropy(self.head(x).flatten(0, 1) * self.scale, batch.flatten())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.training_step(batch, batch_idx))
        weight = next(self.blocks[3].parameters(), None)  # here on the last stage
        if weight is not None and isinstance(self.trainer.strategy, HybridShardStrategy):
            self.seen.append((type(weight) is nn.Parameter, weight.data_ptr()))

    def on_validation_epoch_end(self) -> None:
        if not isinstance(self.trainer.strategy, HybridShardStrategy):
            return
        state = {name: value for name, value in self.state_dict().items() if name.startswith("blocks.3.w")}
        self.seen += [(isinstance(value, DTensor), value._local_tensor.data_ptr()) for value in state.values()]  # type: ignore

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def fit(stages: int | None, steps: int, path: str | None = None, resume: bool = False) -> tuple[Odd, Any]:
    L.seed_everything(1)
    options = {"pipeline_parallel_size": stages, "microbatches": 2} if stages else None
    trainer = trainer_of(
        options,
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        val_check_interval=3,  # in the middle of an accumulation
        limit_val_batches=1,
    )
    module = Odd()
    loader: Any = DataLoader(TOKENS, batch_size=4)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader, ckpt_path=path if resume else None)
    return module, trainer


def on_stages(stages: int, path: str) -> dict[str, Tensor]:
    module, trainer = fit(stages, 3)
    assert not any(isinstance(part, FSDPModule) for part in module.modules())
    held = [p for p in module.parameters() if p.ndim]
    assert all(isinstance(p, DTensor) for p in held)
    assert all(p.grad is None or isinstance(p.grad, DTensor) for p in held)
    assert all(p.grad is None for name, p in module.named_parameters() if "unused" in name or "blocks.1" in name)
    if trainer.strategy.layout.pipeline_rank == stages - 1:
        kinds, places = zip(*module.seen)
        assert all(kinds)
        assert len(set(places)) == 1  # in steps and between them the same memory
    trainer.save_checkpoint(path)
    module, _ = fit(stages, 6, path, resume=True)
    return whole(module)


def test_a_run_is_that_of_one_process_and_goes_on_after_it_was_saved(tmp_path: Path) -> None:
    alone, _ = fit(None, 6)
    found: dict[str, Tensor] = {}
    for part in run_ranks(on_stages, 2, 2, str(tmp_path / "a.ckpt"), elastic=True):
        found.update(part)
    assert largest_difference(found, whole(alone)) < 2e-5
