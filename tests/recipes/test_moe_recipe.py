"""``recipe=moe``: a mixture of experts takes the same steps with its experts on ranks of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from names import CONFIG, refuse_unknown_names
from torch.distributed.tensor import DTensor

from lightning_shard.testing import run_ranks

POEM = "The quick brown fox jumps over the lazy dog, and the dog says nothing at all.\n" * 200


class Logged(L.Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trained(folder: Path, *overrides: str) -> tuple[list[dict[str, float]], tuple[int, ...]]:
    """What each step and the validation logged, and the shape of this rank's experts."""
    small = ["model.width=16", "model.layers=2", "model.heads=2", "model.experts=4", "model.inner=8", "model.shared=16"]
    few = ["trainer.max_steps=4", "trainer.val_check_interval=4", "data.context=16", "data.held_out_windows=16"]
    quiet = ["trainer.logger=null", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]
    given = ["recipe=moe", "data=folder", f"data.path={folder}", f"output={folder}", *small, *few, *quiet, *overrides]
    with initialize_config_dir(str(CONFIG), version_base="1.3"):
        config = compose("config", given)
    refuse_unknown_names(config)
    L.seed_everything(config.seed)
    logged = Logged()
    model = instantiate(config.model)
    trainer = instantiate(config.trainer, _partial_=True, enable_checkpointing=False)(
        strategy=instantiate(config.strategy, _convert_="all"), callbacks=[logged]
    )
    trainer.fit(model, instantiate(config.data))
    experts = model.model.blocks[0].mlp.experts.up
    assert isinstance(experts, DTensor)
    logged.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
    return logged.steps, (experts.device_mesh.ndim, *experts.to_local().shape)


def both(folder: Path) -> list[tuple[list[dict[str, float]], tuple[int, ...]]]:
    devices = "trainer.devices=2"
    return [trained(folder, devices), trained(folder, devices, "strategy.expert_parallel_size=2")]


def test_experts_on_ranks_of_their_own_take_the_same_steps(tmp_path: Path) -> None:
    (tmp_path / "poem.txt").write_text(POEM)
    (plain, whole), (ours, dealt) = run_ranks(both, 2, tmp_path, elastic=True, timeout_s=120)[0]
    assert (whole, dealt) == ((1, 2, 16, 8), (2, 2, 16, 8))  # sharded by FSDP2, and dealt
    assert len(ours) == 5
    assert ours[-1].keys() == {"train_loss", "train_balance", "val_loss"}
    for name in ours[-1]:
        assert [step[name] for step in ours if name in step] == pytest.approx(
            [step[name] for step in plain if name in step], rel=1e-5
        )
    assert all(1 <= step["train_balance"] < 4 for step in ours)
