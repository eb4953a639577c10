"""Lightning's weight averaging callbacks on layouts: the averages of one process, also when resumed elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_shard import checkpoint
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, Model, layout, loader, train, trainer_of, world

EPOCHS, STEPS, SAVED = 3, 2, 4  # the checkpoint is of the second epoch's end

CALLBACKS: dict[str, Callable[[], L.Callback]] = {
    "EMA": lambda: EMAWeightAveraging(decay=0.8),
    "equal": WeightAveraging,
    "by lists": lambda: WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(0.7), use_buffers=False),
    "StochasticWeightAveraging": lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2),
}


class Buffered(Model):
    """With an averaged buffer, one that isn't saved, and state that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[1].register_buffer("moving", torch.zeros(3))
        self.model.blocks[2].register_buffer("unsaved", torch.zeros(2), persistent=False)
        self.model.blocks[3].register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.extra = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.extra += 1
        for name, buffer in self.named_buffers():
            if name.endswith("moving"):
                buffer.add_(self.extra)

    def get_extra_state(self) -> int:
        return self.extra

    def set_extra_state(self, state: int) -> None:
        self.extra = state


@dataclass
class Seen:
    losses: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    average: dict[str, Tensor] = field(default_factory=dict)
    current: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)
    extra: int = 0


class Watch(L.Callback):
    def __init__(self, averaging: Any) -> None:
        self.seen = Seen()
        self.averaging = averaging

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        average = self.averaging._average_model.state_dict()
        self.seen.average = {name.removeprefix("module."): value for name, value in whole(average).items()}
        self.seen.current = whole(module.state_dict())

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.validated.append(float(trainer.callback_metrics["val_loss"]))


def whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: full_tensor(value).clone() for name, value in state.items() if isinstance(value, Tensor)}


def fit(kind: str, sizes: dict[str, int] | None, folder: str, resume: bool = False) -> Seen:
    averaging: Any = CALLBACKS[kind]()
    watch, module, saves = Watch(averaging), Buffered(), sizes is not None and not resume
    keep = ModelCheckpoint(folder, filename=kind, every_n_epochs=2, save_on_train_epoch_end=True)
    ran = train(
        "gpt",
        sizes,
        module=lambda: module,
        steps=SAVED if saves else -1,
        samples=STEPS * GLOBAL_BATCH,
        callbacks=[averaging, watch, *([keep] if saves else [])],
        trainer={"max_epochs": EPOCHS, "val_check_interval": 1.0, "enable_checkpointing": saves},
        resume=f"{folder}/{kind}.ckpt" if resume else None,
    )
    watch.seen.losses = ran.losses
    watch.seen.final = whole(module.state_dict())
    watch.seen.extra = module.extra
    return watch.seen


def fit_all(kinds: list[str], sizes: dict[str, int] | None, folder: str, resume: bool = False) -> dict[str, Seen]:
    return {kind: fit(kind, sizes, folder, resume) for kind in kinds}


@pytest.mark.parametrize(
    ("kinds", "source", "target"),
    [
        (["EMA"], layout(pipeline=2), layout(data=2)),
        pytest.param(list(CALLBACKS), layout(data=2), layout(pipeline=2), marks=pytest.mark.long),
    ],
    ids=["pp2 to dp2", "dp2 to pp2"],
)
def test_averages_are_those_of_one_process_and_go_on_elsewhere(
    kinds: list[str], source: dict[str, int], target: dict[str, int], tmp_path: Path
) -> None:
    saved = run_ranks(fit_all, world(source), kinds, source, str(tmp_path), elastic=True)
    resumed = run_ranks(fit_all, world(target), kinds, target, str(tmp_path), True, elastic=True)
    plain = fit_all(kinds, None, "")
    for kind, expected in plain.items():
        path = tmp_path / f"{kind}.ckpt"
        assert checkpoint.verify(path).ok
        stored = checkpoint.read(path)
        # the checkpoint's model is what is validated: with SWA, the average is not
        is_swa = kind == "StochasticWeightAveraging"
        prefix = f"state/callbacks/{kind}/average_model_state/" if is_swa else "state/current_model_state/"
        beside = {name.removeprefix(prefix): value for name, value in stored.optimizer.items()}
        averages, currents = (beside, stored) if is_swa else (stored, beside)
        for own in (ranks[kind] for ranks in saved):
            assert own.losses == pytest.approx(expected.losses[:SAVED], rel=2e-6), kind
            assert own.validated == pytest.approx(expected.validated[: len(own.validated)], rel=2e-6), kind
        final: dict[str, Tensor] = {}
        for own in (ranks[kind] for ranks in resumed):
            assert own.losses == pytest.approx(expected.losses[SAVED:], rel=5e-6), kind
            assert own.validated == pytest.approx(expected.validated[-len(own.validated) :], rel=5e-6), kind
            assert own.extra == expected.extra
            for name, value in own.current.items():
                assert torch.equal(value, currents[name].full()), (kind, name)
            for name, value in own.average.items():
                if name != "n_averaged":
                    assert torch.equal(value, averages[name].full()), (kind, name)
            final |= own.final
        assert final.keys() == expected.final.keys()
        for name, value in final.items():
            assert torch.allclose(value, expected.final[name], atol=2e-5), (kind, name)


def in_mid_epoch(sizes: dict[str, int] | None, folder: str, steps: int, resume: int = 0) -> tuple[list[Any], Any]:
    """Rates and losses of each batch, and the final weights; a checkpoint of every step is saved."""
    rates: list[list[float]] = []

    class Note(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    class Scheduled(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    averaging, module = StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=2), Scheduled()
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    settings = {"max_epochs": EPOCHS, "limit_val_batches": 0, "val_check_interval": 1.0, "enable_checkpointing": True}
    ran = train(
        "gpt",
        sizes,
        module=lambda: module,
        steps=steps,
        samples=3 * GLOBAL_BATCH,
        callbacks=[averaging, Note(), keep],
        trainer=settings,
        resume=f"{folder}/step={resume}.ckpt" if resume else None,
    )
    return [(*each, loss) for each, loss in zip(rates, ran.losses, strict=True)], whole(module.state_dict())


def test_a_schedule_of_averaging_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    """Lightning itself takes it up in the next epoch only, a step behind."""
    expected, weights = in_mid_epoch(None, str(tmp_path / "plain"), -1)
    before, after = 4, -1  # in the second epoch, whose average is begun
    run_ranks(in_mid_epoch, 2, layout(pipeline=2), str(tmp_path / "run"), before, elastic=True)
    for seen, own in run_ranks(in_mid_epoch, 2, layout(data=2), str(tmp_path / "run"), after, before, elastic=True):
        assert len(seen) == 3 * EPOCHS - before
        for found, wanted in zip(seen, expected[before:], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)
        assert all(torch.allclose(value, weights[name], atol=5e-5) for name, value in own.items())


def join_late(folder: str) -> tuple[int, float]:
    """Averaging begins at a checkpoint that knows nothing of it, on a module that is on meta; the average is tested."""
    L.seed_everything(3)

    def run(callbacks: list[L.Callback], steps: int, resume: str | None) -> tuple[L.Trainer, Model]:
        trainer = trainer_of({}, max_steps=steps, callbacks=callbacks)
        module = Model(on_meta=True)
        trainer.fit(module, loader(8), ckpt_path=resume)
        trainer.save_checkpoint(f"{folder}/{steps}.ckpt")
        return trainer, module

    run([], 1, None)
    averaging: Any = EMAWeightAveraging(decay=0.5)
    run([averaging], 2, f"{folder}/1.ckpt")
    joined = int(averaging._average_model.n_averaged)
    trainer, module = run([], 3, f"{folder}/2.ckpt")
    (tested,) = trainer.test(module, loader(8, samples=32), ckpt_path=f"{folder}/2.ckpt", verbose=False)
    assert "setup" not in vars(averaging)  # it is as Lightning made it, for other Trainers
    return joined, tested["val_loss"]


@pytest.mark.long
def test_averaging_begins_and_ends_at_any_checkpoint(tmp_path: Path) -> None:
    (joined, loss), other = run_ranks(join_late, 2, str(tmp_path), elastic=True)
    assert (joined, loss) == other == (1, loss)
    model = Model()
    model.load_state_dict(checkpoint.read(tmp_path / "2.ckpt").full())
    with torch.no_grad():
        losses = [float(model.loss(batch)) for batch in loader(16, samples=32)]
    assert loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
