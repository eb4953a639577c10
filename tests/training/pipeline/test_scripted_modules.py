"""Modules made by torch.jit are refused, in blocks and around them."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.testing import assert_trains_alike
from tests.training.parallel.small import WIDTH, Layer, Trained, batches


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.script(module)


class Module(Trained):
    """The network is the module itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(scripted(Layer()) if what == "blocks" else Layer() for _ in range(4)))
        self.criterion = scripted(nn.MSELoss()) if what == "criterion" else nn.MSELoss()

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def loss(self, batch: Tensor) -> Tensor:
        return self.criterion(self(batch), torch.ones(WIDTH))


@pytest.mark.parametrize(("what", "layout"), [("blocks", "pp2"), ("criterion", "dp2")])
def test_they_are_refused_by_name(what: str, layout: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{what}.* was made by torch\.jit.*give the plain module"):
        assert_trains_alike(partial(Module, what), batches, layouts=[layout], allow_random=True, steps=1)
