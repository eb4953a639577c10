"""Users' hooks change a model's states in a checkpoint as in one process; a stage's hook sees its part when saving.

What they put into Lightning's checkpoint is there again, under any key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import checkpoint
from lightning_shard.errors import UnsupportedStateError
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, loader, trainer_of
from tests.training.saving.test_plain_lightning import WIDTH
from tests.training.saving.test_plain_lightning import Module as Plain


class Average(L.Callback):
    """Keeps an average by names, as the parameters are laid out."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            kept = self.average.setdefault(name, torch.zeros_like(parameter.detach()))
            kept.lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = state["average"]


class Module(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.saw: dict[str, Any] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)

    def look(self, when: str, states: dict[str, dict[str, Tensor]]) -> None:
        for key, state in states.items():
            norms = {name: float(torch.linalg.vector_norm(full_tensor(value))) for name, value in state.items()}
            self.saw[f"{when} {key}"] = norms

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.look("saved", {key: checkpoint[key] for key in ("state_dict", "current_model_state") if key in checkpoint})
        if "head.weight" in state:
            state["head.weight"] = state["head.weight"] * 3
        if "net.0.0.weight" in state:
            state["net.0.0.weight"].mul_(2)
            checkpoint["of_hooks"] = full_tensor(state["net.0.0.bias"]) - 1
            if "current_model_state" not in checkpoint:
                state["renamed"] = state.pop("net.1.0.weight")
        state["net.3.0.bias"] = torch.ones(WIDTH)
        state["added"] = torch.arange(3.0)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = {key: checkpoint[key] for key in ("state_dict", "current_model_state") if key in checkpoint}
        self.look("loaded", states | {"hooks": {"of": checkpoint["of_hooks"]}})
        assert checkpoint["state_dict"].pop("added").tolist() == [0, 1, 2]
        if "renamed" in checkpoint["state_dict"]:
            checkpoint["state_dict"]["net.1.0.weight"] = checkpoint["state_dict"].pop("renamed")
        state = checkpoint.get("current_model_state", checkpoint["state_dict"])
        state["net.0.0.weight"].mul_(0.5)
        state["net.3.0.weight"] = state["net.3.0.weight"] + 0.1
        state["head.bias"] = torch.zeros(2)


def run(
    sizes: dict[str, int] | None, averages: bool, path: str, resume: str | None
) -> tuple[dict[str, Any], list[float], dict[str, Tensor]]:
    L.seed_everything(1, verbose=False)
    keep = Average()
    callbacks = [keep, *([EMAWeightAveraging(decay=0.8)] if averages else [])]
    trainer = trainer_of(sizes or None, max_epochs=2 if resume else 1, callbacks=callbacks, log_every_n_steps=1)
    module = Module()
    samples: Any = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    trainer.fit(module, DataLoader(samples, batch_size=4), ckpt_path=resume)
    average = {name: full_tensor(value).clone() for name, value in keep.average.items()}
    trainer.save_checkpoint(path)
    return module.saw, module.losses, average


@pytest.mark.parametrize("averages", [pytest.param(False, marks=pytest.mark.long), True], ids=["plain", "averaged"])
def test_hooks_see_and_change_a_models_states_on_stages_as_in_one_process(averages: bool, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    sizes = {"pipeline_parallel_size": 2}
    before = run_ranks(run, 2, sizes, averages, first, None, elastic=True)
    after = run_ranks(run, 2, sizes, averages, second, first, elastic=True)
    plain = run(None, averages, f"{first}.ckpt", None), run(None, averages, f"{second}.ckpt", f"{first}.ckpt")
    for ranks, (saw, losses, average) in zip((before, after), plain):
        kept: dict[str, Tensor] = {}
        for key in saw:
            seen = [own_saw[key] for own_saw, _, _ in ranks]
            if key.startswith("saved"):  # by each stage of its part
                assert not seen[0].keys() & seen[1].keys(), key
                seen = [seen[0] | seen[1]]
            for of_rank in seen:
                assert of_rank == pytest.approx(saw[key], rel=1e-5), key
        for own_saw, own_losses, own_average in ranks:
            assert own_saw.keys() == saw.keys()
            assert own_losses == pytest.approx(losses, rel=1e-5)
            assert not kept.keys() & own_average.keys()
            kept |= own_average
        torch.testing.assert_close(kept, average)
    for name in (first, second):
        torch.testing.assert_close(checkpoint.load(name), checkpoint.load(f"{name}.ckpt"))


KEPT: dict[str, Any] = {
    "transformers": "4.1",
    "extra_state": {"ema": 1.5},
    "rank_state": {"w": torch.ones(2)},
    "layout": 1,
    "current_model_state": None,
    "$": "dollar",
}


class Keeping(Model):
    put = KEPT
    found: dict[str, Any] | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(self.put)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = {key: checkpoint[key] for key in self.put if key in checkpoint}


def fit(strategy: str, steps: int, path: Path | None, ckpt_path: Path | None = None, **put: Any) -> Keeping:
    L.seed_everything(3)
    module = Keeping()
    module.put = put or KEPT
    trainer = L.Trainer(strategy=strategy, devices=1, max_steps=steps, **QUIET)
    trainer.fit(module, loader(16), ckpt_path=ckpt_path)
    if path is not None:
        trainer.save_checkpoint(path)
    return module


def same(found: dict[str, Any] | None) -> bool:
    assert torch.equal(found["rank_state"]["w"], torch.ones(2))
    return {**found, "rank_state": None} == {**KEPT, "rank_state": None}


def test_hooks_find_what_they_put(tmp_path: Path) -> None:
    fit("hybrid_shard", 1, tmp_path / "ours")
    assert same(fit("hybrid_shard", 2, None, tmp_path / "ours").found)
    checkpoint.gather(tmp_path / "ours", tmp_path / "gathered.ckpt")
    assert same(fit("auto", 2, None, tmp_path / "gathered.ckpt").found)
    fit("auto", 1, tmp_path / "plain.ckpt")
    for other in ("gathered.ckpt", "plain.ckpt"):
        assert same(fit("hybrid_shard", 2, None, tmp_path / other).found)


def test_a_key_that_is_in_use_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedStateError, match="'optimizer_tensors' into the checkpoint"):
        fit("hybrid_shard", 1, tmp_path / "ours", optimizer_tensors=1)
