"""State that a part of the last stage keeps, such as a head's running sum, read by hooks on all stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import WIDTH, Trained, batches


class Head(nn.Linear):
    total: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(()))
        self.samples = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.training:
            self.total += y.detach().abs().mean(-1).sum()
            self.samples += len(y)
        return y


class Module(Trained):
    """Its learning rate follows what the head has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(super().forward(x))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def on_validation_epoch_end(self) -> None:
        size = float(self.head.total) / self.head.samples
        self.head.total.zero_()
        self.head.samples = 0
        self.log_dict({"size": size, "rate": self.trainer.optimizers[0].param_groups[0]["lr"]})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "size"}}


class ReadsBefore(Module):
    """Scales its input by what the head has kept."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch / (1 + self.head.seen), batch_idx)

    def __init__(self) -> None:
        super().__init__()
        self.head = Seeing()


class Seeing(Head):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.fill_(x.detach().abs().mean())
        return super().forward(x)


def test_hooks_on_all_stages_read_what_the_head_has_kept() -> None:
    assert_trains_alike(Module, batches, "pp2", steps=16, trainer={"val_check_interval": 4}, microbatches=4)


def test_code_before_the_network_that_reads_it_is_refused() -> None:
    with pytest.raises(StepError, match=r"head\.seen changes|changes self\.head\.seen after"):
        assert_trains_alike(ReadsBefore, batches, "pp2", microbatches=4)
