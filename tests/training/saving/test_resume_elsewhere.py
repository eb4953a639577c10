"""What was saved under one schedule or precision goes on under another: same bytes, same curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_shard import checkpoint
from lightning_shard.testing import run_ranks
from tests import on_gpu
from tests.parity import layout, train, world
from tests.training.parallel.test_memory_settings import HALF, Overflowing
from tests.training.saving.test_resume import Restored, _bytes

SAVED, TRAINED = 2, 4  # the checkpoint is of the second step, in the middle of an epoch of six
CHECKPOINT = f"step={SAVED}.ckpt"
ONE, DP2, PP2 = layout(), layout(data=2), layout(pipeline=2)


@dataclass(frozen=True)
class Pair:
    """Where a run is saved, and where it goes on.

    Attributes:
        network: "gpt", or one whose second batch overflows.
        loss: How much losses may differ, as a part of them.
    """

    saved_on: Mapping[str, Any]
    goes_on: Mapping[str, Any]
    network: str = "gpt"
    precision: str = "32-true"
    loss: float = 2e-6
    saved_with: Mapping[str, Any] = field(default_factory=dict)


TO_ONE = "dual, one"
PAIRS = {
    "two parts, data ranks": Pair(PP2, DP2, saved_with={"schedule": "InterleavedZeroBubble"}),
    TO_ONE: Pair(PP2, ONE, saved_with={"schedule": "DualPipeV"}),
    "offloaded, stages": Pair(DP2, PP2, saved_with={"cpu_offload": True}),
    "16-mixed": Pair(DP2, PP2, "overflowing", "16-mixed", 1e-4),
    "bf16-true": Pair(DP2, PP2, precision="bf16-true", loss=HALF["bf16-true"][0]),
}


@dataclass
class Ran:
    """One rank's part: what was loaded, each step's loss, and of fp16 the scaler's state at the checkpoint."""

    losses: list[float]
    state: dict[str, bytes]
    scaler: dict[str, Any] | None


class Scaler(L.Callback):
    """Notes its state where the checkpoint is, and what is loaded of it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._note(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._note(trainer)

    def _note(self, trainer: L.Trainer) -> None:
        if trainer.global_step == SAVED:
            self.state = trainer.precision_plugin.state_dict()


def run(pair: Pair, folder: Path, *, resumes: bool) -> Ran:
    sizes, options = (pair.goes_on, {}) if resumes else (pair.saved_on, pair.saved_with)
    own: Any = {"overflowing": partial(Overflowing, 0)}
    scaled = pair.precision == "16-mixed"  # which the Trainer itself takes on CUDA only
    precise = {"plugins": MixedPrecision("16-mixed", on_gpu.device_type())} if scaled else {"precision": pair.precision}
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    restored, scaler = Restored(), Scaler()
    seen = train(
        pair.network,
        sizes,
        module=own.get(pair.network),
        steps=TRAINED,
        shuffle=True,
        callbacks=[restored, scaler, *([] if resumes else [keep])],
        trainer={"enable_checkpointing": not resumes, "limit_val_batches": 0, **precise},
        resume=str(folder / CHECKPOINT) if resumes else None,
        **options,
    )
    return Ran(seen.losses, {key: _bytes(value) for key, value in restored.state.items()}, scaler.state)


def run_all(names: list[str], folder: Path, *, resumes: bool) -> dict[str, Ran]:
    return {name: run(PAIRS[name], folder / name, resumes=resumes) for name in names}


def assert_goes_on(pair: Pair, path: Path, saved: list[Ran], resumed: list[Ran]) -> None:
    assert checkpoint.verify(path).ok
    stored = checkpoint.read(path)
    expected = {key: _bytes(value.full()) for part in (stored, stored.optimizer) for key, value in part.items()}
    whole: dict[str, bytes] = {}
    for ran in resumed:
        assert all(whole.setdefault(key, value) == value for key, value in ran.state.items()), path
        assert ran.losses == pytest.approx(saved[0].losses[SAVED:], rel=pair.loss), path
        assert ran.scaler == saved[0].scaler, path
    assert whole == expected, path


def there(names: list[str], folder: Path) -> tuple[dict[str, Ran], dict[str, Ran]]:
    """Saved, and gone on with where that is on as many ranks."""
    saved = run_all(names, folder, resumes=False)
    return saved, run_all([name for name in names if world(PAIRS[name].goes_on) == 2], folder, resumes=True)


@pytest.mark.long
def test_other_schedules_precisions_and_devices(tmp_path: Path) -> None:
    per_rank = run_ranks(there, 2, [*PAIRS], tmp_path, elastic=True, timeout_s=300)
    on_one = run_ranks(run_all, 1, [TO_ONE], tmp_path, resumes=True, elastic=True, timeout_s=120)
    for name, pair in PAIRS.items():
        saved = [ran[0][name] for ran in per_rank]
        resumed = [ran[name] for ran in on_one] if name == TO_ONE else [ran[1][name] for ran in per_rank]
        assert_goes_on(pair, tmp_path / name / CHECKPOINT, saved, resumed)
    overflowed = per_rank[0][0]["16-mixed"].scaler
    assert overflowed["scale"] == 2.0**15  # and not what a scaler begins with
