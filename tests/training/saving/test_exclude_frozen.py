"""``ShardedCheckpointIO(exclude_frozen=True)``: adapters on a frozen network that is left out, put together again."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_shard import HybridShardStrategy, ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint import excluded
from lightning_shard.checkpoint.content import content_of_all, content_of_stored
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.errors import CheckpointError, ConfigurationError, StateMismatchError
from lightning_shard.plugin.saving.frozen import Frozen
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, QUIET, VOCABULARY, layout, loader

LAYOUTS = {"dp2": layout(data=2), "pp2": layout(pipeline=2)}
SAVED, TRAINED = 2, 3


class Block(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.down = nn.Linear(12, 2, bias=False)
        self.up = nn.Linear(2, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.layer(x) + self.up(self.down(x)))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(12, VOCABULARY)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(".down." in name or ".up." in name)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


FROZEN = {f"model.{name}" for name, p in Network().named_parameters() if not p.requires_grad}


class Adapted(L.LightningModule):
    def __init__(self, seed: int = 1, freeze_late: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = Network()
        self.freeze_late = freeze_late
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.freeze_late and self.global_step == 1:
            with torch.no_grad():
                self.model.blocks[0].layer.bias.add_(1.0)
        loss = F.cross_entropy(self.model(batch["x"]).flatten(0, 1), batch["y"].flatten())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["train_loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2)


def fit(
    name: str | None, steps: int, module: Adapted, *, save: str | None = None, resume: str | None = None, **io: Any
) -> list[float]:
    strategy: Any = "auto"
    sizes = LAYOUTS[name] if name else layout()
    if name:
        strategy = HybridShardStrategy(**sizes, checkpoint_io=ShardedCheckpointIO(fsync=False, **io))
    devices = 2 if name else 1
    callbacks: list[L.Callback] = []
    if save:
        keep = {"every_n_train_steps": steps, "save_top_k": -1}
        callbacks.append(ModelCheckpoint(os.path.dirname(save), os.path.basename(save).removesuffix(".ckpt"), **keep))
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        max_steps=steps,
        callbacks=callbacks,
        **{**QUIET, "enable_checkpointing": bool(save)},
    )
    trainer.fit(module, loader(GLOBAL_BATCH // sizes["data_parallel_size"]), ckpt_path=resume)
    return module.losses


def save_and_resume(name: str, other: str, folder: str) -> dict[str, Any]:
    path = f"{folder}/{name}.ckpt"
    plain = fit(name, SAVED, Adapted(), save=path, exclude_frozen=True)
    with pytest.raises(StateMismatchError, match="11 of them have different values"):
        fit(other, TRAINED, Adapted(seed=2), resume=path)
    resumed = {
        "rebuilt": fit(other, TRAINED, Adapted(), resume=path),
        "from base": fit(other, TRAINED, Adapted(seed=2), resume=path, base=f"{folder}/base", exclude_frozen=True),
    }
    with pytest.raises(StateMismatchError, match="have different values"):
        fit(other, TRAINED, Adapted(seed=2), resume=path, base=f"{folder}/wrong")
    return {"plain": plain, **resumed}


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return fit(None, TRAINED, Adapted())


@pytest.mark.parametrize("name", [pytest.param("dp2", marks=pytest.mark.long), "pp2"])
def test_a_run_without_its_frozen_weights_goes_on_and_only_with_the_same_ones(
    name: str, tmp_path: Path, uninterrupted: list[float]
) -> None:
    (other,) = set(LAYOUTS) - {name}
    checkpoint.save(Adapted().model, tmp_path / "base")  # without the beginning "model."
    checkpoint.save(Adapted(seed=2).model, tmp_path / "wrong")
    for seen in run_ranks(save_and_resume, 2, name, other, str(tmp_path), elastic=True):
        assert seen["plain"] == pytest.approx(uninterrupted[:SAVED], rel=1e-5)
        for how in ("rebuilt", "from base"):
            assert seen[how] == pytest.approx(uninterrupted[SAVED:], rel=1e-5), how
    path = tmp_path / f"{name}.ckpt"
    stored = checkpoint.read(path)
    whole = Adapted().state_dict()
    assert set(stored) == whole.keys() - FROZEN
    told = stored.trainer_state()["lightning_shard"]["excluded"]
    assert set(told["tensors"]) == FROZEN
    assert checkpoint.verify(path).ok

    out = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match=r"11 frozen tensors .* pass base="):
        checkpoint.gather(path, out)
    with pytest.raises(StateMismatchError, match="holds another"):
        checkpoint.gather(path, out, base=tmp_path / "wrong")
    assert not out.exists()
    checkpoint.gather(path, out, base=tmp_path / "base")
    gathered = checkpoint.read(out).full()
    assert gathered.keys() == whole.keys()
    for key in FROZEN:
        assert torch.equal(gathered[key], whole[key]), key
    for key in whole.keys() - FROZEN:
        assert torch.equal(gathered[key], stored[key].full()), key
    # Lightning's own file is whole again, and says so
    checkpoint.gather(path, tmp_path / "plain.ckpt", base=tmp_path / "base")
    assert Adapted(seed=2).load_state_dict(checkpoint.read(tmp_path / "plain.ckpt").full())
    checkpoint.gather(path, tmp_path / "renamed.ckpt", base=tmp_path / "base", strip_prefix="model.")
    assert checkpoint.read(tmp_path / "renamed.ckpt").state_json()["lightning_shard"].keys() == {"seed"}
    completed = complete(stored, tmp_path / "base").full()
    assert completed.keys() == whole.keys()
    assert all(torch.equal(completed[key], gathered[key]) for key in whole)


def with_bases(folder: str) -> tuple[list[float], list[str]]:
    with pytest.raises(StateMismatchError, match="another 'model"):
        fit("dp2", 1, Adapted(), save=f"{folder}/never.ckpt", exclude_frozen=True, base=f"{folder}/wrong")
    fit("dp2", SAVED, Adapted(), save=f"{folder}/named.ckpt", exclude_frozen=True, base=f"{folder}/base")
    fit("dp2", SAVED, Adapted(seed=2), resume=f"{folder}/base", save=f"{folder}/begun.ckpt", exclude_frozen=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit("dp2", SAVED, Adapted(freeze_late=True), save=f"{folder}/late.ckpt", exclude_frozen=True)
        # the base that the checkpoint names is found again, and named again
        again: dict[str, Any] = {"resume": f"{folder}/named.ckpt", "save": f"{folder}/again.ckpt"}
        losses = fit("dp2", TRAINED, Adapted(seed=2), exclude_frozen=True, **again)
    return losses, [text for each in said if "nothing says where" in (text := str(each.message))]


def test_the_base_is_compared_named_and_found_again(tmp_path: Path, uninterrupted: list[float]) -> None:
    checkpoint.save(Adapted().model, tmp_path / "base")
    checkpoint.save(Adapted(seed=2).model, tmp_path / "wrong")
    seen = run_ranks(with_bases, 2, str(tmp_path), elastic=True)
    for losses, _ in seen:
        assert losses == pytest.approx(uninterrupted[SAVED:], rel=1e-5)
    (said,) = seen[0][1]  # of the one without a base
    assert "leaves 10 frozen parameters" in said
    assert not checkpoint.exists(tmp_path / "never.ckpt")
    for path in ("named", "begun", "again"):
        assert not FROZEN & set(checkpoint.read(tmp_path / f"{path}.ckpt"))
        checkpoint.gather(tmp_path / f"{path}.ckpt", tmp_path / f"{path}.safetensors")
        gathered = checkpoint.read(tmp_path / f"{path}.safetensors")
        assert torch.equal(gathered["model.head.weight"].full(), Adapted().model.head.weight)
    late = checkpoint.read(tmp_path / "late.ckpt")
    assert FROZEN & set(late) == {"model.blocks.0.layer.bias"}  # frozen, but not what it was


def gather_and_fail(folder: str) -> list[str]:
    """Which frozen tensors this rank read for a gather; then what it is told when a rank can't look at its own."""
    looked: list[str] = []

    def look(stored: Any) -> str:
        looked.append(stored.name)
        return content_of_stored(stored)

    with mock.patch.object(excluded, "content_of_stored", look):
        checkpoint.gather(f"{folder}/c", f"{folder}/out.safetensors", base=f"{folder}/base")
        with pytest.raises(StateMismatchError, match="holds another 'b'"):
            checkpoint.gather(f"{folder}/c", f"{folder}/never.safetensors", base=f"{folder}/wrong")

    module = nn.Linear(2, 2).requires_grad_(False)
    frozen = Frozen(module, init_device_mesh("cpu", (dist.get_world_size(),)), None, None)
    fails = dist.get_rank() == 1
    if fails:
        frozen._digests = mock.Mock(side_effect=MemoryError("full"))  # type: ignore[method-assign]
    with pytest.raises(MemoryError if fails else CheckpointError, match="full"):
        frozen.leave_out(module.state_dict())
    return looked


def test_ranks_share_the_reading_of_a_base_and_stop_together(tmp_path: Path) -> None:
    base = {name: torch.full((3,), float(number)) for number, name in enumerate("abc")}
    told = {n: {"dtype": "F32", "shape": [3], "content": c} for n, c in content_of_all(base).items()}
    record = {"tensors": told, "base": None, "origins": {}}
    checkpoint.save({"d": torch.ones(1)}, tmp_path / "c", trainer_state={"lightning_shard": {"excluded": record}})
    checkpoint.save(base, tmp_path / "base")
    checkpoint.save({**base, "b": torch.zeros(3)}, tmp_path / "wrong")
    first, second = run_ranks(gather_and_fail, 2, str(tmp_path))
    assert (first, second) == (["a", "c"] * 2, ["b"] * 2)
    assert set(checkpoint.read(tmp_path / "out.safetensors")) == set("abcd")
    assert not (tmp_path / "never.safetensors").exists()


def average(name: str, steps: int, folder: str, resume: str | None) -> list[float]:
    """Lightning's average is of frozen parameters too, and is what such a checkpoint has as the module's state."""
    strategy = HybridShardStrategy(**LAYOUTS[name], checkpoint_io=ShardedCheckpointIO(fsync=False, exclude_frozen=True))
    module = Adapted()
    keeps = ModelCheckpoint(folder, f"{name}-{{step}}", every_n_train_steps=SAVED, save_top_k=-1)
    options = {**QUIET, "enable_checkpointing": True, "callbacks": [WeightAveraging(), keeps]}
    trainer = L.Trainer(strategy=strategy, devices=2, max_steps=steps, **options)
    trainer.fit(module, loader(GLOBAL_BATCH // LAYOUTS[name]["data_parallel_size"]), ckpt_path=resume)
    return module.losses


@pytest.mark.long
@pytest.mark.parametrize(("name", "other"), [("dp2", "pp2"), ("pp2", "dp2")])
def test_averages_of_partly_frozen_networks_go_on(name: str, other: str, tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = run_ranks(average, 2, other, TRAINED + 1, folder, None, elastic=True)[0]
    run_ranks(average, 2, name, SAVED, folder, None, elastic=True)
    resumed = run_ranks(average, 2, other, TRAINED, folder, f"{folder}/{name}-step={SAVED}.ckpt", elastic=True)[0]
    assert resumed == pytest.approx(whole[SAVED:TRAINED], rel=1e-5)


def test_other_strategies_refuse_it(tmp_path: Path) -> None:
    trainer = L.Trainer(
        max_steps=1, devices=1, plugins=[ShardedCheckpointIO(exclude_frozen=True)], **{**QUIET, "barebones": False}
    )
    trainer.fit(Adapted(), loader(GLOBAL_BATCH))
    with pytest.raises(ConfigurationError, match="hybrid_shard"):
        trainer.save_checkpoint(tmp_path / "c")
