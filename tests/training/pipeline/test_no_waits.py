"""A steady step on stages asks no tensor for its value, so that no device is waited for; and says what it does.

On the CPU that can be seen of the calls alone. ``tests/gpu`` has CUDA itself raise where it would wait.
"""

from __future__ import annotations

import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard.testing import run_ranks
from tests.parity import Model, loader, trainer_of

READS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2"}
"""Operators for which a device would be waited for."""
ASK = {"item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "__array__"}
OF_HOSTS = ("plugin/broadcast.py",)
"""What is asked there are messages, which are on the host."""


class Operators(TorchDispatchMode):
    """Notes operators that read values, wherever they come from: also from torch's own C++."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            note(self.found, str(func))
        return func(*args, **(kwargs or {}))


class Questions(TorchFunctionMode):
    """Notes where this package or Lightning asks a tensor for its value; on the CPU not each one is an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.operators = Operators(self.found)

    def __enter__(self) -> Any:
        self.operators.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.operators.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ASK:
            note(self.found, func.__name__)
        return func(*args, **(kwargs or {}))


def note(found: list[str], name: str) -> None:
    frame: Any = sys._getframe(2)
    files = [frame.f_code.co_filename]
    while "/torch/" in files[-1]:
        frame = frame.f_back
        files.append(frame.f_code.co_filename)
    of_steps = any("/torch/optim/" in file for file in files)  # optimizers count them on the host
    if "lightning" in files[-1] and not files[-1].endswith(OF_HOSTS) and not of_steps:
        found.append(f"{name} in {files[-1]}:{frame.f_lineno}")


class Returns(Model):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("samples", len(batch["x"]), reduce_fx="sum")
        return {"loss": loss, "features": loss.detach().expand(len(batch["x"]), 3)}


class Watch(L.Callback):
    """From the third batch on."""

    def __init__(self) -> None:
        self.questions = Questions()
        self.profile = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.profile.__enter__()
        if batch_idx > 1:
            self.questions.__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 1:
            self.questions.__exit__(None, None, None)
            assert outputs["features"].shape == (16, 3)
        if batch_idx == 2:
            trainer.save_checkpoint(self.path)
            self.profile.__exit__(None, None, None)


def steady_steps(path: str, **options: Any) -> tuple[list[str], set[str]]:
    watch = Watch()
    watch.path = path  # type: ignore[attr-defined]
    trainer = trainer_of(
        {"pipeline_parallel_size": 2, "microbatches": 2, **options},
        max_steps=4,
        gradient_clip_val=0.5,
        callbacks=[watch],
    )
    trainer.fit(Returns(), loader(16))
    return watch.questions.found, {event.key for event in watch.profile.key_averages()}


def test_a_steady_step_asks_no_tensor_for_its_value_and_its_actions_have_names(tmp_path: Any) -> None:
    for questions, names in run_ranks(steady_steps, 2, str(tmp_path / "x.ckpt"), elastic=True):
        assert not questions
        assert {"F0", "F1", "B0", "B1", "save"} <= names


def test_questions_are_seen() -> None:
    with Questions() as questions:
        bool(torch.ones(1))
    assert not questions.found  # asked by this test
