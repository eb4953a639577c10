"""What a run held is freed once its Trainer and its module are gone: a process that fits again has its memory."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import lightning as L
import pytest

from lightning_shard import ShardedCheckpointIO
from lightning_shard.testing import run_ranks
from tests.parity import layout, train, world
from tests.training.mixtures import MixtureModel

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
