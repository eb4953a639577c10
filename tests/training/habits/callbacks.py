"""Lightning's callbacks."""

from __future__ import annotations

import contextlib
import io
import logging
import math
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

import lightning_shard
from tests.training.habits.harness import Habits, Module, Run, Samples

habit = Habits("Callbacks")


@habit("EarlyStopping on what a validation logs")
def stop_by_validation(run: Run) -> Any:
    stop = stock.EarlyStopping("val_loss", patience=1, min_delta=10)
    return run.fit(callbacks=[stop], max_epochs=9), stop.stopped_epoch, float(stop.best_score), stop.wait_count


@habit("EarlyStopping on what training logs", long=True)
def stop_by_training(run: Run) -> Any:
    stop = stock.EarlyStopping("train_loss", patience=0, min_delta=10, check_on_train_epoch_end=True)
    return run.fit(callbacks=[stop], max_epochs=9), stop.stopped_epoch


@habit("LearningRateMonitor", long=True)
def monitor_rates(run: Run) -> Any:
    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    monitor = stock.LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    logger = CSVLogger(run.folder)
    seen = run.fit(Scheduled(), callbacks=[monitor], logger=logger, log_every_n_steps=1)
    return seen, monitor.lrs, run.rows(logger)


@habit("DeviceStatsMonitor", long=True)
def monitor_devices(run: Run) -> Any:
    logger = CSVLogger(run.folder)
    monitor = stock.DeviceStatsMonitor(cpu_stats=True)
    seen = run.fit(callbacks=[monitor], logger=logger, log_every_n_steps=1, max_steps=1)
    found = run.rows(logger)
    return seen, run.on_rank_zero(lambda: sorted({key for row in found for key in row}))


@habit("LambdaCallback: hooks, in their order", long=True)
def lambdas(run: Run) -> Any:
    calls: list[str] = []
    kinds = ("fit", "train", "train_epoch", "train_batch", "validation", "validation_epoch", "validation_batch")
    names = [f"on_{kind}_{side}" for kind in kinds for side in ("start", "end")]
    of_steps = ("before_backward", "after_backward", "before_optimizer_step", "before_zero_grad")
    names += ["setup", "teardown", *(f"on_{name}" for name in of_steps)]

    def note(name: str) -> Any:
        return lambda *_, **__: calls.append(name)

    noting: Any = {name: note(name) for name in names}
    return run.fit(callbacks=[stock.LambdaCallback(**noting)], accumulate_grad_batches=2), calls


# -- checkpoints


@habit("lightning_shard.ModelCheckpoint: the best ones and the last")
def keep_the_best(run: Run) -> Any:
    save = lightning_shard.ModelCheckpoint(
        run.folder, monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}"
    )
    seen = run.fit(callbacks=[save], enable_checkpointing=True, max_epochs=3)
    best = {Path(path).name: float(score) for path, score in save.best_k_models.items()}
    return seen, run.files(), best, Path(save.best_model_path).name, float(save.best_model_score)


@habit("lightning_shard.ModelCheckpoint: by steps, all kept, weights only, last", long=True)
def keep_by_steps(run: Run) -> Any:
    save = lightning_shard.ModelCheckpoint(
        run.folder, every_n_train_steps=2, save_top_k=-1, save_weights_only=True, save_last=True
    )
    return run.fit(callbacks=[save], enable_checkpointing=True), run.files()


@habit("lightning_shard.ModelCheckpoint: by time", long=True)
def keep_by_time(run: Run) -> Any:
    save = lightning_shard.ModelCheckpoint(run.folder, train_time_interval=timedelta(0), save_top_k=-1)
    return run.fit(callbacks=[save], enable_checkpointing=True, max_steps=3), run.files()


@habit("ModelCheckpoint of Lightning, on a local disk", long=True)
def keep_by_lightning(run: Run) -> Any:
    save = stock.ModelCheckpoint(run.folder, monitor="val_loss", save_last=True)
    seen = run.fit(callbacks=[save], enable_checkpointing=True)
    more = stock.ModelCheckpoint(run.folder)
    again = run.fit(callbacks=[more], enable_checkpointing=True, max_epochs=2, ckpt_path="last")
    return seen, again, run.files()


@habit("ModelCheckpoint that the Trainer makes by itself", long=True)
def keep_by_default(run: Run) -> Any:
    seen = run.fit(enable_checkpointing=True, logger=CSVLogger(run.folder))
    return seen, run.files("lightning_logs/*/checkpoints/*")


class Fails(Module):
    """On all ranks alike; of one that fails alone, the others wait in a collective and can't save."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise ValueError("on purpose")


class Keeps(stock.OnExceptionCheckpoint):
    """Lightning's removes the checkpoint where the run that failed is torn down."""

    def teardown(self, *_: Any, **__: Any) -> None:
        return None


@habit("OnExceptionCheckpoint, and going on from it", long=True)
def keep_on_exception(run: Run) -> Any:
    if run.layout is None:
        return run.rest_of(run.fit(), 2)
    with contextlib.suppress(ValueError):
        run.fit(Fails(), callbacks=[Keeps(run.folder)], enable_checkpointing=True)
    return run.fit(ckpt_path=str(run.folder / "on_exception.ckpt"))


@habit("ModelCheckpoint(save_on_exception=True)", long=True)
def keep_on_exception_too(run: Run) -> Any:
    save = lightning_shard.ModelCheckpoint(run.folder, save_on_exception=True)
    with contextlib.suppress(ValueError):
        run.fit(Fails(), callbacks=[save], enable_checkpointing=True)
    return run.files()


# -- what people look at


def printed(parts: list[str], flag: str, make: Any, run: Run) -> Any:
    """A fit, and which of ``parts`` it showed on rank 0; the others show nothing."""
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    logger = logging.getLogger("lightning.pytorch.callbacks.model_summary")
    logger.addHandler(handler)
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        seen = run.fit(num_sanity_val_steps=1, callbacks=[make()], **{flag: True})
    logger.removeHandler(handler)
    found = [part for part in parts if part in shown.getvalue()]
    assert found == run.on_rank_zero(lambda: found) or not found
    return seen, run.on_rank_zero(lambda: found)


BAR = ["Sanity", "Epoch 0", "4/4", "Validation", "train_loss"]


SUMMARY = [
    *("net.blocks", "Block", "ModuleList", "FSDP", "Later", "346", "288", "Trainable params", "Non-trainable params")
]
SHOWING: dict[str, tuple[list[str], str, Any]] = {
    "TQDMProgressBar": (BAR, "enable_progress_bar", partial(stock.TQDMProgressBar, 1, leave=True)),
    "RichProgressBar": (BAR, "enable_progress_bar", partial(stock.RichProgressBar, 1, leave=True)),
    "ModelSummary": (SUMMARY, "enable_model_summary", partial(stock.ModelSummary, 3)),
    "RichModelSummary": (SUMMARY, "enable_model_summary", partial(stock.RichModelSummary, 3)),
}
for _name, _shown in SHOWING.items():
    habit(_name, long=_name != "ModelSummary")(partial(printed, *_shown))


@habit("Timer", long=True)
def timer(run: Run) -> Any:
    ends = run.fit(callbacks=[stock.Timer({"microseconds": 1}, interval="step")])
    lasts = stock.Timer(timedelta(hours=1))
    return ends, run.fit(callbacks=[lasts]), lasts.time_elapsed("train") > 0


@habit("ThroughputMonitor", long=True)
def throughput(run: Run) -> Any:
    logger = CSVLogger(run.folder)
    monitor = stock.ThroughputMonitor(
        batch_size_fn=lambda batch: len(batch["x"]), length_fn=lambda batch: batch["x"].numel(), window_size=3
    )
    module = Module()
    module.flops_per_batch = 10**6 // run.data_size  # of the whole model, for the batch that a rank reads
    # which a CPU is not known to have; of each device
    with mock.patch("lightning.pytorch.callbacks.throughput_monitor.get_available_flops", return_value=10**9):
        seen = run.fit(module, callbacks=[monitor], logger=logger, log_every_n_steps=1)
    rows = run.rows(logger)

    def over_all_devices() -> dict[str, float]:
        first, _, last = [row for row in rows if "train/time" in row][-3:]
        elapsed = last["train/time"] - first["train/time"]
        devices = 2 if run.layout else 1
        rates = ("samples", "items", "flops")
        of_devices = {rate: last[f"train/device/{rate}_per_sec"] * elapsed * devices for rate in rates}
        for rate in rates:
            assert of_devices[rate] == last.get(f"train/{rate}_per_sec", of_devices[rate] / elapsed) * elapsed
        # of what all devices together could do, so much was done for the whole model
        assert math.isclose(last["train/device/mfu"] * 10**9, last["train/device/flops_per_sec"])
        return of_devices

    return seen, run.on_rank_zero(over_all_devices)


# -- what changes the training


def with_callback(make: Any, epochs: int, run: Run) -> Any:
    return run.fit(callbacks=[make()], max_epochs=epochs)


CHANGING: dict[str, tuple[Any, int]] = {
    "GradientAccumulationScheduler": (partial(stock.GradientAccumulationScheduler, {0: 2, 1: 4}), 2),
    "StochasticWeightAveraging": (partial(stock.StochasticWeightAveraging, 0.05, swa_epoch_start=1), 3),
    "WeightAveraging": (stock.WeightAveraging, 2),
    "EMAWeightAveraging": (partial(stock.EMAWeightAveraging, decay=0.9), 2),
}
for _name, _changing in CHANGING.items():
    habit(_name, long=True)(partial(with_callback, *_changing))


class Tuned(Module):
    @property
    def backbone(self) -> Any:
        return self.net.blocks

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.02)


@habit("BackboneFinetuning", long=True)
def finetune(run: Run) -> Any:
    return run.fit(Tuned(), callbacks=[stock.BackboneFinetuning(1, lambda _: 1.5, 0.01)], max_epochs=3)


@habit("ModelPruning", refused=dict.fromkeys(("pp2", "dp2"), "ConfigurationError: ModelPruning can't be used"))
def prune(run: Run) -> Any:
    return run.fit(callbacks=[stock.ModelPruning("l1_unstructured", amount=0.5)])


@habit("LearningRateFinder", long=True)
def find_rate(run: Run) -> Any:
    find = stock.LearningRateFinder(num_training_steps=13, early_stop_threshold=None)
    module = Module()
    with contextlib.redirect_stderr(io.StringIO()):
        seen = run.fit(module, run.loader(128), callbacks=[find], max_steps=2, limit_val_batches=0)
    return seen, find.optimal_lr.results, find.optimal_lr.suggestion(), module.lr


@habit("Tuner.lr_find, that stops early", long=True)
def find_rate_before(run: Run) -> Any:
    module = Module()
    with contextlib.redirect_stderr(io.StringIO()):
        found = Tuner(run.trainer()).lr_find(module, run.loader(256), num_training=30, min_lr=1e-3, max_lr=100)
    return found.results, module.lr, run.fit(module)


class Sized(Module):
    batch_size = 8

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(64), batch_size=self.batch_size)

    val_dataloader = train_dataloader


SEVERAL_RANKS = dict.fromkeys(("pp2", "dp2"), "not supported with distributed strategies")


@habit("BatchSizeFinder", refused=SEVERAL_RANKS, long=True)
def find_batch_size(run: Run) -> Any:
    module = Sized()
    run.trainer(callbacks=[stock.BatchSizeFinder(max_trials=1, init_val=8)]).fit(module)
    return module.batch_size


@habit("Tuner.scale_batch_size", refused=SEVERAL_RANKS, long=True)
def find_batch_size_before(run: Run) -> Any:
    return Tuner(run.trainer()).scale_batch_size(Sized(), max_trials=1, init_val=8)


@habit("BasePredictionWriter")
def write_predictions(run: Run) -> Any:
    wrote: dict[int, Any] = {}
    epochs: list[int] = []
    at_ends: list[int] = []

    class Writer(stock.BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
            assert not wrote.keys() & set(indices)
            wrote.update(zip(indices, prediction))

        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
            epochs.append(sum(map(len, predictions)))
            at_ends.extend(index for of_loader in indices for batch in of_loader for index in batch)

    returned = run.trainer(callbacks=[Writer("batch_and_epoch")]).predict(Module(), run.loader(11, batch=4))
    assert epochs == [len(wrote)]
    assert len(wrote) in (0, sum(map(len, returned)))  # what other ranks with a part of the model are given is nothing
    rows = [row for _, row in run.in_order(sorted(wrote.items()))]
    assert bool(wrote) == (run.rank < run.data_size)  # stages before the last have nothing to write
    # the second data rank's last batch is the first sample over again
    at_ends.clear()
    run.trainer(callbacks=[Writer("epoch")]).predict(Module(), run.loader(9, batch=4), return_predictions=False)
    assert epochs[-1] == len(at_ends)
    ends = run.in_order(at_ends)
    return run.on_rank_zero(lambda: rows), run.on_rank_zero(lambda: sorted(ends))


class Spiky(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 2 else 1)


@habit("SpikeDetection", long=True)
def detect_spikes(run: Run) -> Any:
    file = run.folder / "skip.json"
    try:
        detect = stock.SpikeDetection(warmup=1, atol=0.01, exclude_batches_path=str(file))
        run.fit(Spiky(), callbacks=[detect])
    except Exception as error:
        return type(error).__name__, str(error), run.on_rank_zero(file.exists)
    return None
