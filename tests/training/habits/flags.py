"""The Trainer's flags, evaluation, and what is logged where."""

from __future__ import annotations

import contextlib
import copy
import io
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch.utils.data import DataLoader, DistributedSampler, Subset

from lightning_shard import ModelCheckpoint
from tests.training.habits.harness import GLOBAL_BATCH, WIDTH, Habits, Module, Run, Samples

habit = Habits("Flags of the Trainer")
logging_habit = Habits("Logging")


ACROSS = {"val_check_interval": 3, "check_val_every_n_epoch": None, "max_epochs": 2}
ON_THE_MACHINE = {"deterministic": True, "benchmark": False, "inference_mode": False, "sync_batchnorm": True}
FLAGS: dict[str, list[dict[str, Any]]] = {
    "accumulate_grad_batches, that doesn't divide an epoch": [{"accumulate_grad_batches": 3, "max_epochs": 2}],
    "gradient_clip_val": [{"gradient_clip_val": 0.05}],
    'gradient_clip_algorithm="value"': [{"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}],
    "detect_anomaly": [{"detect_anomaly": True}],
    "val_check_interval, in batches, of an epoch and across epochs": [
        *({"val_check_interval": 3}, {"val_check_interval": 0.5}, ACROSS)
    ],
    "check_val_every_n_epoch": [{"check_val_every_n_epoch": 2, "max_epochs": 3}],
    "limit_train_batches, limit_val_batches as numbers": [
        *({"limit_train_batches": 3, "limit_val_batches": 1}, {"limit_train_batches": 1, "limit_val_batches": 0})
    ],
    "limit_train_batches, limit_val_batches as fractions": [{"limit_train_batches": 0.5, "limit_val_batches": 0.5}],
    "max_steps, min_steps, min_epochs, max_epochs=0": [
        *({"max_steps": 3}, {"min_steps": 6}, {"min_epochs": 2, "max_epochs": 3}, {"max_epochs": 0})
    ],
    "max_time": [{"max_time": {"microseconds": 1}}],
    "num_sanity_val_steps": [{"num_sanity_val_steps": -1}],
    "overfit_batches": [{"overfit_batches": 2, "max_epochs": 2}],
    "fast_dev_run": [{"fast_dev_run": 2}],
    "deterministic, benchmark, inference_mode=False, sync_batchnorm without BatchNorm": [ON_THE_MACHINE],
}


def fits(each: list[dict[str, Any]], run: Run) -> Any:
    return [run.fit(**flags) for flags in each]


for _name, _each in FLAGS.items():
    habit(_name, long=True)(partial(fits, _each))
habit("accumulate_grad_batches, with a validation in its middle")(
    partial(fits, [{"accumulate_grad_batches": 4, "val_check_interval": 2}])
)
habit("precision=bf16-mixed, as near as bf16 is", tolerance=0.05, long=True)(
    partial(fits, [{"precision": "bf16-mixed"}])
)
habit("precision=64-true", tolerance=1e-12, long=True)(partial(fits, [{"precision": "64-true"}]))


@habit("limit_test_batches, limit_predict_batches; Trainer.test, validate, predict")
def evaluate(run: Run) -> Any:
    trainer = run.trainer(limit_test_batches=2, limit_predict_batches=1)
    module = Module()
    tested = trainer.test(module, run.loader(), verbose=False)
    validated = trainer.validate(module, run.loader(16), verbose=False)
    [predicted] = trainer.predict(module, run.loader(16))
    return tested, validated, run.in_order(list(predicted))


@habit("reload_dataloaders_every_n_epochs", long=True)
def reload_loaders(run: Run) -> Any:
    class Growing(Module):
        made = 0

        def train_dataloader(self) -> Any:
            self.made += 1
            return run.loader(8 * (self.trainer.current_epoch + 1))

        val_dataloader = train_dataloader

    module = Growing()
    trainer = run.trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3)
    trainer.fit(module)
    return trainer.global_step, module.made


@habit("a second fit of one Trainer, a test between", long=True)
def fit_again(run: Run) -> Any:
    module, trainer = Module(), run.trainer()
    trainer.fit(module, run.loader(), run.loader(16))
    tested = trainer.test(module, run.loader(16), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, run.loader(), run.loader(16))
    return tested, trainer.global_step, float(trainer.callback_metrics["val_loss"])


LATE = r"ConfigurationError: The parameter 'net.head.weight' \(and 1 more\) was added to the module, or replaced, after"


@habit("a new head between two fits of one module", refused={"pp2": LATE, "dp2": LATE})
def new_head_between_fits(run: Run) -> Any:
    module = Module()
    run.fit(module, max_steps=1, limit_val_batches=0)
    module.net.head = torch.nn.Linear(WIDTH, 2)
    return run.fit(module)


@habit.of_module("a new head in on_train_epoch_start", {"max_epochs": 2}, refused={"pp2": LATE, "dp2": LATE}, long=True)
class Grows(Module):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.head = torch.nn.Linear(WIDTH, 2)


GAIN = r"ConfigurationError: The parameter 'gain' was added to the module, or replaced, after"


@habit.of_module(
    "add_param_group of a new parameter in the middle of an epoch", refused={"pp2": GAIN, "dp2": GAIN}, long=True
)
class NewParameterInAnEpoch(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.gain = torch.nn.Parameter(torch.ones(()))
            self.optimizers().add_param_group({"params": [self.gain]})


COPY = r"StepError: copy.deepcopy of a \w+ .*EMAWeightAveraging"


@habit.of_module("copy.deepcopy of the network in on_fit_start", refused={"pp2": COPY, "dp2": COPY}, long=True)
class Keeps(Module):
    def on_fit_start(self) -> None:
        self.kept = [copy.deepcopy(self.net)]


@habit("load_state_dict of a whole module, layers unfrozen and frozen, between fits")
def changed_between_fits(run: Run) -> Any:
    module, first = Module(), Module().state_dict()
    module.net.embed.requires_grad_(False)
    frozen = run.fit(module)
    module.load_state_dict(first)
    module.net.embed.requires_grad_(True)
    unfrozen = run.fit(module, callbacks=[LambdaCallback(on_train_start=lambda *_: module.load_state_dict(first))])
    module.net.blocks[0].requires_grad_(False)
    return frozen, unfrozen, run.fit(module)


@habit("ckpt_path in the middle of an epoch")
def resume(run: Run) -> Any:
    if run.layout is None:
        return run.rest_of(run.fit(), 3)
    save = ModelCheckpoint(run.folder, "saved", every_n_train_steps=3)
    run.fit(callbacks=[save], enable_checkpointing=True)
    return run.fit(ckpt_path=str(run.folder / "saved.ckpt"))


class Continues(Module):
    """Its schedule and what its weights are drawn to depend on what was restored."""

    done = 0

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["done"] = self.done

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.done = checkpoint["done"]

    def configure_optimizers(self) -> Any:
        optimizer, rate = super().configure_optimizers(), 0.5**self.done
        steps = int(self.trainer.estimated_stepping_batches)  # asks for the loaders
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: rate * (1 - epoch / steps))]

    def on_fit_start(self) -> None:
        self.first = {name: p.detach().clone() for name, p in self.net.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            parameter.lerp_(self.first[name], 0.1)


class Counts(Callback):
    count = begins_at = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.count = state_dict["count"]

    def on_fit_start(self, *_: Any) -> None:
        self.begins_at = self.count

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1


class InParts(LightningDataModule):
    """Each epoch has samples of its own."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.part = run, 0

    def train_dataloader(self) -> Any:
        samples = Subset(Samples(64), range(32 * self.part, 32 * self.part + 32))
        return DataLoader(samples, batch_size=GLOBAL_BATCH // self.run.data_size)

    def state_dict(self) -> dict[str, int]:
        return {"part": self.part}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.part = state_dict["part"]


@habit("ckpt_path: on_fit_start and configure_optimizers see what was restored")
def restored_before(run: Run) -> Any:
    module, data = Continues(), InParts(run)

    def end_epoch(*_: Any) -> None:
        module.done += 1
        data.part = 1

    save = ModelCheckpoint(run.folder, "saved")
    saving = {"callbacks": [Counts(), LambdaCallback(on_train_epoch_end=end_epoch), save], "enable_checkpointing": True}
    run.fit(module, datamodule=data, limit_val_batches=0, **saving)
    counts = Counts()
    resumed = {"callbacks": [counts], "max_epochs": 2, "ckpt_path": str(run.folder / "saved.ckpt")}
    return run.fit(Continues(), datamodule=InParts(run), limit_val_batches=0, **resumed), counts.begins_at


# -- what is shown


@habit("profiler=simple, advanced", long=True)
def profile(run: Run) -> Any:
    simple = SimpleProfiler(run.folder, "simple")
    with contextlib.redirect_stdout(io.StringIO()):
        seen = run.fit(profiler=simple), run.fit(profiler="advanced", max_steps=1)
    return seen, run.on_rank_zero(
        lambda: [len(kept) for name, kept in simple.recorded_durations.items() if "ing_step" in name]
    )


@habit("profiler=pytorch", long=True)
def profile_by_torch(run: Run) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return run.fit(profiler=PyTorchProfiler(run.folder, "profile", export_to_chrome=False))


class Silent(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@habit("barebones", long=True)
def barebones(run: Run) -> Any:
    return run.fit(Silent(), barebones=True, max_epochs=1)


@habit("use_distributed_sampler=False, and a sampler by data rank", long=True)
def own_sampler(run: Run) -> Any:
    dealt = DistributedSampler(Samples(), run.data_size, run.data_rank, shuffle=False)
    return run.fit(train=run.loader(sampler=dealt), use_distributed_sampler=False, limit_val_batches=0)


@habit("enable_progress_bar, enable_model_summary, enable_checkpointing", long=True)
def enabled(run: Run) -> Any:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run.fit(enable_progress_bar=True, enable_model_summary=True, enable_checkpointing=True)


# -- what is logged


class Logs(Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log_dict({"twice": loss * 2, "more": float(loss.detach()) + 1}, sync_dist=True)
        self.log("samples", len(batch["x"]), reduce_fx="sum", on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        for logger in self.loggers:
            logger.log_metrics({"own": float(self.trainer.callback_metrics["loss_epoch"])}, step=self.global_step)
        self.log("of a hook", 1.5)
        self.print("the epoch has ended")

    def on_validation_epoch_end(self) -> None:
        self.logger.experiment.log_metrics({"experiment": 2.0}, self.global_step)


@logging_habit("CSVLogger, self.log, log_dict, self.logger.experiment, save_hyperparameters, self.print")
def by_csv(run: Run) -> Any:
    logger = CSVLogger(run.folder, flush_logs_every_n_steps=1)
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        seen = run.fit(Logs(), logger=logger, log_every_n_steps=1, max_epochs=2)
    hparams = run.on_rank_zero(lambda: Path(logger.log_dir, "hparams.yaml").read_text())
    return seen, run.rows(logger), hparams, run.on_rank_zero(shown.getvalue)


@logging_habit("several loggers, log_every_n_steps", long=True)
def by_several(run: Run) -> Any:
    one, two = CSVLogger(run.folder, "one"), CSVLogger(run.folder, "two", version="x")
    seen = run.fit(Logs(), logger=[one, two], log_every_n_steps=3, accumulate_grad_batches=2, max_epochs=3)
    return seen, run.rows(one), run.rows(two)


class LogsToTensorBoard(Logs):
    def on_validation_epoch_end(self) -> None:
        self.logger.experiment.add_scalar("experiment", 2.0, self.global_step)


@logging_habit("TensorBoardLogger, self.logger.experiment.add_scalar", long=True)
def by_tensorboard(run: Run) -> Any:
    logger = TensorBoardLogger(run.folder)
    shown: list[tuple[str, float]] = []
    record = logger.log_metrics

    def log_metrics(metrics: Any, step: int | None = None) -> None:
        shown.extend((f"{step}: {name}", float(value)) for name, value in sorted(metrics.items()))
        record(metrics, step)

    logger.log_metrics = log_metrics  # type: ignore[method-assign,assignment]
    seen = run.fit(LogsToTensorBoard(), logger=logger, log_every_n_steps=1)
    return seen, run.on_rank_zero(lambda: (shown, len([*run.folder.glob("*/*/events*")])))


@logging_habit("the logger that the Trainer makes by itself", long=True)
def by_default(run: Run) -> Any:
    seen = run.fit(logger=True)
    files = partial(run.folder.glob, "*/*/*")  # of events the names hold a time
    return seen, run.on_rank_zero(lambda: sorted(file.name.split(".tfevents.")[0] for file in files()))


class LogsInHooks(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("start", float(batch_idx))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("end", outputs["loss"], sync_dist=True, on_step=True, on_epoch=True)

    def on_validation_batch_end(self, outputs: Any, batch: Any, *_: Any) -> None:
        rows = self.all_gather(batch["x"]).reshape(-1, 4)
        self.log("rows", float(len(rows)))

    def on_train_epoch_end(self) -> None:
        self.log("training", float(self.net.training))


@logging_habit("self.log in hooks, all_gather")
def in_hooks(run: Run) -> Any:
    return run.fit(LogsInHooks())


@logging_habit("torchmetrics, a MetricCollection", long=True)
def by_metrics(run: Run) -> Any:
    from torchmetrics import MeanMetric, MeanSquaredError, MetricCollection

    class Measured(Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = MetricCollection({"mse": MeanSquaredError(), "rmse": MeanSquaredError(squared=False)})
            self.mean = MeanMetric()

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch["x"])
            self.scores.update(out, batch["y"])
            self.log_dict(self.scores)
            self.mean.update(torch.atleast_1d(out.square().mean(1)))
            self.log("mean", self.mean)

    return run.fit(Measured())
