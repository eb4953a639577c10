"""What blocks log themselves, or hooks inside of them, was lost silently on earlier stages, and is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.testing import assert_trains_alike
from tests.testing.test_trains_alike import Block, Module, batches

STAGES: dict[str, Any] = {"pipeline_parallel_size": 2}
SEVERAL: dict[str, Any] = {**STAGES, "schedule": "Interleaved1F1B"}


class Logs(Block):
    """Logs how large its output is, by whatever it was given to log by, and keeps it."""

    log: Callable[[float], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.size = x.detach().square().mean()
        if self.log is not None:
            self.log(float(self.size))
        return x


class LogsInBlocks(Module):
    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(block=Logs)
        for place in places:
            block = self.network.blocks[place]
            object.__setattr__(block, "log", partial(self._log_of_block, f"size of {place}"))

    def _log_of_block(self, name: str, size: float) -> None:
        if not self.trainer.predicting:
            self.log(name, size, sync_dist=True)


class LogsInHooks(Module):
    def __init__(self) -> None:
        super().__init__()
        self.network.blocks[3].get_submodule("down").register_forward_hook(self._hook)

    def _hook(self, _module: Any, _args: Any, output: Tensor) -> None:
        if not self.trainer.predicting:
            self.log("output", output.detach().square().mean(), sync_dist=True)


class LogsAfterwards(LogsInBlocks):
    """What its blocks have kept."""

    def __init__(self) -> None:
        super().__init__(())

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        sizes = [block.size for block in self.network.blocks]
        self.log("sizes", torch.stack(sizes).mean(), sync_dist=True)  # type: ignore[arg-type]
        return loss


class LogsByAnotherName(Module):
    def __init__(self) -> None:
        super().__init__()
        self.say = self.log

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.say("own", loss.detach(), sync_dist=True)
        return loss


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (partial(LogsInBlocks, (0, 2)), SEVERAL),
        (partial(LogsInBlocks, (3,)), STAGES),
        pytest.param(LogsInHooks, SEVERAL, marks=pytest.mark.long),
    ],
    ids=["earlier stages", "the last one", "hooks"],
)
def test_what_blocks_log_is_refused_by_the_blocks_name(make: Callable[[], Module], layout: dict[str, Any]) -> None:
    with pytest.raises(StepError, match=r"self\.log\('.*called by network\.blocks\.[023], which runs on its own"):
        assert_trains_alike(make, batches, layout, steps=1)


def test_what_blocks_keep_can_be_logged_after_them() -> None:
    assert_trains_alike(LogsAfterwards, batches, SEVERAL, steps=1)


def test_a_log_that_was_taken_from_the_module_before_is_refused_on_stages() -> None:
    with pytest.raises(StepError, match=r"'own' is logged through a stored reference to self.log"):
        assert_trains_alike(LogsByAnotherName, batches, STAGES, steps=1)
