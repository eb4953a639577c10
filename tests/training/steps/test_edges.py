"""Less common things that users of Lightning do, on layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint as recompute
from torchmetrics import MeanMetric

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import (
    GLOBAL_BATCH,
    Case,
    Model,
    assert_alike,
    combine,
    largest_difference,
    layout,
    loader,
    train,
    trainer_of,
    world,
)

PIPELINE = layout(pipeline=2)


class MadeEarly(Model):
    """As LightningCLI makes optimizers: from the module as it was built."""

    def __init__(self) -> None:
        super().__init__()
        self.made = torch.optim.AdamW(self.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.made, 0.5)

    def configure_optimizers(self) -> Any:
        return [self.made], [{"scheduler": self.schedule, "interval": "step"}]


class Descends(Model):
    """Without Adam, whose first steps along gradients that are rounding error are as long as all others."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BreaksOff(L.Callback):
    """Leaves the first epoch in the middle of an accumulation."""

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> int | None:
        batch_idx = args[-1]
        return -1 if trainer.current_epoch == 0 and batch_idx == 1 else None


def test_optimizers_made_before_the_module_was_sharded_and_accumulations_that_are_broken_off() -> None:
    settings = {"accumulate_grad_batches": 2, "val_check_interval": 1.0}
    options = {"trainer": settings, "steps": 2}
    broken_off = Case(Descends, options=options, callbacks=[BreaksOff], norm=1e-6, parameters=1e-6)
    assert_alike(PIPELINE, Case(MadeEarly, parameters=1e-4), broken_off)  # the first of steps of 1e-2


class Counting(Model):
    """State in other forms than parameters and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.mean = MeanMetric()
        self.mean.persistent(True)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def count(path: str, resume: bool) -> tuple[int, float]:
    L.seed_everything(3)
    module = Counting()
    trainer = trainer_of({}, max_steps=2 if resume else 1)
    if resume:
        trainer.fit(module, loader(8), ckpt_path=path)
        return module.steps, float(module.mean.mean_value)
    module.steps = 3
    module.mean.update(5.0)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(path)
    return 0, 0.0


def test_extra_state_and_metrics_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    run_ranks(count, 2, path, False, elastic=True)
    assert run_ranks(count, 2, path, True, elastic=True) == [(3, 5.0)] * 2


class Gathering(Model):
    def __init__(self, differentiates: bool) -> None:
        super().__init__()
        self.differentiates = differentiates  # stages don't, in a step
        self.gathered: Tensor | None = None
        self.slope: Tensor | None = None

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.gathered = self.all_gather(batch["x"][:, 0])
        if self.differentiates:
            here = torch.ones((), requires_grad=True)
            everyones = self.all_gather(here, sync_grads=True)
            [self.slope] = torch.autograd.grad(everyones.dot(torch.arange(1.0, 1 + len(everyones))), here)
        return loss


def gather_on_both() -> list[list[Any]]:
    return [gather(sizes) for sizes in (layout(data=2, tensor=2), layout(pipeline=2, data=2))]


def gather(sizes: dict[str, int]) -> list[Any]:
    L.seed_everything(3)
    module = Gathering(differentiates=sizes["pipeline_parallel_size"] == 1)
    plan = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    trainer = trainer_of({**sizes, "tensor_parallel_plan": plan}, world(sizes), max_steps=1)
    trainer.fit(module, loader(GLOBAL_BATCH // sizes["data_parallel_size"]))
    if module.gathered is None:
        return []
    layout = cast(HybridShardStrategy, trainer.strategy).layout
    if module.differentiates:
        assert module.slope == layout.data_parallel_size * (1 + layout.data_rank), "of all ranks' losses"
    return module.gathered.tolist()


def test_all_gather_is_over_the_data_ranks() -> None:
    data: Any = loader(1).dataset
    expected = [[int(data[i]["x"][0]) for i in range(rank, GLOBAL_BATCH, 2)] for rank in range(2)]
    tensors, stages = zip(*run_ranks(gather_on_both, 4, elastic=True))
    assert tensors == (expected,) * 4
    # the last stage alone gets to the end of a step, with each microbatch: it gathers from the data ranks of its own
    assert stages[:2] == ([row[-2:] for row in expected],) * 2


BY_SEQUENCE = {
    "blocks.0": "scatter_sequence",
    "blocks.*.attention_norm": "sequence",
    "blocks.*.attention.query": "colwise_sequence",
    "blocks.*.attention.key": "colwise_sequence",
    "blocks.*.attention.value": "colwise_sequence",
    "blocks.*.attention.output": "rowwise_sequence",
    "blocks.*.mlp_norm": "sequence",
    "blocks.*.mlp.up": "colwise_sequence",
    "blocks.*.mlp.down": "rowwise_sequence",
    "model.norm": "gather_sequence",
    "model.head": "colwise_gather_output",
    "token_embedding": "embedding_rowwise",
}


@pytest.mark.parametrize("pipeline", [1, pytest.param(2, marks=pytest.mark.long)])
def test_sequence_parallelism_from_a_plan(pipeline: int) -> None:
    case = Case(strategy={"tensor_parallel_plan": BY_SEQUENCE}, norm=1e-6, gradients=1e-7)
    assert_alike(layout(pipeline=pipeline, tensor=2), case)


class Stops(Model):
    """In a step of the last data rank, or in a hook on rank 0 only, as one does that looks at what only rank 0 has."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def stop(self, where: str, here: bool) -> None:
        if where == self.where and here:
            self.trainer.should_stop = True

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        layout = cast(HybridShardStrategy, self.trainer.strategy).layout
        self.stop("step", batch_idx == 1 and layout.data_rank == layout.data_parallel_size - 1)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.stop("batch", self.trainer.is_global_zero)

    def on_validation_epoch_end(self) -> None:
        self.stop("validation", self.trainer.is_global_zero)

    def on_train_epoch_end(self) -> None:
        self.stop("epoch", self.trainer.is_global_zero)


def stop(sizes: dict[str, int], where: list[str], steps: int, settings: dict[str, Any]) -> list[int]:
    return [len(train("gpt", sizes, steps=steps, module=partial(Stops, w), trainer=settings).losses) for w in where]


def test_a_rank_that_stops_stops_all() -> None:
    settings = {"accumulate_grad_batches": 4, "val_check_interval": 6}
    assert run_ranks(stop, 2, layout(data=2), ["step"], 6, settings, elastic=True) == [[4], [4]]


@pytest.mark.long
@pytest.mark.parametrize("sizes", [PIPELINE, layout(data=2)], ids=["pp2", "dp2"])
def test_a_hook_of_the_module_that_stops_one_rank_stops_all(sizes: dict[str, int]) -> None:
    settings = {"val_check_interval": 2, "limit_train_batches": 3, "max_epochs": 3}
    hooks = ["batch", "validation", "epoch"]
    assert run_ranks(stop, 2, sizes, hooks, 9, settings, elastic=True) == [[1, 2, 3]] * 2


class NotesMask(nn.Module):
    """Every block notes the masks that it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.nn.functional.dropout(torch.ones_like(x), 0.5)
        self.masks.append(mask)
        return self.mix(x) * mask


class Dropping(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(NotesMask() for _ in range(4))
        self.head = nn.Linear(32, 64)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = recompute(layer, hidden, use_reentrant=False) if self.recomputes else layer(hidden)
        return self.head(hidden)


class DropsOut(Model):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Dropping(recomputes)


def drop_out(sizes: dict[str, int]) -> list[Any]:
    """Keeping what blocks compute, recomputing in the user's code, and by the strategy's settings."""
    kept, by_user = (train("gpt", sizes, steps=1, module=lambda r=r: DropsOut(r)) for r in (False, True))
    settings = (2, "selective")
    return [
        *(kept, by_user),
        *(train("gpt", sizes, steps=1, module=lambda: DropsOut(False), activation_checkpointing=n) for n in settings),
    ]


def test_blocks_that_are_recomputed_draw_the_dropout_masks_of_their_forward() -> None:
    sizes = layout(pipeline=2)
    kept, *others = (combine(list(seen), sizes) for seen in zip(*run_ranks(drop_out, 2, sizes, elastic=True)))
    for recomputed in others:
        assert recomputed.losses == kept.losses
        assert largest_difference(recomputed.gradients, kept.gradients) < 1e-7
        assert largest_difference(recomputed.parameters, kept.parameters) < 1e-6


def drop() -> list[Tensor]:
    module = DropsOut(recomputes=False)
    train("gpt", layout(pipeline=2), steps=1, module=lambda: module, trainer={"limit_val_batches": 0})
    assert not any(isinstance(part, FSDPModule) for part in module.modules())
    noted = [mask for layer in module.model.layers for mask in getattr(layer, "masks", ())]
    return [mask for mask in noted if type(mask) is Tensor]  # those of the other stage are unknown


@pytest.mark.long
def test_no_two_blocks_or_microbatches_draw_the_same_mask() -> None:
    masks = [mask for masks in run_ranks(drop, 2, elastic=True) for mask in masks]
    assert len(masks) == 4 * 4
    assert len({mask.cpu().numpy().tobytes() for mask in masks}) == len(masks)
