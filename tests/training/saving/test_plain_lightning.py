"""Fit on many ranks, go on with plain Lightning: other strategies and Fabric open a run's checkpoints, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shard
from lightning_shard import HybridShardStrategy, checkpoint
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, trainer_of
from tests.servers import serve

EPOCHS, STEPS, WIDTH = 3, 4, 6
TRAINER: dict[str, Any] = {**QUIET, "enable_checkpointing": True}


class Module(L.LightningModule):
    """Its optimizer lists parameters in another order than the network has, in groups of their own rates."""

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.net: Any = torch.compile(net, backend="eager") if compiled else net
        self.head = nn.Linear(WIDTH, 2)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.head(self.net(batch)).square().mean()
        self.log("loss", loss)
        return loss  # type: ignore[no-any-return]

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.logged_metrics["loss"]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("value", self.head(self.net(batch)).square().mean())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.net(batch))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.head.parameters(), "lr": 0.03}, {"params": self.net.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def data() -> Any:
    return DataLoader(torch.randn(STEPS * 4, WIDTH, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def train_on_stages(folder: str, compiled: bool) -> tuple[list[float], Any]:
    keep = lightning_shard.ModelCheckpoint(folder, "{epoch}", monitor="value", save_top_k=-1, save_last=True)
    strategy = HybridShardStrategy(
        pipeline_parallel_size=2, checkpoint_io=lightning_shard.ShardedCheckpointIO(fsync=False)
    )
    trainer = L.Trainer(
        max_epochs=EPOCHS, devices=2, strategy=strategy, callbacks=[keep], log_every_n_steps=1, **TRAINER
    )
    module = Module(compiled)
    trainer.fit(module, data(), data())
    return module.losses, trainer.test(module, data(), ckpt_path=f"{folder}/epoch=0.ckpt", verbose=False)[0]


def resume(folder: Path, **settings: Any) -> list[float]:
    """As plain Lightning goes on from the first epoch's end, in the folder that it finds."""
    keep = ModelCheckpoint(folder, "{epoch}", monitor="value", save_last=True)
    trainer = L.Trainer(max_epochs=EPOCHS, callbacks=[keep], log_every_n_steps=1, **TRAINER, **settings)
    module = Module()
    trainer.fit(module, data(), data(), ckpt_path=folder / "epoch=0.ckpt")
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.03 / 2**EPOCHS
    return module.losses


def load_by_fabric(path: Path, **settings: Any) -> None:
    fabric = L.Fabric(accelerator="cpu", **settings)
    fabric.launch()
    module = Module()
    wrapped, optimizer = fabric.setup(module, module.configure_optimizers()["optimizer"])
    state = {"model": wrapped, "optimizer": optimizer, "global_step": 0, "mine": 1}
    with pytest.raises(KeyError, match="nothing for the key 'mine'"):
        fabric.load(path, state)
    left = fabric.load(path, state, strict=False)
    assert state["global_step"] == STEPS
    assert "loops" in left
    assert "state_dict" not in left
    expected = checkpoint.load(path)
    torch.testing.assert_close(module.state_dict(), expected, check_device=False)
    moments = checkpoint.read(path).optimizer
    for name, parameter in module.named_parameters():
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moments[f"0/{name}/exp_avg"].full()), name
    raw = Module()
    fabric.load_raw(path, raw)
    torch.testing.assert_close(raw.state_dict(), expected)
    assert fabric.load(path).keys() >= {"state_dict", "optimizer_states", "lr_schedulers"}


def on_two_processes(folder: Path) -> tuple[list[float], Any]:
    losses = resume(folder, devices=2, strategy="ddp", use_distributed_sampler=False)
    trainer = L.Trainer(devices=2, strategy="ddp", use_distributed_sampler=False, **TRAINER)
    tested = trainer.test(Module(), data(), ckpt_path=folder / "epoch=0.ckpt", verbose=False)[0]
    load_by_fabric(folder / "epoch=0.ckpt", devices=2, strategy="ddp")
    return losses, tested


def test_other_strategies_and_fabric_open_a_runs_folders_and_go_on_as_it_did(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (losses, tested), _ = run_ranks(train_on_stages, 2, str(folder), False, elastic=True)
    path = folder / "epoch=0.ckpt"

    for evaluate in ("validate", "test"):
        trainer = L.Trainer(devices=1, **TRAINER)
        assert getattr(trainer, evaluate)(Module(), data(), ckpt_path=path, verbose=False)[0] == pytest.approx(tested)
    predicted: Any = L.Trainer(devices=1, **TRAINER).predict(Module(), data(), ckpt_path=path)
    whole = Module()
    whole.load_state_dict(checkpoint.load(path))
    torch.testing.assert_close(predicted, [whole.predict_step(batch, 0) for batch in data()])

    for plain, evaluated in run_ranks(on_two_processes, 2, folder, elastic=True, timeout_s=90):
        assert plain == pytest.approx(losses[STEPS:], rel=1e-5)
        assert evaluated == pytest.approx(tested)
    load_by_fabric(path, devices=1)
    assert resume(folder, devices=1) == pytest.approx(losses[STEPS:], rel=1e-5)


@pytest.mark.parametrize("compiled", [pytest.param("saved", marks=pytest.mark.long), "loaded"])
def test_a_part_that_was_compiled_on_one_side_only_is_matched_by_a_run_that_resumes(
    compiled: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (losses, _), _ = run_ranks(train_on_stages, 2, str(folder), compiled == "saved", elastic=True)
    resumed = run_ranks(resume_on_data_ranks, 2, folder / "epoch=0.ckpt", compiled == "loaded", elastic=True)
    assert [(one + other) / 2 for one, other in zip(*resumed)] == pytest.approx(losses[STEPS:], rel=1e-5)
    with pytest.raises(RuntimeError, match=r"Missing key.*_orig_mod|Unexpected key.*_orig_mod"):
        Module.load_from_checkpoint(folder / "epoch=0.ckpt", compiled=compiled == "loaded")


def resume_on_data_ranks(path: Path, compiled: bool) -> list[float]:
    trainer = trainer_of({"data_parallel_size": 2}, max_epochs=EPOCHS, log_every_n_steps=1)
    module = Module(compiled)
    loader = DataLoader(data().dataset, batch_size=2)
    trainer.fit(module, loader, ckpt_path=path)
    return module.losses


def test_a_plain_trainer_reads_from_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Module()
    with serve("s3", tmp_path / "served") as server:
        for name, value in {
            "AWS_ACCESS_KEY_ID": server.options["key"],
            "AWS_SECRET_ACCESS_KEY": server.options["secret"],
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        path = f"{server.url}/run/last.ckpt"
        checkpoint.save(module, path, trainer_state={"pytorch-lightning_version": L.__version__, "epoch": 1})
        trainer = L.Trainer(devices=1, **TRAINER)
        expected: Any = trainer.predict(module, data())
        torch.testing.assert_close(trainer.predict(Module(), data(), ckpt_path=path), expected)
        L.Fabric(accelerator="cpu", devices=1).load_raw(path, other := Module())
        torch.testing.assert_close(other.state_dict(), module.state_dict())
