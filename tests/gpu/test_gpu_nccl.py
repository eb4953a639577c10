"""On CUDA devices, over NCCL: layouts compute what one process does, steps don't wait for a device, all stop together.

Each rank has a device, or all share one: see tests/on_gpu.py.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError
from lightning_shard.testing import RanksFailed, processes, run_ranks
from tests import on_gpu
from tests.parity import LAYOUTS, QUIET, Model, Seen, combine, largest_difference, layout, loader, train, world
from tests.training import mixtures

pytestmark = pytest.mark.skipif(not on_gpu.has_room_for(2), reason="two ranks need two CUDA devices, or to share one")

ON_GPU: dict[str, Any] = {**QUIET, "accelerator": "gpu"}
SETTINGS: dict[str, Any] = {"elastic": True, "timeout_s": 300}
WIDE = {"dp2": layout(data=2), **LAYOUTS}
IN_ORDERS = ("1F1B", "GPipe", "Eager1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def on_host(seen: Seen) -> Seen:
    for part in (seen.gradients, seen.initial, seen.parameters):
        assert all(tensor.is_cuda for tensor in part.values())
        part.update({name: tensor.cpu() for name, tensor in part.items()})
    return seen


def trained(name: str, network: str) -> dict[str, Seen]:
    schedules = IN_ORDERS if name == "pp2" else ("1F1B",)
    return {each: on_host(train(network, WIDE[name], trainer=ON_GPU, schedule=each)) for each in schedules}


def on_one(network: str) -> Seen:
    return on_host(train(network, trainer=ON_GPU))


@pytest.mark.parametrize("network", ["gpt", "llama"])
@pytest.mark.parametrize("name", ["pp2", "dp2", "tp2", "pp2×dp2", "pp2×tp2", "dp2×tp2"])
def test_a_layout_over_nccl_computes_what_one_process_computes(name: str, network: str) -> None:
    per_rank = run_ranks(trained, world(WIDE[name]), name, network, **SETTINGS)
    [plain] = run_ranks(on_one, 1, network, **SETTINGS)
    for schedule in per_rank[0]:
        ours = combine([runs[schedule] for runs in per_rank], WIDE[name])
        assert ours.losses == pytest.approx(plain.losses, rel=5e-6), schedule
        assert ours.metrics == pytest.approx(plain.metrics, rel=5e-6), schedule
        assert ours.norm == pytest.approx(plain.norm, rel=2e-6), schedule
        assert largest_difference(ours.gradients, plain.gradients) < 5e-7, schedule
        assert largest_difference(ours.parameters, plain.parameters) < 5e-5, schedule


MORE = {
    "ep2": ({**layout(data=2), "expert_parallel_size": 2}, ["qwen3", "own", "list, called with all"]),
    "pp2×ep2": ({**layout(pipeline=2, data=2), "expert_parallel_size": 2}, ["mixtral"]),
    "2 replicas": ({**layout(data=4), "data_parallel_replicas": 2}, ["tied llama", "mixtral"]),
    "cp2": (layout(context=2), ["tied llama"]),
    "pp2×2 replicas": ({**layout(pipeline=2, data=2), "data_parallel_replicas": 2}, ["tied llama"]),
    "tp2×2 replicas": ({**layout(tensor=2, data=2), "data_parallel_replicas": 2}, ["tied llama"]),
    "tp2": (layout(tensor=2), ["mixtral", "qwen3", "llama with LoRA"]),
}


@pytest.mark.parametrize("name", MORE)
def test_experts_replicas_and_sequences_over_nccl(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, kinds = MORE[name]
    monkeypatch.setenv(on_gpu.EVERYWHERE, "1")
    on_gpu.place_ranks()  # also of the one process that the ranks are compared with
    mixtures.assert_alike(sizes, kinds, timeout_s=300)


class Returns(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return {"loss": loss, "features": loss.detach().expand(len(batch["x"]), 3)}


class Strict(L.Callback):
    """From the fifth batch on, CUDA raises where the host would wait for the device: earlier ones are looked at."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 3:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("default")
        assert outputs["features"].is_cuda


def steady_steps(name: str) -> None:
    assert on_gpu.has_room_for(2)
    strategy = HybridShardStrategy(**WIDE[name], microbatches=2)
    settings = {**ON_GPU, "devices": 2, "max_steps": 7, "gradient_clip_val": 0.5}
    L.Trainer(strategy=strategy, callbacks=[Strict()], **settings).fit(Returns("llama"), loader(16))
    assert dist.get_backend() == "nccl"


@pytest.mark.parametrize("name", ["pp2", "dp2", "tp2"])
def test_a_steady_step_waits_for_no_device(name: str) -> None:
    run_ranks(steady_steps, 2, name, **SETTINGS)


def predict(streams: bool) -> list[Tensor]:
    from lightning_shard.plugin import strategy

    if not streams:
        strategy.runs_in_order = lambda *_: True
    torch.manual_seed(1)
    module = Model("gpt")
    module.predict_step = lambda batch, batch_idx: module.model(batch["x"])  # type: ignore[method-assign]
    trainer = L.Trainer(strategy=HybridShardStrategy(pipeline_parallel_size=2), devices=2, **ON_GPU)
    found: Any = trainer.predict(module, loader(8))
    return [logits.cpu() for logits in found]


def test_streamed_predictions_are_those_of_one_batch_after_the_other() -> None:
    streamed, in_order = (run_ranks(predict, 2, streams, **SETTINGS)[0] for streams in (True, False))
    assert all(map(torch.equal, streamed, in_order))


class Fails(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.trainer.global_rank == 1:
            raise ValueError("no more")
        return super().training_step(batch, batch_idx)


def fail(name: str) -> None:
    train("gpt", WIDE[name], trainer=ON_GPU, steps=5, module=lambda: Fails("gpt"))


@pytest.mark.parametrize("name", ["pp2", "dp2"])
def test_a_rank_that_fails_ends_those_that_wait_for_it_in_nccl(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "FAILURE_GRACE_S", 30.0)
    with pytest.raises(RanksFailed) as caught:  # a fork server that an earlier test started has that test's stderr
        run_ranks(fail, 2, name, **{**SETTINGS, "timeout_s": 60, "start_method": "spawn"})
    accounts = caught.value.accounts
    assert "no more" in accounts[1]
    assert "exit code 1" in accounts[0] or "no more" in accounts[0], accounts
    # rank 0 is stopped, or interrupted in Python
    assert "on rank 1: ValueError: no more" in capfd.readouterr().err + accounts[0]


def over_gloo() -> None:
    with pytest.raises(ConfigurationError, match="gloo, which doesn't support what parallel training needs on CUDA"):
        train("gpt", WIDE["pp2"], trainer=ON_GPU, process_group_backend="gloo")


def test_gloo_is_refused() -> None:
    run_ranks(over_gloo, 2, **SETTINGS)
