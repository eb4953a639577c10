"""What each device holds in a run is what its shards take, and is freed once the Trainer and its module are gone."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import lightning as L
import pytest

from lightning_shard import HybridShardStrategy, ShardedCheckpointIO
from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.reporting.memory import HeldMemory
from lightning_shard.testing import run_ranks
from tests.parity import Model, layout, train, world
from tests.training.mixtures import MixtureModel


class Asks(L.Callback):
    def __init__(self) -> None:
        self.at_start: Any = None
        self.in_last_step: Any = None

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.at_start = trainer.strategy.held_memory()

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any) -> None:
        self.in_last_step = trainer.strategy.held_memory()


def ask(sizes: dict[str, int]) -> tuple[HeldMemory, HeldMemory]:
    asks = Asks()
    train("gpt", sizes, steps=2, callbacks=[asks])
    return asks.at_start, asks.in_last_step


@pytest.mark.parametrize("sizes", [layout(pipeline=2), layout(data=2)], ids=["pp2", "dp2"])
def test_all_ranks_together_hold_the_model_its_gradients_and_moments_once(sizes: dict[str, int]) -> None:
    (start, later), other = run_ranks(ask, world(sizes), sizes, elastic=True)
    assert other == (start, later)  # each is told of all
    model = sum(p.numel() * p.itemsize for p in Model().parameters())
    stages = [each.stages for each in start.ranks]
    assert stages == ([(1,), (0,)] if sizes["pipeline_parallel_size"] > 1 else [(0,), (0,)])
    assert sum(each.parameters for each in start.ranks) == model
    assert all(each.gradients == each.optimizer == 0 for each in start.ranks)
    for before, now in zip(start.ranks, later.ranks):
        assert now.parameters == now.gradients == before.parameters
        assert 2 * now.parameters < now.optimizer < 2.1 * now.parameters  # AdamW's, and a number for each parameter
        assert now.allocated is None
    assert str(later).splitlines()[0].split() == [
        "rank",
        "stage",
        "parameters",
        "gradients",
        "optimizer",
        "buffers",
        "counted",
    ]


def test_before_a_fit_it_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="a fit or an evaluation that has begun"):
        HybridShardStrategy().held_memory()


LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "alone": (layout(), {}),
    "dp2": (layout(data=2), {"activation_checkpointing": True}),
    "tp2": (layout(tensor=2), {}),
    "cp2": (layout(context=2), {}),
    "pp2": (layout(pipeline=2), {}),
    "pp2, several stages": (layout(pipeline=2), {"schedule": "InterleavedZeroBubble"}),
    "ep2": ({**layout(data=2), "expert_parallel_size": 2}, {"expert_parallel_plan": {"experts": "experts"}}),
}


class Took(L.Callback):
    """Weak references to what a run holds at its end. Lightning lets callbacks hold their module."""

    def __init__(self, held: dict[str, ref[Any]]) -> None:
        self.held = held

    def on_fit_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        tensors = dict(module.named_parameters())
        for name, parameter in list(tensors.items()):
            tensors |= {f"{kind} of {name}": state for kind, state in optimizer.state[parameter].items()}
        whole = {"trainer": trainer, "module": module, "strategy": trainer.strategy, "optimizer": optimizer}
        self.held |= {name: ref(each) for name, each in {**whole, **tensors}.items()}


def fit(sizes: dict[str, int], options: dict[str, Any], folder: Path) -> dict[str, ref[Any]]:
    held: dict[str, ref[Any]] = {}
    module = partial(MixtureModel, "own") if "expert_parallel_plan" in options else None
    saving = {"plugins": [ShardedCheckpointIO(asynchronous=True)], "enable_checkpointing": True}
    settings = {**saving, "default_root_dir": str(folder)}
    train("gpt", sizes, module=module, callbacks=[Took(held)], trainer=settings, **options)
    return held


def kept_after_a_fit(*args: Any) -> list[str]:
    held = fit(*args)
    assert len(held) > 20
    for _ in range(3):
        gc.collect()
    return [name for name, each in held.items() if each() is not None]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("dp2", "pp2, several stages") else pytest.mark.long) for name in LAYOUTS],
)
def test_a_run_is_freed_with_its_trainer(name: str, tmp_path: Path) -> None:
    sizes, options = LAYOUTS[name]
    kept = run_ranks(kept_after_a_fit, world(sizes), sizes, options, tmp_path, elastic=True, timeout_s=90)
    assert not any(kept), kept
