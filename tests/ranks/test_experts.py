"""Experts dealt to ranks compute what one process computes, and their checkpoints are any other's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import lightning as L
import pytest
from torch.distributed.tensor import DTensor

from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks
from tests.mixtures import MixtureModel, assert_alike, trained
from tests.parity import layout, train

EP2 = {**layout(data=2), "expert_parallel_size": 2}
SAFE = "own, all tokens to one expert"


def test_experts_of_two_ranks() -> None:
    clipped = {"trainer": {"gradient_clip_val": 0.5}}
    assert_alike(EP2, ["mixtral", "own", SAFE], **clipped)


@pytest.mark.long
def test_experts_of_other_models() -> None:
    assert_alike(EP2, ["qwen3", "gpt-oss", "deepseek"])


@pytest.mark.long
@pytest.mark.parametrize(
    "sizes",
    [
        {**layout(data=4), "expert_parallel_size": 2},
        {**layout(data=4), "expert_parallel_size": 4},
        {**layout(data=4), "expert_parallel_size": 2, "data_parallel_replicas": 2},
        {**layout(pipeline=2, data=2), "expert_parallel_size": 2},
        {**layout(data=2, tensor=2), "expert_parallel_size": 2},
    ],
    ids=["ep2×dp2", "ep4", "ep2×dp2 replicas", "pp2×ep2", "ep2×tp2"],
)
def test_experts_beside_other_axes(sizes: dict[str, int]) -> None:
    own = [] if sizes["tensor_parallel_size"] > 1 else ["own", SAFE]
    assert_alike(sizes, ["mixtral", "qwen3", *own])


class Placed(L.Callback):
    """Sees how an expert's weight lies, and saves at the end of a fit."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.local: tuple[int, ...] = ()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        weight = module.get_parameter("model.model.layers.0.mlp.experts.down_proj")
        assert isinstance(weight, DTensor)
        self.local = tuple(weight.to_local().shape)
        trainer.save_checkpoint(self.path)


def there_and_back(folder: Path) -> tuple[list[tuple[int, ...]], list[float]]:
    """Two steps on ep2; saved, loaded and saved on dp2, and on ep2 again; two more steps on dp2."""
    placed = []
    earlier: str | None = None
    dp2 = layout(data=2)
    for name, sizes, steps in (("a", EP2, 2), ("b", dp2, 2), ("c", EP2, 2), ("d", dp2, 4)):
        look = Placed(folder / name)
        seen = train(
            "llama", sizes, steps=steps, module=partial(MixtureModel, "mixtral"), callbacks=[look], resume=earlier
        )
        placed.append(look.local)
        earlier = look.path
    return placed, seen.losses


def test_checkpoints_go_from_dealt_experts_to_whole_ones_and_back(tmp_path: Path) -> None:
    placed, losses = run_ranks(there_and_back, 2, tmp_path, elastic=True)[0]
    assert placed == [(2, 32, 64)] * 4  # of 4 experts: dealt, or sharded by torch on their first dim
    for name in ("b", "c"):
        assert checkpoint.diff(tmp_path / "a", tmp_path / name).ok
    assert losses == pytest.approx(trained(None, ["mixtral"], steps=4)["mixtral"].losses[2:], rel=3e-6)
