"""Several stages on each rank: training, evaluation, logs and checkpoints are those of one plain process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics import MeanMetric

from lightning_shard import HybridShardStrategy
from lightning_shard.pipeline.runtime import step
from lightning_shard.pipeline.runtime.split_backward import Product
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, Seen, combine, largest_difference, layout, loader, train
from tests.paths import SCHEDULE_IN_A_V

PIPELINE = layout(pipeline=2)
CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "val_check_interval": 1}
SAVED = 2


class Counting(Model):
    """Counts before the network and after it, keeps a mean, logs, and has its head's weight in its embedding."""

    def __init__(self) -> None:
        super().__init__("gpt2")
        self.model.lm_head.weight = self.model.transformer.wte.weight
        self.before = self.after = 0
        self.hidden: list[Tensor] = []
        self.mean = MeanMetric()
        for block in self.model.transformer.h:
            block.register_forward_hook(lambda module, args, output: self.hidden.append(output))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.before += 1
        loss = self.loss(batch) + 0.01 * sum(_states(each).square().mean() for each in self.hidden)
        assert len(self.hidden) == len(self.model.transformer.h)
        self.hidden.clear()
        self.after += 1
        self.mean.update(loss.detach())
        self.log("train_loss", loss)
        self.log("samples", len(batch["x"]), reduce_fx="sum")
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.hidden.clear()

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch["x"]).logits
        self.hidden.clear()
        return logits


def _states(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def fit(sizes: dict[str, int] | None = None, **options: Any) -> tuple[Seen, tuple[int, int], float]:
    made: list[Counting] = []

    def module() -> L.LightningModule:
        made.append(Counting())
        return made[-1]

    seen = train("gpt2", sizes, module=module, trainer=CLIPPED, **options)
    return seen, (made[0].before, made[0].after), float(made[0].mean.compute())


def predict(sizes: dict[str, int] | None = None, **options: Any) -> list[Tensor]:
    L.seed_everything(3)
    strategy: Any = "auto" if sizes is None else HybridShardStrategy(**sizes, **options)
    trainer = L.Trainer(strategy=strategy, devices=1 if sizes is None else 2, **QUIET)
    return trainer.predict(Counting(), loader(GLOBAL_BATCH, samples=32))  # type: ignore[return-value]


@contextmanager
def counting_second_parts() -> Iterator[Counter[str]]:
    """How many weights' gradients came later than the rest of their backward."""
    counted: Counter[str] = Counter()
    real = step.backward_of_products

    def count(products: Iterable[Product]) -> None:
        products = [*products]
        counted["products"] += len(products)
        real(products)

    step.backward_of_products = count  # type: ignore[attr-defined]
    try:
        yield counted
    finally:
        step.backward_of_products = real  # type: ignore[attr-defined]


def in_two_parts(**options: Any) -> tuple[Seen, tuple[int, int], float]:
    with counting_second_parts() as counted:
        seen = fit(PIPELINE, **options)
    assert counted["products"] > 0, "all of a backward was in its first part"
    return seen


def every_way() -> dict[str, Any]:
    return {
        "interleaved": fit(PIPELINE, schedule="Interleaved1F1B", placement=[1, 1, 1, 1]),
        "v": fit(PIPELINE, schedule=str(SCHEDULE_IN_A_V)),
        "in two parts": in_two_parts(schedule="InterleavedZeroBubble", placement=[2, 2]),
        "zero bubbles": in_two_parts(schedule="ZBVZeroBubble"),
        "dual": in_two_parts(schedule="DualPipeV"),
        "predicted": predict(PIPELINE, schedule="Interleaved1F1B"),
    }


def check(ours: Seen, plain: Seen) -> None:
    assert ours.losses == pytest.approx(plain.losses, rel=2e-6)
    assert ours.metrics == pytest.approx(plain.metrics, rel=2e-6)
    assert ours.norm == pytest.approx(plain.norm, rel=1e-6)
    assert largest_difference(ours.gradients, plain.gradients) < 1e-7
    assert largest_difference(ours.parameters, plain.parameters) < 2e-5


@pytest.mark.long
def test_training_and_predictions_are_those_of_one_process() -> None:
    """With accumulation, validation within it, clipping, a tied embedding, hooks, counters, a metric and logs."""
    plain, counted, mean = fit()
    per_rank = run_ranks(every_way, 2, elastic=True)
    for way in ("interleaved", "v", "in two parts", "zero bubbles", "dual"):
        check(combine([ran[way][0] for ran in per_rank], PIPELINE), plain)
        for ran in per_rank:
            microbatches = ran[way][1][0] // counted[0]
            assert ran[way][1] == (microbatches * counted[0], microbatches * counted[1])
            assert ran[way][2] == pytest.approx(mean, rel=1e-6)
    for ran in per_rank:
        torch.testing.assert_close(ran["predicted"], predict(), rtol=1e-5, atol=1e-6)


def saved(schedule: str, steps: int, folder: str, resume: str | None = None) -> Seen:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [keep], "trainer": {"enable_checkpointing": True}, "shuffle": True}
    return train("gpt", PIPELINE, steps=steps, schedule=schedule, resume=resume, **options)


def saved_and_resumed(folder: str) -> tuple[Seen, Seen, Seen]:
    """By two stages on each rank; from that by one, and from that by two again, placed otherwise."""
    first = saved("Interleaved1F1B", 3 * SAVED, f"{folder}/1")
    second = saved("1F1B", 2 * SAVED, f"{folder}/2", f"{folder}/1/step={SAVED}.ckpt")
    return first, second, saved("ZBVZeroBubble", 3 * SAVED, f"{folder}/3", f"{folder}/2/step={2 * SAVED}.ckpt")


def test_a_checkpoint_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    per_rank = run_ranks(saved_and_resumed, 2, str(tmp_path), elastic=True)
    trained, one, several = (combine([*seen], PIPELINE) for seen in zip(*per_rank))
    assert [*one.losses, *several.losses] == pytest.approx(trained.losses[SAVED:], rel=2e-6)
    assert largest_difference(several.parameters, trained.parameters) < 2e-5
