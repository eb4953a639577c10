"""Modules that a user has compiled train as on one process, and their forwards are compiled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.alike import Trains, assert_train_alike
from tests.training.parallel.small import INTERLEAVED, WIDTH, Descends, Layer, batches

RUNS: list[int] = []
"""How many values compiled code was given, each time that it ran."""


def counted(graph: Any, _: Any) -> Callable[..., Any]:
    """A backend of torch.compile."""

    def run(*args: Any) -> Any:
        RUNS.append(len(args))
        return graph.forward(*args)

    return run


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Module(Descends):
    def __init__(self, what: str) -> None:
        super().__init__()
        RUNS.clear()
        self.net: Any = Network()
        if what == "calls of blocks":
            for block in self.net.blocks:
                block.compile(backend=counted)
        elif what == "wrapped blocks":
            self.net.blocks = nn.ModuleList(torch.compile(each, backend=counted) for each in self.net.blocks)
        elif what == "layers in blocks and parts":
            for block in self.net.blocks:
                block.linear.compile(backend=counted)
            self.net.embed = torch.compile(self.net.embed, backend=counted)
            self.net.head.compile(backend=counted)
        elif what == "calls of the network":
            self.net.compile(backend=counted)
        elif what == "wrapped network":
            self.net = torch.compile(self.net, backend=counted)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch), batch[:, :2])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch), batch[:, :2]))

    def on_train_end(self) -> None:
        assert RUNS


WAYS = ("calls of blocks", "layers in blocks and parts", "calls of the network", "wrapped network")


def test_forwards_are_compiled_and_hooks_are_not() -> None:
    assert_train_alike({"wrapped blocks": Trains(partial(Module, "wrapped blocks"), batches, ["pp2", "dp2"])})


@pytest.mark.long
def test_they_are_in_every_way() -> None:
    """Split and recomputed blocks stay compiled."""
    plan = {"tensor_parallel_plan": {"net.blocks.*.linear": "colwise_gather_output"}}
    recomputed = {"activation_checkpointing": True}
    each = {way: Trains(partial(Module, way), batches, ["pp2", "dp2"]) for way in WAYS}
    blocks, network = (partial(Module, way) for way in ("calls of blocks", "calls of the network"))
    assert_train_alike(
        {
            **each,
            "several stages on a rank": Trains(blocks, batches, INTERLEAVED),
            "split": Trains(network, batches, "tp2", options=plan),
            "recomputed": Trains(blocks, batches, ["pp2", "dp2"], options=recomputed),
        }
    )


@torch.compile(backend="aot_eager")
def normed(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()


@torch.compile(backend="aot_eager")
def mixed(x: Tensor, first: Tensor) -> Tensor:
    return x + 0.5 * first


@torch.compile(backend=counted)
def squared_error(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).pow(2).mean()


class CallsFunctions(Network):
    def __init__(self, skips: bool) -> None:
        super().__init__()
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        first = x = normed(self.embed(x))
        for block in self.blocks:
            x = normed(block(x))
            x = mixed(x, first) if self.skips else x
        y: Tensor = self.head(x)
        return y


class ModuleOfFunctions(Module):
    def __init__(self, skips: bool) -> None:
        super().__init__("functions")
        self.net = CallsFunctions(skips)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = squared_error(self.net(batch), batch[:, :2])
        self.log("loss", loss)
        return loss

    def on_train_end(self) -> None:
        is_compiled = self.global_rank == 0 and not self.net.skips  # on the last stage
        assert RUNS or not is_compiled


@pytest.mark.long
def test_compiled_functions_run_as_written_around_blocks_and_compiled_in_the_loss() -> None:
    skipping = Trains(partial(ModuleOfFunctions, True), batches, INTERLEAVED)
    assert_train_alike({"plain": Trains(partial(ModuleOfFunctions, False), batches), "with skips": skipping})
