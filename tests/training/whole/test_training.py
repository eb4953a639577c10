"""What users of Lightning expect of a Trainer holds on layouts too, compared with one plain process."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import (
    GLOBAL_BATCH,
    LAYOUTS,
    LENGTH,
    QUIET,
    VOCABULARY,
    Case,
    Model,
    Seen,
    assert_alike,
    compare,
    largest_difference,
    layout,
    loader,
    on_ranks,
    train,
    trainer_of,
    world,
)
from tests.training.parallel.small import Descends

PIPELINE = layout(pipeline=2, data=2)
SHARDED = layout(data=2, tensor=2)


# -- accumulation, clipping, schedulers, groups


class Scheduled(Model):
    """Two parameter groups and a scheduler that moves every step."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.ndim > 1]
        others = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 2e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


CLIPPED_BY_NORM = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
CLIPPED_BY_VALUE = {"accumulate_grad_batches": 3, "gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}


@pytest.mark.long
def test_accumulation_clipping_schedulers_and_groups_on_stages() -> None:
    assert_alike(PIPELINE, Case(Scheduled, options={"trainer": CLIPPED_BY_VALUE}))


# -- logs and metrics


class Measured(Model):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(VOCABULARY, average="micro")
        self.count = MeanMetric()
        self.highest = MaxMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.model(batch["x"])
        self.accuracy(logits.flatten(0, 1), batch["y"].flatten())
        self.count.update(batch["x"].float())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("count", self.count)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten()), sync_dist=True)
        self.highest(logits)
        self.log("highest", self.highest)
        self.log("samples", len(batch["x"]), reduce_fx="sum", sync_dist=True)
        correct = (logits.argmax(-1) == batch["y"]).sum(1)
        self.log("correct", correct.sum(), reduce_fx="sum", sync_dist=True)
        ends = batch["y"][:, -1] % 3 == 0  # means over other numbers of samples
        self.log("rare", logits[ends].mean(), batch_size=int(ends.sum()), sync_dist=True)
        self.log("norm", self.model.blocks[3].mlp.down.weight.norm(), sync_dist=True)  # split over tensor ranks
        return {"correct": correct}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("most", outputs["correct"].max(), reduce_fx="max", sync_dist=True)  # of the whole batch

    def on_validation_epoch_end(self) -> None:
        self.log("mean", self.count.compute())


def measure(sizes: dict[str, int] | None) -> Seen:
    return train("gpt", sizes, module=Measured, steps=2)


@pytest.mark.parametrize("sizes", [PIPELINE, pytest.param(SHARDED, marks=pytest.mark.long)], ids=["pp2×dp2", "dp2×tp2"])
def test_metrics_and_every_reduction_of_logs(sizes: dict[str, int]) -> None:
    ours, plain = on_ranks(sizes, measure), measure(None)
    for steps in (ours, plain):
        steps.metrics.pop("accuracy_step", None)  # of the data rank's own last batch
    compare(ours, plain, Case(loss=1e-5))
    assert ours.metrics["samples"] == 32


def tokens(batch: dict[str, Tensor]) -> Tensor:
    return (padded(batch) != -100).sum()


def padded(batch: dict[str, Tensor]) -> Tensor:
    """Texts of 1 to 16 tokens, the rest padding; every eighth is empty."""
    x, y = batch["x"], batch["y"]
    lengths = (1 + x[:, :1] % LENGTH) * (x[:, 1:2] % 8 > 0)
    return y.where(torch.arange(LENGTH, device=y.device) < lengths, -100)


class Padded(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), padded(batch).flatten(), ignore_index=-100)
        self.log("train_loss", loss, batch_size=int(tokens(batch)), sync_dist=True)
        return {"loss": loss}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.log("returned", outputs["loss"], sync_dist=True)


def train_padded(sizes: dict[str, int] | None) -> Seen:
    settings = {"accumulate_grad_batches": 2, "precision": "64-true"}  # in which weights are too
    own: dict[str, Any] = {"loss_weight": tokens, "microbatches": 8 // sizes["data_parallel_size"]} if sizes else {}
    return train("gpt", sizes, module=Padded, trainer=settings, **own)


@pytest.mark.parametrize("sizes", [layout(pipeline=2), layout(data=2)], ids=["pp2", "dp2"])
def test_means_over_tokens_that_are_weighted_by_their_number(sizes: dict[str, int]) -> None:
    ours, plain = on_ranks(sizes, train_padded), train_padded(None)
    assert ours.norm == pytest.approx(plain.norm, rel=1e-13)
    assert largest_difference(ours.gradients, plain.gradients) < 1e-14
    assert largest_difference(ours.parameters, plain.parameters) < 1e-10  # Adam divides by small ones
    if sizes["data_parallel_size"] == 1:  # else what is logged of a step is the mean of the data ranks
        compare(ours, plain, Case())


class Unpadded(Padded):
    """Of texts that are all as long, a sum by their number."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.model(batch["x"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten(), reduction="sum") / batch["y"].numel()
        self.log("train_loss", loss, sync_dist=True)
        return {"loss": loss}


def what_is_said_of_each(sizes: dict[str, int]) -> list[list[str]]:
    weighed = what_is_said_of_means(sizes, Padded, loss_weight=tokens)
    return [what_is_said_of_means(sizes, Padded), weighed, what_is_said_of_means(sizes, Unpadded)]


def what_is_said_of_means(sizes: dict[str, int], kind: Any, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train("gpt", sizes, module=kind, steps=4, **options)
    return [text for text in (str(each.message) for each in said) if "mean over a different number" in text]


@pytest.mark.parametrize("sizes", [layout(pipeline=2), layout(data=2)], ids=["pp2", "dp2"])
def test_means_over_unequal_numbers_are_told_of_once_where_nothing_weighs_them(sizes: dict[str, int]) -> None:
    ([said], *nothing), others = run_ranks(what_is_said_of_each, 2, sizes, elastic=True)
    assert said.startswith("Pass loss_weight")
    assert [*nothing, *others] == [[]] * 5


# -- replicas


def test_replicas_of_a_sharded_group_compute_the_same() -> None:
    assert_alike(LAYOUTS["dp4"], Case(strategy={"data_parallel_replicas": 2}))


# -- what users look at


def look(sizes: dict[str, int]) -> Any:
    L.seed_everything(3)
    strategy = HybridShardStrategy(**sizes, tensor_parallel_plan={"mlp.up": "colwise", "mlp.down": "rowwise"})
    trainer = L.Trainer(strategy=strategy, devices=world(sizes), max_steps=1, **QUIET)
    data = sizes["data_parallel_size"]
    trainer.fit(Model(), loader(GLOBAL_BATCH // data))
    shard = {name: tensor.clone() for name, tensor in strategy.local_shard().items()}
    return shard, strategy.gather_full_parameters(), str(strategy.layout), str(strategy.placement)


@pytest.mark.parametrize(
    ("name", "rows", "said"),
    [
        ("pp2×dp2", 64, "2 pipeline × 2 data × 1 tensor"),
        pytest.param("pp2×dp2×tp2", 32, "2 pipeline × 2 data × 2 tensor", marks=pytest.mark.long),
    ],
)
def test_shards_and_the_gathered_whole(name: str, rows: int, said: str) -> None:
    sizes = LAYOUTS[name]
    plain = train("gpt", steps=1).parameters
    seen = run_ranks(look, world(sizes), sizes, elastic=True)
    _, gathered, described, table = seen[0]
    shard = seen[-1][0]  # of the first stage
    assert largest_difference(gathered, plain) < 2e-5
    assert all(not other for _, other, _, _ in seen[1:])
    assert shard["model.blocks.0.mlp.up.weight"].shape == (rows, 32)  # [128, 32] over data and tensor ranks
    assert not any("blocks.2" in name for name in shard)
    assert described == said
    assert "0-1 (2)" in table


# -- manual optimization on one stage


class Manual(Model):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        halves = [{key: value[i::2] for key, value in batch.items()} for i in range(2)]
        if isinstance(self.trainer.strategy, HybridShardStrategy):
            with self.trainer.strategy.block_backward_sync():
                for half in halves:
                    self.manual_backward(self.loss(half) / 2)
            self.trainer.strategy.synchronize_gradients()
        else:
            for half in halves:
                self.manual_backward(self.loss(half) / 2)
        optimizer.step()
        self.log("train_loss", self.loss(batch).detach(), sync_dist=True)


def test_manual_optimization_with_gradients_synchronized_by_hand() -> None:
    assert_alike(layout(data=2), Case(Manual))


# -- modules that bring their own sharding


class ShardsItself(Model):
    """As Lightning's documentation of ModelParallelStrategy has it."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        if self.device_mesh is None:
            return
        for block in self.model.blocks:
            plan = {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.model, mesh=self.device_mesh["data_parallel"])


def test_a_module_written_for_lightnings_own_strategy_runs_unchanged_and_accumulation_schedulers_and_groups() -> None:
    assert_alike(SHARDED, Case(ShardsItself), Case(Scheduled, options={"trainer": CLIPPED_BY_NORM}))


# -- memory


class Large(Descends):
    """512 MiB on meta, in eight blocks and a head."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            with torch.device("meta"):
                blocks = [nn.Linear(4096, 4096, bias=False) for _ in range(8)]
                self.model = nn.Sequential(*blocks)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.model(torch.ones(len(batch["x"]), 4096)).square().mean()


def peak_of_setup(sizes: dict[str, int]) -> float:
    """MiB that this process grew by at most until training began, the freed included."""
    import resource

    class Stop(L.Callback):
        def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            trainer.should_stop = True

    peaks = [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]
    trainer = trainer_of(sizes, world(sizes), max_steps=1, callbacks=[Stop()])
    trainer.fit(Large(), loader(8))
    return peaks[1] - peaks[0]


def test_no_rank_ever_holds_the_whole_of_a_model_built_on_meta() -> None:
    for peak in run_ranks(peak_of_setup, 4, layout(pipeline=2, data=2), elastic=True):
        assert 128 < peak < 128 + 3 * 64  # its own quarter of 512 MiB, and a block of 64 MiB (with its random numbers)
