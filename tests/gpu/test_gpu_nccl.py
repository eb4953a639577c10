"""On two CUDA devices, over NCCL: every layout of two ranks computes what one process does, and steps don't wait."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import LAYOUTS, QUIET, Model, Seen, combine, largest_difference, layout, loader, train

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there aren't two CUDA devices")

TWO = {"pp2": LAYOUTS["pp2"], "tp2": LAYOUTS["tp2"], "dp2": layout(data=2)}
ON_GPU: dict[str, Any] = {"accelerator": "gpu"}


def on_host(seen: Seen) -> Seen:
    for part in (seen.gradients, seen.initial, seen.parameters):
        part.update({name: tensor.cpu() for name, tensor in part.items()})
    return seen


def on_two(name: str, network: str, schedule: str) -> Seen:
    return on_host(train(network, TWO[name], trainer=ON_GPU, schedule=schedule))


def on_one(network: str) -> Seen:
    return on_host(train(network, trainer=ON_GPU))


@pytest.mark.parametrize("network", ["gpt", "llama"])
@pytest.mark.parametrize(("name", "schedule"), [("pp2", "1F1B"), ("pp2", "GPipe"), ("tp2", "1F1B"), ("dp2", "1F1B")])
def test_a_layout_over_nccl_computes_what_one_process_computes(name: str, schedule: str, network: str) -> None:
    settings: dict[str, Any] = {"elastic": True, "start_method": "spawn", "timeout_s": 300}
    ours = combine(run_ranks(on_two, 2, name, network, schedule, **settings), TWO[name])
    [plain] = run_ranks(on_one, 1, network, **settings)
    assert ours.losses == pytest.approx(plain.losses, rel=5e-6)
    assert ours.metrics == pytest.approx(plain.metrics, rel=5e-6)
    assert ours.norm == pytest.approx(plain.norm, rel=2e-6)
    assert largest_difference(ours.gradients, plain.gradients) < 5e-7
    assert largest_difference(ours.parameters, plain.parameters) < 5e-5


class Returns(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss, "features": loss.detach().expand(len(batch["x"]), 3)}


class Strict(L.Callback):
    """From the third batch on, CUDA raises where the host would wait for the device."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 1:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
        assert outputs["features"].is_cuda


def steady_steps() -> None:
    strategy = HybridShardStrategy(pipeline_parallel_size=2, microbatches=2)
    settings = {**QUIET, **ON_GPU, "devices": 2, "max_steps": 5, "gradient_clip_val": 0.5}
    L.Trainer(strategy=strategy, callbacks=[Strict()], **settings).fit(Returns("gpt"), loader(16))


def test_a_steady_step_on_stages_waits_for_no_device() -> None:
    run_ranks(steady_steps, 2, elastic=True, start_method="spawn", timeout_s=300)


def predict(streams: bool) -> list[Tensor]:
    from lightning_shard.plugin import strategy

    if not streams:
        strategy.runs_in_order = lambda *_: True
    torch.manual_seed(1)
    module = Model("gpt")
    module.predict_step = lambda batch, batch_idx: module.model(batch["x"])  # type: ignore[method-assign]
    trainer = L.Trainer(strategy=HybridShardStrategy(pipeline_parallel_size=2), devices=2, **{**QUIET, **ON_GPU})
    found: Any = trainer.predict(module, loader(8))
    return [logits.cpu() for logits in found]


def test_streamed_predictions_are_those_of_one_batch_after_the_other() -> None:
    settings: dict[str, Any] = {"elastic": True, "start_method": "spawn", "timeout_s": 300}
    streamed, in_order = (run_ranks(predict, 2, streams, **settings)[0] for streams in (True, False))
    assert all(map(torch.equal, streamed, in_order))
