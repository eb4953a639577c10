"""Lightning's habits on layouts: what a user does with a Trainer, and what comes of it on one plain process.

A habit is a function of a :class:`Run`. It returns what it has seen, which has to be the same on every rank of a layout
as on one process::

    @habit("EarlyStopping")
    def early_stopping(run: Run) -> Any:
        stop = EarlyStopping("val_loss", patience=0)
        return run.fit(callbacks=[stop], max_epochs=9), stop.stopped_epoch

``tests/training/whole/test_habits.py`` runs all of them, one after the other in the same processes.
"""

from __future__ import annotations

import csv
import os
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_shard import HybridShardStrategy
from lightning_shard.plugin.running import failure

LAYOUTS = {"pp2": {"pipeline_parallel_size": 2}, "dp2": {"data_parallel_size": 2}}
GLOBAL_BATCH = 8
TOLERANCE = 1e-5
WIDTH = 8


# -- what is trained


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Steps(L.LightningModule):
    """An ordinary LightningModule, but for its optimizers: nothing in it knows of any layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = Net()

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch["x"]), batch["y"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, sync_dist=True, prog_bar=True, batch_size=GLOBAL_BATCH)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch["x"])


class Module(Steps):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.02

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, count: int = 32) -> None:
        self.x = torch.randn(count, 4, generator=torch.Generator().manual_seed(7))
        self.y = torch.stack([self.x.sum(1), self.x[:, 0] * self.x[:, 1]], 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


# -- how it is run


class Watch(L.Callback):
    """What was logged of each training batch, and the steps after which validations ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validations: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if "train_loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.validations.append(trainer.global_step)


class Elsewhere:
    """In the place of a fact that only rank 0 knows."""


@dataclass
class Run:
    """A habit's surroundings on this rank.

    Attributes:
        layout: One of LAYOUTS; None is plain Lightning on one process.
        folder: This habit's own, the same on all ranks.
        weights: Whole ones after the last fit, on rank 0.
    """

    layout: str | None
    folder: Path
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        return LAYOUTS[self.layout] if self.layout else {}

    @property
    def data_size(self) -> int:
        return self.sizes.get("data_parallel_size", 1)

    @property
    def rank(self) -> int:
        return int(os.environ["RANK"])

    @property
    def data_rank(self) -> int:
        return self.rank % self.data_size

    def on_rank_zero(self, look: Callable[[], Any]) -> Any:
        return look() if self.rank == 0 else Elsewhere()

    def files(self, pattern: str = "*") -> Any:
        """Names in the folder, as rank 0 sees them."""
        return self.on_rank_zero(lambda: sorted(str(p.relative_to(self.folder)) for p in self.folder.glob(pattern)))

    def rows(self, logger: CSVLogger) -> Any:
        """What a logger wrote."""

        def read() -> list[dict[str, float]]:
            with open(Path(logger.log_dir) / "metrics.csv") as file:
                return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]

        return self.on_rank_zero(read)

    def in_order(self, own: Any) -> Any:
        """The data ranks' sequences of samples as one process would have them."""
        if self.data_size == 1:
            return own
        everyone: list[Any] = [None] * self.data_size
        dist.all_gather_object(everyone, own)
        longest = max(map(len, everyone))
        return [one[i] for i in range(longest) for one in everyone if i < len(one)]

    def loader(self, count: int = 32, batch: int = GLOBAL_BATCH, **options: Any) -> DataLoader[Any]:
        """Of so many samples in all, and so many for a step of all ranks."""
        return DataLoader(Samples(count), batch_size=batch // self.data_size, **options)

    def trainer(self, **options: Any) -> L.Trainer:
        quiet: dict[str, Any] = {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "max_epochs": 1,
            "default_root_dir": str(self.folder),
        }
        strategy: Any = HybridShardStrategy(**self.sizes) if self.layout else "auto"
        given = {} if options.get("barebones") else quiet
        devices = 2 if self.layout else 1
        return L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **{**given, **options})

    def fit(
        self,
        module: L.LightningModule | None = None,
        train: Any = None,
        val: Any = None,
        *,
        callbacks: Sequence[L.Callback] = (),
        ckpt_path: Any = None,
        datamodule: Any = None,
        **options: Any,
    ) -> dict[str, Any]:
        """One epoch of four batches, unless told otherwise; returns what it was like."""
        watch = Watch()
        trainer = self.trainer(callbacks=[*callbacks, *([] if options.get("barebones") else [watch])], **options)
        if datamodule is None:
            train = self.loader() if train is None else train
            val = self.loader(16) if val is None else val
        trainer.fit(module or Module(), train, val, datamodule=datamodule, ckpt_path=ckpt_path)
        return self.facts(trainer, watch)

    def rest_of(self, facts: dict[str, Any], batches: int) -> dict[str, Any]:
        """An uninterrupted fit after its first batches: plain Lightning begins a DataLoader anew when it is resumed."""
        return {**facts, "losses": facts["losses"][batches:]}

    def facts(self, trainer: L.Trainer, watch: Watch) -> dict[str, Any]:
        if isinstance(trainer.strategy, HybridShardStrategy):
            self.weights = trainer.strategy.gather_full_parameters()
        else:
            self.weights = {name: p.detach().clone() for name, p in trainer.lightning_module.named_parameters()}
        return {
            "losses": watch.losses,
            "validations": watch.validations,
            "steps": trainer.global_step,
            "epochs": trainer.current_epoch,
            "batches": trainer.num_training_batches,
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        }


# -- the list


@dataclass(frozen=True)
class Habit:
    """A row of docs/lightning.md.

    Attributes:
        refused: By layout, what the error says that refuses it there.
        tolerance: Relative, and absolute of what is near 0.
        long: Whether only `make reliability` has the time for it.
    """

    name: str
    function: Callable[[Run], Any]
    refused: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    long: bool = False


class Habits(list[Habit]):
    """One kind of them.

    Args:
        title: The heading in docs/lightning.md.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title

    def __call__(self, name: str, **options: Any) -> Callable[[Any], Any]:
        def add(function: Callable[[Run], Any]) -> Callable[[Run], Any]:
            self.append(Habit(name, function, **options))
            return function

        return add

    def of_module(self, name: str, fit: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Any:
        """Decorator of a module's class: a habit that is one fit of it."""

        def add(kind: Any) -> Any:
            self(name, **options)(partial(_fit_of, kind, dict(fit)))
            return kind

        return add


def _fit_of(kind: Any, options: dict[str, Any], run: Run) -> Any:
    return run.fit(kind(), **options)


@dataclass(frozen=True)
class Outcome:
    """What a rank has seen of a habit; picklable, whatever the habit is."""

    seen: Any = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    error: str = ""


def outcomes(functions: Sequence[Callable[[Run], Any]], layout: str | None, folder: Path) -> list[Outcome]:
    """Run habits one after the other on this rank."""
    failure._POLL_S = 0.05  # rank 0 waits for two of these when a fit fails
    found = []
    for index, function in enumerate(functions):
        L.seed_everything(3)
        run = Run(layout, folder / f"{layout}-{index}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                seen = function(run)
                found.append(Outcome(seen, run.weights))
            except Exception as error:
                found.append(Outcome(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    return found


# -- the comparison


def problem(habit: Habit, layout: str, plain: Outcome, ranks: Sequence[Outcome]) -> str:
    """What isn't as on one process, or as promised; nothing where all is well."""
    if pattern := habit.refused.get(layout):
        says = [outcome.error.partition("\n")[0] for outcome in ranks]
        others = [f"rank {rank} says {error!r}" for rank, error in enumerate(says) if not re.search(pattern, error)]
        return f"{', '.join(others)}, not {pattern!r}" if others else ""
    accounts = {"one process": plain, **{f"rank {rank}": outcome for rank, outcome in enumerate(ranks)}}
    for name, outcome in accounts.items():
        found = outcome.error or difference(plain.seen, outcome.seen, habit.tolerance)
        if found:
            return f"{name}: {found}"
    return difference(plain.weights, ranks[0].weights, habit.tolerance, "weights")


def difference(expected: Any, seen: Any, tolerance: float = TOLERANCE, path: str = "") -> str:
    """The first place where two nestings of facts differ, or nothing."""
    if isinstance(seen, Elsewhere):
        return ""
    if isinstance(expected, dict) and isinstance(seen, dict) and expected.keys() == seen.keys():
        pairs = [(f"{path}.{key}", expected[key], seen[key]) for key in expected]
    elif isinstance(expected, (list, tuple)) and isinstance(seen, (list, tuple)) and len(expected) == len(seen):
        pairs = [(f"{path}[{i}]", e, s) for i, (e, s) in enumerate(zip(expected, seen))]
    else:
        return "" if _equal(expected, seen, tolerance) else f"{path or 'it'} is {seen}, not {expected}"
    return next((found for where, e, s in pairs if (found := difference(e, s, tolerance, where))), "")


def _equal(expected: Any, seen: Any, tolerance: float) -> bool:
    if isinstance(expected, Tensor) and isinstance(seen, Tensor):
        return expected.shape == seen.shape and torch.allclose(expected, seen, rtol=tolerance, atol=tolerance)
    if isinstance(expected, float) and isinstance(seen, (float, int)):
        return bool(seen == pytest.approx(expected, rel=tolerance, abs=tolerance, nan_ok=True))
    return bool(expected == seen)
