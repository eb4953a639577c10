"""One microbatch is the batch as one process has it: whatever a step does with it is right on stages too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassF1Score

from lightning_shard.errors import BatchError
from lightning_shard.pipeline.runtime import known_crossings
from lightning_shard.testing import assert_trains_alike, run_ranks
from tests.alike import Trains, assert_train_alike
from tests.parity import trainer_of
from tests.training.parallel.small import INTERLEAVED, WIDTH, Layer, Trained

PP2 = {"pipeline_parallel_size": 2, "microbatches": 1}
LAYOUTS = [PP2, {**INTERLEAVED, "microbatches": 1}]


class Block(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Base(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)


class OverTheBatch(Base):
    """Statistics, contrasts, sums, centres, moving averages, and logs that aren't means."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.f1 = MulticlassF1Score(3)
        self.register_buffer("center", torch.zeros(WIDTH))
        self.average = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        z = self(x)
        self.center.mul_(0.9).add_(0.1 * z.detach().mean(0))
        logits = self.head(z - self.center)
        unit = F.normalize(z, dim=-1)
        loss = F.cross_entropy(logits, y, reduction="sum") + F.cross_entropy(unit @ unit.T, torch.arange(len(x)))
        self.average = 0.9 * self.average + 0.1 * float(loss.detach())
        self.f1(logits, y)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.log("average", self.average)
        self.log("perplexity", loss.exp().sqrt(), on_step=True, on_epoch=True)
        self.log("deviation", z.std())
        self.log("largest", z.max(), reduce_fx="max")
        self.log("samples", float(len(x)), reduce_fx="sum")
        return {"loss": loss * (1 + self.average / 100), "mean": z.mean(0), "sure": (logits > 0.5).nonzero()}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.head(self(x))
        self.log("root", (logits - F.one_hot(y, 3)).square().mean().sqrt())
        return logits.flatten()


class CarriesOn(Base):
    """A recurrent state goes on from batch to batch, cut from its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.state: Tensor | None = None

    def loss(self, batch: Any) -> Tensor:
        x, y = batch.values() if isinstance(batch, dict) else batch
        x = self(x if self.state is None else x + self.state)
        self.state = x.detach()
        return F.cross_entropy(self.head(x), y)


class Images(Base):
    """A batch is a list of images of unlike sizes, with as unlike targets, as detectors have them."""

    def loss(self, batch: list[dict[str, Tensor]]) -> Tensor:
        boxes, labels = (torch.cat([sample[name] for sample in batch]) for name in ("boxes", "labels"))
        losses = F.cross_entropy(self.head(self(boxes)), labels, reduction="none")
        return torch.stack([each.mean() for each in losses.split([len(sample["labels"]) for sample in batch])]).mean()


class Graphs:
    """Several graphs joined into one; layers set new features on it."""

    def __init__(self, x: Tensor, edges: Tensor, graph_of: Tensor, y: Tensor) -> None:
        self.x, self.edges, self.graph_of, self.y = x, edges, graph_of, y

    def to(self, *args: Any, **kwargs: Any) -> Graphs:
        return Graphs(*(tensor.to(*args, **kwargs) for tensor in (self.x, self.edges, self.graph_of, self.y)))


class Convolution(Layer):
    def forward(self, x: Tensor, edges: Tensor) -> Tensor:  # type: ignore[override]
        return x + torch.zeros_like(x).index_add(0, edges[1], self.linear(x)[edges[0]]).tanh()


class OfGraphs(Base):
    block = Convolution

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        batch.x = batch.x * 2
        for block in self.blocks:
            batch.x = block(batch.x, batch.edges)
        pooled = torch.zeros(len(batch.y), WIDTH).index_add(0, batch.graph_of, batch.x)
        loss = F.cross_entropy(self.head(pooled), batch.y)
        self.log("loss", loss, batch_size=len(batch.y))
        return loss


def tensors() -> list[Any]:
    made = torch.Generator().manual_seed(0)
    return [(torch.randn(6, WIDTH, generator=made), torch.randint(0, 3, (6,), generator=made)) for _ in range(5)]


def images() -> list[Any]:
    made = torch.Generator().manual_seed(0)
    sizes = [(3, 5, 2), (4, 4, 1), (3, 5, 2), (2, 2), (6, 1, 3)]

    def image(size: int) -> dict[str, Tensor]:
        boxes = torch.randn(size, WIDTH, generator=made)
        return {"boxes": boxes, "labels": torch.randint(0, 3, (size,), generator=made)}

    return [[image(size) for size in batch] for batch in sizes]


def graphs() -> list[Any]:
    made = torch.Generator().manual_seed(0)

    def graph(nodes: int) -> Graphs:
        of = torch.arange(nodes) * 3 // nodes
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=made)
        return Graphs(torch.randn(nodes, WIDTH, generator=made), edges, of, torch.randint(0, 3, (3,), generator=made))

    return [graph(nodes) for nodes in (9, 12, 7, 9, 15)]


class FewShapesKnown(Images):
    def on_fit_start(self) -> None:
        self.known, known_crossings._KNOWN = known_crossings._KNOWN, 2

    def on_fit_end(self) -> None:
        known_crossings._KNOWN = self.known


def test_whole_batches_are_right_whatever_a_step_does_with_them() -> None:
    assert_train_alike(
        {
            "over the batch": Trains(OverTheBatch, tensors, LAYOUTS),
            "carrying on": Trains(CarriesOn, tensors, PP2),
            "images": Trains(Images, images, PP2),
            "ever new shapes": Trains(FewShapesKnown, images, PP2),
            "graphs": Trains(OfGraphs, graphs, PP2),
        }
    )


def test_ever_new_shapes_take_no_ever_more_memory() -> None:
    crossings: Any = {("train", (i,)): None for i in range(known_crossings._KNOWN + 1)}
    known_crossings._forget_oldest(crossings, [("train", (0,))])
    assert len(crossings) == known_crossings._KNOWN
    assert ("train", (1,)) not in crossings  # the oldest, but for what is used


@pytest.mark.parametrize(
    ("module", "batches"), [(OfGraphs, graphs), pytest.param(Images, images, marks=pytest.mark.long)]
)
def test_what_cant_be_cut_is_told_of_them(module: type[Base], batches: Any) -> None:
    with pytest.raises(BatchError, match="microbatches=1"):
        assert_trains_alike(module, batches, layouts=[{**PP2, "microbatches": 2}])


class ChangesItsBatch(CarriesOn):
    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        batch["loss"] = loss.detach()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        assert "loss" not in batch


def fits() -> int:
    data = [{"x": x, "y": y} for x, y in tensors()]
    trainer = trainer_of({"pipeline_parallel_size": 2, "microbatches": 1}, max_epochs=1)
    trainer.fit(ChangesItsBatch(), DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return trainer.global_step


def test_hooks_are_given_a_batch_that_steps_change_as_it_was() -> None:
    assert run_ranks(fits, 2, elastic=True) == [5, 5]
