"""Experts dealt to ranks compute what one process computes, and their checkpoints are any other's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks
from tests import mixtures
from tests.parity import Model, Seen, combine, largest_difference, layout, train, world

EP2 = {**layout(data=2), "expert_parallel_size": 2}
PLAN = {"experts": "experts"}
SAFE = "own, all tokens to one expert"


class MixtureModel(Model):
    def __init__(self, kind: str) -> None:
        L.LightningModule.__init__(self)
        self.on_meta = False
        torch.manual_seed(1)
        self.model = mixtures.NETWORKS[kind]()


def trained(sizes: dict[str, int] | None, kinds: list[str], **options: Any) -> dict[str, Seen]:
    plan = {"expert_parallel_plan": PLAN} if sizes else {}
    return {
        kind: train(
            "llama", sizes, module=partial(MixtureModel, kind), **(plan if kind.startswith("own") else {}), **options
        )
        for kind in kinds
    }


def assert_alike(sizes: dict[str, int], kinds: list[str], **options: Any) -> None:
    ours = run_ranks(trained, world(sizes), sizes, kinds, elastic=True, timeout_s=120, **options)
    for kind, plain in trained(None, kinds, **options).items():
        seen = combine([rank[kind] for rank in ours], sizes)
        assert seen.losses == pytest.approx(plain.losses, rel=3e-6), kind
        assert seen.norm == pytest.approx(plain.norm, rel=1e-5), kind
        assert largest_difference(seen.initial, plain.initial) == 0, kind
        assert largest_difference(seen.gradients, plain.gradients) < 2e-6, kind
        assert largest_difference(seen.parameters, plain.parameters) < 2e-4, kind  # of AdamW's steps of 1e-3
        assert seen.metrics == pytest.approx(plain.metrics, rel=1e-5), kind


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
