"""What the last stage tells the others is what it has, on every rank, whatever it holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard import HybridShardStrategy, tree
from lightning_shard.plugin.broadcast import Broadcaster
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, layout, loader


class Pair(NamedTuple):
    one: Any
    other: Any


def value() -> Any:
    long = torch.arange(5000, dtype=torch.float32, requires_grad=True)
    return {
        "loss": torch.tensor(0.5, dtype=torch.float64),
        "long": long * 2,
        ("a", 1): [torch.ones(3, dtype=torch.bool), Pair("text", torch.zeros(0, 4))],
        "strided": torch.arange(12).reshape(3, 4).T[::2],
        "of one sample": torch.arange(6.0).view(2, 3)[:1, 0],
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "ordered": OrderedDict(n=None, m=3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def told() -> list[Any]:
    broadcaster = Broadcaster(dist.new_group(), dist.new_group())
    mine, device = dist.get_rank() == 0, torch.device("cpu")
    said = [
        value(),
        [torch.tensor(1.5), 3],
        [torch.tensor(2.5), 3],  # but for the tensors as before, which goes in one message
        [torch.tensor(2.5), 4],
        [torch.arange(999.0), True],
        [torch.arange(999.0) + 1, True],  # as before, and too large for it
        [torch.arange(999), True],
        {},
    ]
    return [broadcaster.broadcast(each if mine else None, device) for each in said]


def test_all_ranks_are_told_the_same() -> None:
    for large, *small, longer, again, whole, nothing in run_ranks(told, 2):
        expected = value()
        assert large.keys() == expected.keys()
        assert large["ordered"] == expected["ordered"]
        assert small == [[torch.tensor(1.5), 3], [torch.tensor(2.5), 3], [torch.tensor(2.5), 4]]
        assert nothing == {}
        assert torch.equal(longer[0] + 1, again[0])
        assert (whole[0].dtype, whole[1]) == (torch.int64, True)
        flags, pair = large["a", 1]
        assert torch.equal(flags, torch.ones(3, dtype=torch.bool))
        assert (type(pair), pair.one, pair.other.shape) == (Pair, "text", (0, 4))
        for name in ("loss", "long", "strided", "of one sample", "complex", "half"):
            assert large[name].dtype == expected[name].dtype
            assert torch.equal(large[name], expected[name]), name
        assert torch.equal(large["sparse"].to_dense(), torch.eye(2))


class Returns(Model):
    """More than the loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "many": torch.ones(len(batch["x"]), 200)}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        super().validation_step(batch, batch_idx)
        return torch.ones(len(batch["x"]), 200)


class Heard(L.Callback):
    """Whether it hears anything is decided by whether it has hooks."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []


class Hears(Heard):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.shapes.append(tuple(outputs["many"].shape))

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.shapes.append(tuple(outputs.shape))


def told_of_both() -> list[tuple[int, list[tuple[int, ...]], dict[str, float]]]:
    return [most_told(Heard()), most_told(Hears())]


def most_told(callback: Heard) -> tuple[int, list[tuple[int, ...]], dict[str, float]]:
    """The most elements of a tensor that was told in a run, what the callback heard, and the logs."""
    sizes, tell = [0], Broadcaster.broadcast

    def noted(self: Broadcaster, value: Any, device: torch.device) -> Any:
        value = tell(self, value, device)
        sizes.extend(leaf.numel() for _, leaf in tree.walk(value) if isinstance(leaf, Tensor))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Broadcaster, "broadcast", noted)
        trainer = train(callback)
    return max(sizes), callback.shapes, {name: float(value) for name, value in trainer.callback_metrics.items()}


def train(callback: Heard) -> L.Trainer:
    strategy = HybridShardStrategy(**layout(pipeline=2))
    trainer = L.Trainer(strategy=strategy, devices=2, max_steps=1, limit_val_batches=1, callbacks=[callback], **QUIET)
    trainer.fit(Returns("gpt"), loader(8), loader(8))
    return trainer


@pytest.mark.long
def test_what_steps_return_goes_to_all_stages_where_a_hook_is_given_it() -> None:
    for (most, shapes, logs), (most_of_heard, shapes_of_heard, logs_of_heard) in run_ranks(
        told_of_both, 2, elastic=True
    ):
        assert most == 1
        assert shapes == []
        assert most_of_heard > 1000
        assert set(shapes_of_heard) == {(8, 200)}
        assert logs == logs_of_heard
        assert logs
