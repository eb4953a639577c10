"""The recipes that people start from: ordinary LightningModules, which train on stages as on one rank."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from names import CONFIG
from shapes import KINDS, Drawn

from lightning_shard.testing import run_ranks

MODULES = ("gpt", "moe", "causal", "lora", "images", "diffusion")
QUIET = ["logger=null", "enable_progress_bar=false", "enable_model_summary=false", "log_every_n_steps=1"]
FEW = ["max_steps=4", "val_check_interval=4", "limit_val_batches=1"]


@pytest.mark.parametrize("name", MODULES)
def test_a_recipes_module_knows_nothing_of_this_package_and_is_short(name: str) -> None:
    source = (CONFIG.parent / "recipes" / f"{name}.py").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    assert "lightning_shard" not in source
    assert classes
    assert all(node.end_lineno - node.lineno < 120 for node in classes if node.end_lineno)


class Logged(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.balances: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.balances.append(float(trainer.callback_metrics.get("train_balance", 0.0)))


def trained(recipe: str, folder: Path, *overrides: str) -> tuple[list[float], dict[str, float], Any, list[float]]:
    """Losses of the steps, all that was logged in the end, the module, and what balances experts."""
    settings = [f"trainer.{setting}" for setting in (*QUIET, *FEW)]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose("config", [f"recipe={recipe}", f"output={folder}", *settings, *overrides])
    L.seed_everything(config.seed, verbose=False)
    model, logged = instantiate(config.model), Logged()
    trainer = instantiate(config.trainer, _partial_=True, enable_checkpointing=False)(
        strategy=instantiate(config.strategy, _convert_="all"), callbacks=[logged]
    )
    trainer.fit(model, instantiate(config.data))
    logs = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return logged.losses, logs, model, logged.balances


SMALL = {
    "images": ["model.width=16", "model.heads=2", "data.batch_size=8"],
    "diffusion": ["model.channels=8", "data.size=16", "data.batch_size=8"],
    "pretrain": ["model=gpt_tiny", "model.sample=4", "data=folder", "data.context=16", "data.batch_size=8"],
    "moe": [
        *("model.width=16", "model.layers=2", "model.heads=2", "model.experts=4", "model.inner=8", "model.shared=16"),
        *("data=folder", "data.context=16", "data.held_out_windows=16"),
    ],
}


def on_stages(recipe: str, folder: Path) -> tuple[list[float], dict[str, float], Any]:
    stages = ["trainer.devices=2", "strategy.pipeline_parallel_size=2"]
    losses, logs, model, _ = trained(recipe, folder, *SMALL[recipe], *texts(recipe, folder), *stages)
    return losses, logs, getattr(model, "sampled_T", None)


def texts(recipe: str, folder: Path) -> list[str]:
    if recipe not in ("pretrain", "moe"):
        return []
    (folder / "fox.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 200)
    return [f"data.path={folder}"]


@pytest.mark.parametrize("recipe", [pytest.param("images", marks=pytest.mark.long), "pretrain"])
def test_a_recipe_trains_on_stages_as_on_one_rank(recipe: str, tmp_path: Path) -> None:
    losses, logs, model, _ = trained(recipe, tmp_path, *SMALL[recipe], *texts(recipe, tmp_path))
    for own, logged, sampled in run_ranks(on_stages, 2, recipe, tmp_path, elastic=True, timeout_s=200):
        assert own == pytest.approx(losses, rel=1e-4)
        assert logged == pytest.approx(logs, rel=1e-4)
        if recipe == "pretrain":
            assert sampled.tolist() == model.sampled_T.tolist()  # type: ignore[union-attr, operator]


def test_diffusion_trains_on_stages(tmp_path: Path) -> None:
    losses, logs, _ = run_ranks(on_stages, 2, "diffusion", tmp_path, elastic=True, timeout_s=200)[0]
    assert losses[-1] < losses[0]  # it draws its noise anew for each microbatch
    assert logs.keys() == {"train_loss", "val_loss"}


def on_experts(
    folder: Path, path: list[str]
) -> list[tuple[list[float], dict[str, float], list[float], tuple[int, ...]]]:
    """Of data ranks, and of the same with experts on ranks of their own; and the shape of this rank's experts."""
    found = []
    for layout in ([], ["strategy.expert_parallel_size=2"]):
        run = trained("moe", folder, *SMALL["moe"], *path, "trainer.devices=2", *layout)
        experts = run[2].model.blocks[0].mlp.experts.up
        found.append((run[0], run[1], run[3], (experts.device_mesh.ndim, *experts.to_local().shape)))
    return found


def test_experts_on_ranks_of_their_own_take_the_same_steps(tmp_path: Path) -> None:
    path = texts("moe", tmp_path)
    (plain, logs, balances, whole), ours = run_ranks(on_experts, 2, tmp_path, path, elastic=True, timeout_s=120)[0]
    assert (whole, ours[3]) == ((1, 2, 16, 8), (2, 2, 16, 8))  # sharded by FSDP2, and dealt
    assert logs.keys() == {"train_loss", "train_balance", "val_loss"}
    assert len(plain) == 4
    assert ours[0] == pytest.approx(plain, rel=1e-5)
    assert ours[1] == pytest.approx(logs, rel=1e-5)
    assert ours[2] == pytest.approx(balances, rel=1e-5)
    assert all(1 <= balance < 4 for balance in ours[2])


def test_a_drawn_image_is_the_same_each_time_and_of_its_kind() -> None:
    images = Drawn(8, 16, seed=0, noise=0.1)
    (once, kind), (again, _) = images[5], images[5]
    assert torch.equal(once, again)
    assert kind == 5 % len(KINDS)
    assert images[4][0].mean() != once.mean()
