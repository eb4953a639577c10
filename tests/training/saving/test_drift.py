"""A save under a Trainer takes replicas as training has left them, and says how far apart they are.

Drift is made on purpose: where a batch ends, so before the save, one rank changes its own part of a tensor; the next
step has it as it was.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_shard import HybridShardStrategy, ShardedCheckpointIO, checkpoint
from lightning_shard.errors import StepError
from lightning_shard.plugin.saving.drift import measured
from lightning_shard.sharding import local_tensor
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, Model, layout, loader, world
from tests.training.pipeline.test_tied import Tied

Find = Callable[[L.Trainer, L.LightningModule], Tensor]
Change = Callable[[Tensor], Any]
STEPS = 3


def ulp(tensor: Tensor) -> None:
    tensor.copy_(torch.nextafter(tensor, torch.full_like(tensor, math.inf)))


def percent(tensor: Tensor) -> None:
    tensor.mul_(1.01)


def nan(tensor: Tensor) -> None:
    tensor.view(-1)[-1] = math.nan


class WithBuffer(Model):
    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.register_buffer("scale", torch.linspace(1, 2, 50))


class WithStatistics(WithBuffer):
    """Its BatchNorm's statistics are each data rank's own, as in plain Lightning."""

    def __init__(self, network: str) -> None:
        super().__init__(network)
        self.norm = nn.BatchNorm1d(4)

    def on_train_batch_start(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        with torch.no_grad():
            self.norm(batch["x"][:, :4].float())


class Drifts(L.Callback):
    def __init__(self, find: Find, rank: int, change: Change, *, stays: bool = False, since: int = 1) -> None:
        self.find, self.rank, self.change = find, rank, change
        self.stays, self.since = stays, since
        self.before: Tensor | None = None

    @torch.no_grad()
    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if self.before is not None and not self.stays:
            local_tensor(self.find(trainer, module)).copy_(self.before)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.global_step >= self.since:
            local = local_tensor(self.find(trainer, module))
            self.before = local.clone()
            self.change(local)


def parameter(name: str) -> Find:
    return lambda _, module: module.get_parameter(name)


def buffer(name: str) -> Find:
    return lambda _, module: module.get_buffer(name)


def fit(
    sizes: dict[str, int],
    folder: str,
    *callbacks: L.Callback,
    module: type[Model] = WithBuffer,
    resume: str | None = None,
    io: ShardedCheckpointIO | None = None,
    steps: int = STEPS,
    **options: Any,
) -> tuple[list[str], L.LightningModule]:
    """Fit, and save after each step; returns this rank's warnings of drift, and the module."""
    L.seed_everything(3)
    saves = ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_exception=not resume
    )
    strategy = HybridShardStrategy(**sizes, checkpoint_io=io, **options)
    settings = {**QUIET, "enable_checkpointing": True, "max_steps": steps, "callbacks": [*callbacks, saves]}
    made = module("llama")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = L.Trainer(strategy=strategy, devices=world(sizes), **settings)  # type: ignore[arg-type]
        trainer.fit(made, loader(GLOBAL_BATCH // sizes["data_parallel_size"]), ckpt_path=resume)
    texts = [str(each.message) for each in caught]
    assert not any("rank_state" in text for text in texts)
    return [text for text in texts if "between ranks by" in text or "stages' copies differ" in text], made


def check(said: list[str], folder: str, name: str, rounds: bool, *, saves: int = STEPS) -> None:
    """What rank 0 has said of drift in one tensor."""
    if rounds:
        assert len(said) == 1, said
        assert said[0].startswith("1 replicas differ between ranks by rounding, as where sums have no fixed order")
        assert f"most {name!r}" in said[0]
        return
    assert len(said) == saves, said
    for step, text in enumerate(said, STEPS - saves + 1):
        assert f"{folder}/step={step}.ckpt, step {step}: {name!r} (rank" in text
        assert "differed between ranks by more than rounding" in text


def on_one_rank(
    sizes: dict[str, int], folder: str, name: str, find: Find, changes: tuple[Change, ...], **options: Any
) -> None:
    """Each change in a run of its own, on rank 1: rank 0's values are saved, and rank 0 tells."""
    for number, change in enumerate(changes):
        path = f"{folder}/{number}"
        said, module = fit(sizes, path, Drifts(find, 1, change), **options)
        if torch.distributed.get_rank():
            assert not said
            continue
        check(said, path, name, change is ulp)
        assert all("0.01 of its largest element" in text for text in said if change is percent)
        assert all("(rank 1 from rank 0: by up to inf" in text for text in said if change is nan)
        saved = checkpoint.read(f"{path}/step={STEPS}.ckpt").full()[name]
        held = module.state_dict()[name]
        assert torch.equal(saved.view_as(local_tensor(held)), local_tensor(held))
        checkpoint.verify(f"{path}/step={STEPS}.ckpt")


NORM, TIE = "model.model.norm.weight", "model.model.embed_tokens.weight"


def tensor_ranks(folder: str) -> None:
    sizes = layout(tensor=2)
    on_one_rank(sizes, f"{folder}/norm", NORM, parameter(NORM), (ulp, percent))
    # the lowest rank without NaN is saved
    said, _ = fit(sizes, f"{folder}/first", Drifts(parameter(NORM), 0, nan))
    stored = checkpoint.read(f"{folder}/first/step=3.ckpt").full()
    assert all(tensor.isfinite().all() for tensor in stored.values())
    if torch.distributed.get_rank() == 0:
        assert all("(rank 0 from rank 1: by up to inf" in text for text in said)
    # what was saved is resumed from
    said, _ = fit(sizes, f"{folder}/on", resume=f"{folder}/norm/1/step=2.ckpt")
    assert not said


def test_tensor_ranks_replicas_are_saved_as_the_lowest_ranks_and_their_drift_is_told(tmp_path: Any) -> None:
    run_ranks(tensor_ranks, 2, str(tmp_path), elastic=True, timeout_s=180)


def data_ranks(folder: str) -> None:
    on_one_rank(layout(data=2), f"{folder}/buffer", "scale", buffer("scale"), (percent,), module=WithStatistics)
    name = "model.lm_head.weight"
    on_one_rank(layout(data=2), f"{folder}/shard", name, parameter(name), (nan,), data_parallel_replicas=2)


def test_buffers_of_data_ranks_and_replicas_of_shards_are_compared(tmp_path: Any) -> None:
    run_ranks(data_ranks, 2, str(tmp_path), elastic=True, timeout_s=180)


def stages(folder: str) -> None:
    sizes = layout(pipeline=2)
    rank = int(os.environ["RANK"])
    options = {"module": Tied, "pipeline_blocks": "layers"}
    said, module = fit(sizes, folder, Drifts(parameter(TIE), 1, percent, since=2), **options)
    if rank == 0:
        check(said, folder, TIE, False, saves=STEPS - 1)
        saved = checkpoint.read(f"{folder}/step={STEPS}.ckpt").full()[TIE]
        assert torch.equal(saved, local_tensor(module.get_parameter(TIE)))
    # a buffer that both stages hold: what one has changed is the other's; else the last stage's is saved
    scale, steps = buffer("scale"), 6
    said, module = fit(sizes, f"{folder}/one", Drifts(scale, 1, percent, stays=True))
    assert not said
    saved = checkpoint.read(f"{folder}/one/step={STEPS}.ckpt").full()["scale"]
    assert torch.equal(saved, module.get_buffer("scale"))
    assert not torch.equal(saved, torch.linspace(1, 2, 50))
    said, module = fit(sizes, f"{folder}/nan", Drifts(scale, 1, nan, stays=True, since=5), steps=steps)
    if rank == 0:
        assert any("scale is a buffer that every pipeline stage holds" in text for text in said)
        for step in (5, 6):
            assert any(f"step {step}: 'scale' (rank 1 from rank 0" in text for text in said)
        saved = checkpoint.read(f"{folder}/nan/step={steps}.ckpt").full()["scale"]
        assert torch.equal(saved, module.get_buffer("scale"))
        assert saved.isfinite().all()
    with pytest.raises(StepError, match="scale is a buffer that every pipeline stage holds"):
        fit(sizes, f"{folder}/early", *[Drifts(scale, each, change) for each, change in enumerate((ulp, percent))])


def test_copies_of_stages_are_saved_as_the_last_stages(tmp_path: Any) -> None:
    run_ranks(stages, 2, str(tmp_path), elastic=True, timeout_s=180)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_rounding_is_told_from_other_differences_by_the_dtype(dtype: torch.dtype) -> None:
    saved = torch.linspace(-3, 5, 100, dtype=torch.float64)
    rounded = saved.to(dtype) * (1 + 2 * torch.finfo(dtype).eps)
    assert measured(saved.to(dtype), rounded)[1]
    relative, is_rounding = measured(saved.to(dtype), saved.to(dtype) * 1.05)
    assert not is_rounding
    assert relative == pytest.approx(0.05, rel=0.1)
