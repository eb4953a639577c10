"""Modules made by torch.jit.script or trace train as on one process, unless that would cut them."""

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError, PlacementError
from lightning_shard.testing import assert_trains_alike
from tests.training.pipeline.test_modules_as_written import INTERLEAVED, WIDTH, Layer, Trained, batches


class WithScripted(nn.Module):
    """A block or part with another module scripted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = scripted(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.inner(x)


class Sums(nn.Module):
    """Adds up the samples that it has seen, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.total += x.detach().sum(0)
        return x


def scripted(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated
        return torch.jit.script(module)


def traced(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, torch.zeros(1, WIDTH))


def frozen(module: nn.Module) -> nn.Module:
    return module.eval().requires_grad_(False)


class Module(Trained):
    """The network is the module itself."""

    def __init__(self, what: str) -> None:
        super().__init__()
        del self.blocks
        made: dict[str, nn.Module] = {name: nn.Identity() for name in ("augment", "teacher", "other")}
        made |= {"criterion": nn.MSELoss(), "embed": nn.Linear(WIDTH, WIDTH)}
        blocks: list[nn.Module] = [Layer() for _ in range(4)]
        activations = [make(nn.Tanh()) for make in (scripted, traced) * 2]
        if what == "everywhere":
            made |= {
                "criterion": scripted(nn.MSELoss()),
                "augment": scripted(nn.Sequential(Sums(), nn.Hardtanh(-3.0, 3.0))),
            }
            made |= {"teacher": scripted(frozen(Layer())), "other": traced(frozen(Layer()))}
            blocks = [layer for each in activations for layer in (WithScripted(Sums()), each)]
        elif what == "layers":
            blocks = [layer for each in activations for layer in (nn.Linear(WIDTH, WIDTH), each)]
        elif what == "trained":
            blocks = [scripted(block) for block in blocks]
        elif what == "in a part":
            made["embed"] = WithScripted(frozen(Layer()))
        for name, each in made.items():
            self.add_module(name, each)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.embed(self.augment(x)))

    def loss(self, batch: Tensor) -> Tensor:
        return self.criterion(self(batch), self.other(self.teacher(2 * batch)))


@pytest.mark.parametrize(
    ("what", "layout"), [("everywhere", INTERLEAVED), pytest.param("layers", "dp2", marks=pytest.mark.long)], ids=str
)
def test_without_trained_parameters_they_train_alike_in_blocks_and_around_them(what: str, layout: Any) -> None:
    assert_trains_alike(partial(Module, what), batches, layouts=[layout])


@pytest.mark.parametrize("layout", ["pp2", pytest.param("dp2", marks=pytest.mark.long)])
def test_ones_that_train_are_refused(layout: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"blocks\.0 was made by torch\.jit, and blocks\.0\.linear\.weight is trained"
    ):
        assert_trains_alike(partial(Module, "trained"), batches, layouts=[layout], allow_random=True)


def test_weights_of_a_scripted_module_in_a_part_that_one_stage_holds_are_refused() -> None:
    assert_trains_alike(partial(Module, "in a part"), batches, layouts=["dp2"])
    with pytest.raises(
        PlacementError, match=r"embed\.inner was made by torch\.jit and has parameters, but embed is held"
    ):
        assert_trains_alike(partial(Module, "in a part"), batches, layouts=["pp2"])
