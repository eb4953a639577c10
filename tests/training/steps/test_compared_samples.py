"""What splitting a batch into microbatches changes is reported by name, once; what it doesn't change isn't."""

from __future__ import annotations

import math
import os
import pathlib
import re
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanSquaredError, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_shard.testing import RanksFailed, assert_trains_alike, run_ranks
from tests.parity import QUIET, trainer_of
from tests.training.parallel.small import Descends

WIDTH = 8
TOLD = "Losses and logs are means over samples"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x).tanh())


class OverSamples(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean(0)


class Undropped(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout.p = 0.0


Loss = Callable[[Tensor, Tensor], Tensor]


class Module(Descends):
    """A mean over samples, with masks and a scale that all samples share; it collects what it sees."""

    block: type[Block] = Block

    def __init__(self, loss: Loss = F.cross_entropy) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.loss_of = loss
        self.head = nn.Linear(WIDTH, WIDTH)
        self.seen: list[Tensor] = []

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        scale = 1 + self.head.weight.mean()
        for block in self.blocks:
            x = block(x) * scale
        self.seen.append(x.detach())
        return self.loss(self.head(x), y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss_of(x, y)


def contrastive(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x @ x.T, torch.arange(len(x)))


def root_mean_square(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y, reduction="none").square().mean().sqrt()


def dice(x: Tensor, y: Tensor) -> Tensor:
    """Of the batch: its smoothing makes it no mean, though no sample is compared with another."""
    given, wanted = x.softmax(-1), F.one_hot(y, WIDTH)
    return 1 - (2 * (given * wanted).sum() + 1) / (given.sum() + wanted.sum() + 1)


def scaled(x: Tensor, y: Tensor) -> Tensor:
    """A sum, in a way that its graph doesn't show."""
    return 0.5 * F.cross_entropy(x, y, reduction="none").sum()


def divided(x: Tensor, y: Tensor) -> Tensor:
    """A mean, in a way that its graph doesn't show."""
    return (torch.einsum("nd,nd->d", x, x) / len(x)).sum()


def correlated(x: Tensor, y: Tensor) -> Tensor:
    """Barlow Twins'."""
    return (x.T @ x / len(x) - torch.eye(WIDTH)).square().sum()


class UndroppedMean(Module):
    block = Undropped


class Logs(UndroppedMean):
    """What is and what isn't a mean over samples, computed in ways that can't be read off."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = Codes()
        self.calls = 0
        self.metrics = nn.ModuleDict(
            {
                "metric accuracy": MulticlassAccuracy(WIDTH, average="micro"),
                "!metric RMSE": MeanSquaredError(squared=False),
                "metric count": SumMetric(),
                "!metric sum": SumMetric(),
                "metric most": MaxMetric(),
                "RMSE of the epoch": MeanSquaredError(squared=False),
            }
        )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss, guess = F.cross_entropy(x, y), x.argmax(-1)
        self.calls += 1
        right = float(((guess < 4) & (y < 4)).sum())
        self.log_dict(
            {"accuracy": (guess == y).float().mean(), "square": float((x**2).mean()), "zero": x.mean() * 1e-9}
        )
        if self.trainer.training:  # in evaluations what differs from run to run is taken for drawn
            self.log_dict({"calls": float(self.calls), "time": time.perf_counter()})
        self.log("count", (guess == y).sum(), reduce_fx="sum")
        self.log("!batches", 1, reduce_fx="sum")
        self.log("least", x.min(), reduce_fx="min")
        self.log("!least mean", x.mean(), reduce_fx="min")
        self.log("!samples", len(x))
        given = {"metric accuracy": (x, y), "metric count": ((guess == y).sum(),), "!metric sum": (loss,)}
        given["metric most"] = (x.max(),)
        for name, metric in self.metrics.items():
            metric(*given.get(name, (x[:, 0], y.float())))
            self.log(name, metric, on_step=name != "RMSE of the epoch", on_epoch=True)
        self.log("of three", (guess == y).float().mean(), batch_size=3 * len(x))
        self.log_dict({"!F1": 2 * right / float((guess < 4).sum() + (y < 4).sum() + 1), "!size": float(len(x))})
        self.log_dict({"!perplexity": math.exp(loss.item()), "!codes": self.codes(x), "!root": (x**2).mean().sqrt()})
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    test_step = validation_step


class Dropping(UndroppedMean):
    """Whether two runs have equal accuracies is chance."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.dropout(x, 0.3)
        self.log("accuracy", (x.argmax(-1) == y).float().mean())
        return F.cross_entropy(x, y)


class Kendall(UndroppedMean):
    def __init__(self) -> None:
        super().__init__()
        self.variances = nn.Parameter(torch.zeros(2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        losses = torch.stack([F.cross_entropy(x, y), x.square().mean()])
        loss = losses[0] * torch.exp(-self.variances[0]) + losses[1] * torch.exp(-self.variances[1])
        self.log("loss", loss + self.variances.sum())
        return loss + self.variances.sum()


class Recurrent(UndroppedMean):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), Last(WIDTH, WIDTH, batch_first=True))  # type: ignore[assignment]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(self.head(self.through(batch[0])[:, None]), batch[1])


class BothWays(UndroppedMean):
    """Its blocks return states too, as many for each sample as a microbatch has samples: these are in dim 1."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.GRU(WIDTH, WIDTH // 2, num_layers=2, bidirectional=True, batch_first=True) for _ in range(4)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0][:, None]
        for block in self.blocks:
            x, _ = block(x)
        return self.loss(self.head(x[:, 0]), batch[1])


class Last(nn.GRU):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)[0][:, -1]


class WithNumber(Undropped):
    """Adds to what it returns a mean over samples, or what isn't one."""

    def __init__(self, *, is_mean: bool) -> None:
        super().__init__()
        self.is_mean = is_mean

    def forward(self, x: Tensor) -> Any:
        share = x.softmax(-1).mean(0)
        return super().forward(x), share[0] if self.is_mean else (share * share.log()).sum().exp()


class CodesInBlock(UndroppedMean):
    is_mean = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = WithNumber(is_mean=self.is_mean)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, number = self.blocks[0](batch[0])
        for block in self.blocks[1:]:
            x = block(x)
        self.log("number", number)
        return self.loss(self.head(x), batch[1])


class MeanInBlock(CodesInBlock):
    is_mean = True


class Counts(Undropped):
    """What it keeps changes with each call, and nothing that it returns does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.last = 0, 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.last = self.calls + 1, float(x.sum())
        return super().forward(x)


class CountsInBlock(UndroppedMean):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Counts()


class Codes(nn.Module):
    """Returns the perplexity of a codebook's use."""

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        share = (x @ self.book.T).softmax(-1).mean(0)
        return (-(share * share.log()).sum()).exp().detach()


class Together(Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = OverSamples()


class InOrder(Module):
    """Needs samples in order, as packed sequences are by their lengths."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if not bool((batch[0][:, 0].diff() >= 0).all()):
            raise ValueError("not in order")
        return super().training_step(batch, batch_idx)


class Normalized(Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.through(batch[0])), batch[1])


def texts_of(run: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """What a run warns of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        run(*args, **options)
    return [str(each.message) for each in said]


def trainer(ranks: int = 2, callbacks: Sequence[L.Callback] = (), **settings: Any) -> L.Trainer:
    return trainer_of({"microbatches": 4, **settings}, ranks, max_epochs=1, callbacks=[*callbacks])


def loader(batch_size: int = 16, inputs: Tensor | None = None) -> Any:
    inputs = torch.randn(32, WIDTH) if inputs is None else inputs
    return DataLoader(TensorDataset(inputs, torch.randint(0, WIDTH, (32,))), batch_size=batch_size)


def fit(kind: Kind, settings: dict[str, Any], batch_size: int = 16, ranks: int = 2) -> tuple[list[str], int]:
    L.seed_everything(1, verbose=False)
    inputs = torch.randn(32, WIDTH)
    module, ordered = kind(), loader(batch_size, inputs[inputs[:, 0].argsort()])
    texts = texts_of(trainer(ranks, **settings).fit, module, ordered)
    return [text for text in texts if TOLD in text], len(module.seen)


STAGES = {"pipeline_parallel_size": 2}
ZBV = {**STAGES, "schedule": "ZBVZeroBubble"}
SCHEDULES = [pytest.param(STAGES, id="1F1B"), pytest.param(ZBV, id="ZBV", marks=pytest.mark.long)]


Kind = Callable[[], Module]
Case = tuple[Kind, int]
"""A module and its batch size, of 4 microbatches."""


def fit_each(cases: list[Case], settings: dict[str, Any], ranks: int = 2) -> list[tuple[list[str], int]]:
    return [fit(kind, settings, batch_size, ranks) for kind, batch_size in cases]


def reports(cases: list[Case], settings: dict[str, Any], ranks: int = 2) -> dict[Case, list[str]]:
    """What all ranks report of each."""
    found = run_ranks(fit_each, ranks, cases, settings, ranks, elastic=True, timeout_s=200)
    return {case: [text for rank in found for text in rank[place][0]] for place, case in enumerate(cases)}


NO_MEAN = "The training loss is no mean"


@pytest.mark.parametrize("settings", SCHEDULES)
def test_what_compares_samples_is_reported_once(settings: dict[str, Any]) -> None:
    undropped = partial(UndroppedMean, dice)
    kinds: list[Kind] = [partial(Module, contrastive), undropped, partial(Module, root_mean_square), Together]
    # wherever samples lie in what blocks get
    comparing: list[Case] = [(kind, 16) for kind in (*kinds, partial(TimeFirst, contrastive), CentredFrames)]
    comparing += [(undropped, 4), (partial(Views, contrastive), 4)]  # of one sample for each microbatch, and two rows
    *losses, logs = reports([*comparing, (CodesInBlock, 16)], settings).values()
    assert [[NO_MEAN in text for text in texts] for texts in losses] == [[True]] * len(comparing)
    assert ["self.log('number', …) is no mean" in text for text in logs] == [True]


@pytest.mark.parametrize("settings", SCHEDULES)
def test_means_over_samples_are_not(settings: dict[str, Any]) -> None:
    cases: list[Case] = [(kind, 16) for kind in (Module, InOrder, Normalized, MeanInBlock, CountsInBlock)]
    cases += [(kind, 16) for kind in (Kendall, Recurrent, Views, Dropping)]
    cases += [(kind, 4) for kind in (BothWays, TimeFirst, Shared)]  # of one sample for each microbatch
    ranks = run_ranks(fit_each, 2, cases, settings, elastic=True, timeout_s=200)
    assert [texts for rank in ranks for texts, _ in rank] == [[]] * (2 * len(cases))
    assert 2 * 4 in [rank[0][1] for rank in ranks]  # runs of the check leave nothing


class Counted(Module):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with open(os.environ["COUNTED"], "a") as file:
            file.write("*")
        return contrastive(x, y)


def test_without_rehearsals_a_step_runs_once_for_each_microbatch_and_nothing_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTED", str(tmp_path / "runs"))
    for rehearse, says, runs in ((True, 1, 8 + 4), (False, 0, 8)):
        found = run_ranks(fit, 2, Counted, {**STAGES, "rehearse": rehearse}, elastic=True, timeout_s=60)
        assert sum(len(texts) for texts, _ in found) == says
        assert len((tmp_path / "runs").read_text()) == runs
        (tmp_path / "runs").unlink()


class TimeFirst(UndroppedMean):
    """Its blocks get and give samples in dim 1, and a mask that all share."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].unflatten(1, (4, 2)).repeat(1, 1, 4).transpose(0, 1)
        mask = x.new_ones(1, 1, WIDTH) / 2
        for block in self.blocks:
            x = block(x) * mask
        return self.loss(self.head(x.mean(0)), batch[1])


class Frames(UndroppedMean):
    """Its blocks get three rows for each sample, one after the other."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].unsqueeze(1) * torch.arange(1, 4).view(3, 1)
        rows = x.flatten(0, 1)
        for block in self.blocks:
            rows = block(rows)
        return self.loss(self.head(rows).unflatten(0, (-1, 3)).mean(1), batch[1])


class Views(UndroppedMean):
    """Its blocks get all samples, and then another view of all of them."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.through(torch.cat([batch[0], batch[0].flip(1)]))
        one, other = self.head(x).chunk(2)
        return self.loss(one * other, batch[1])


class CentredRows(Undropped):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - x.mean((0, 1) if x.ndim == 3 else 0)


class CentredFrames(Frames):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = CentredRows()


class Path(Undropped):
    """Drops a sample's whole path, so seldom that two runs are mostly equal."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * torch.empty(len(x), 1).bernoulli_(0.9) / 0.9


class WithShared(Undropped):
    """Hands on a table that all samples share, and the mean of what blocks have added."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, WIDTH))

    def forward(self, x: Tensor, table: Tensor | None, total: Tensor) -> Any:
        table = self.table if table is None else table
        return super().forward(x) + table.repeat(len(x), 1), table, total + x.square().mean()


class Shared(UndroppedMean):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(WithShared() for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, table, total = batch[0], None, torch.zeros(1)
        for block in self.blocks:
            x, table, total = block(x, table, total)
        if self.trainer.strategy.layout.data_parallel_size > 1:  # type: ignore[attr-defined]
            self.all_gather(x.detach())
        return self.loss(self.head(x), batch[1]) + 0.1 * total[0]


class ReturnsMeans(UndroppedMean):
    """Of each class, of as many as a microbatch has samples."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "means": batch[0].mean(0)}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        assert outputs["means"].shape == (WIDTH,)


def test_means_of_as_many_classes_as_samples_are_refused() -> None:
    with pytest.raises(RanksFailed, match=rf"\['means'\].* for each, of {WIDTH} samples, and as long"):
        run_ranks(fit, 2, ReturnsMeans, STAGES, 4 * WIDTH, elastic=True)


def test_steps_that_call_data_ranks_are_not_joined_and_run_equally_often_whatever_each_finds() -> None:
    assert not any(reports([(Shared, 4), (Padded, 16)], {**STAGES, "data_parallel_size": 2}, 4).values())


def test_samples_are_compared_where_forwards_call_data_ranks() -> None:
    settings = {**STAGES, "data_parallel_size": 2, "reshard_after_forward": True}
    kinds: list[Kind] = [Module, partial(Module, contrastive), Together]
    nothing, *found = reports([(kind, 16) for kind in kinds], settings, 4).values()
    assert nothing == []
    assert [[NO_MEAN in text for text in texts] for texts in found] == [[True]] * 2


@pytest.mark.parametrize(
    "batch_size", [pytest.param(16, marks=pytest.mark.long), 4 * WIDTH]
)  # microbatches of the second have as many samples as features
def test_whether_a_loss_is_a_sum_is_measured(batch_size: int) -> None:
    expected = {scaled: ["a sum"], divided: [], correlated: ["no mean"]}
    found = reports([(partial(UndroppedMean, loss), batch_size) for loss in expected], STAGES).values()
    says = "The training loss is (a sum|no mean) over samples"
    assert [re.findall(says, " ".join(texts)) for texts in found] == [*expected.values()]


class Weighted(UndroppedMean):
    """Logs one name twice, of which the last counts, and forgets to say how much a mean counts."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        counted = y.where(y < 4, -100)
        loss = F.cross_entropy(x, counted, ignore_index=-100)
        self.log("twice", loss + 1, batch_size=int((y < 4).sum()))
        self.log("twice", loss, batch_size=int((y < 4).sum()))
        self.log("!forgotten", loss)
        keeps = next(each for each in self.trainer.callbacks if isinstance(each, Keeps))  # type: ignore[attr-defined]
        keeps.kept += y.tolist()
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int) -> None:
        if dataloader_idx:
            self.log("!second", math.sqrt(batch[0].square().mean()))


class Keeps(L.Callback):
    """What a step has appended to its list, and logged."""

    def __init__(self) -> None:
        self.kept: list[float] = []
        self.logged: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.logged.append(float(trainer.callback_metrics["twice"]))


NO_MEANS = re.compile(r"self.log\('(.*?)', …\) is (?:a sum|no \w+) over")


def logged(**settings: Any) -> tuple[list[float], list[str], int]:
    L.seed_everything(3, verbose=False)
    data: Any = DataLoader(TensorDataset(torch.randn(32, WIDTH), torch.arange(0, 96, 3) % WIDTH), batch_size=16)
    keeps = Keeps()
    if settings:
        run = trainer(callbacks=[keeps], loss_weight=lambda batch: (batch[1] < 4).sum(), **settings)
    else:
        run = L.Trainer(max_epochs=1, devices=1, callbacks=[keeps], **QUIET)
    texts = texts_of(run.fit, Weighted(), data, [data, data])
    return keeps.logged, NO_MEANS.findall(" ".join(texts)), len(keeps.kept)


def test_logs_by_one_name_are_combined_by_their_order_and_weights_that_are_forgotten_are_told_of() -> None:
    (ours, told, kept), _ = run_ranks(logged, 2, elastic=True, **STAGES)
    [(plain, _, _)] = run_ranks(logged, 1, elastic=True)
    assert ours == pytest.approx(plain, rel=1e-5)
    assert told == ["!forgotten", "!second"]
    assert kept == 32, "runs of the check leave nothing in callbacks"


def logs_told_of(settings: dict[str, Any], batch_size: int = 16) -> dict[str, list[str]]:
    L.seed_everything(1, verbose=False)
    data, run, module = loader(batch_size), trainer(**settings), Logs()
    texts = {"test": texts_of(run.test, module, data), "fit": texts_of(run.fit, module, data, data)}
    return {method: NO_MEANS.findall(" ".join(said)) for method, said in texts.items()}


class Residual(UndroppedMean):
    """Later stages add what they don't know of earlier ones to the batch, which has more samples in a joined run."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[int] = []

    def test_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        errors = x.square().mean(1)
        self.log_dict({"mean": errors.mean(), "!root": errors.mean().sqrt()})
        return {"errors": errors, "number": len(errors)}

    def on_test_batch_end(self, outputs: Any, *_: Any) -> None:
        self.counted.append(outputs["number"])


def residual_told_of() -> tuple[list[str], list[int]]:
    L.seed_everything(1, verbose=False)
    samples = torch.randn(14, WIDTH) * torch.linspace(0.1, 4, 14)[:, None]  # of other microbatches, other errors
    module, data = Residual(), DataLoader(TensorDataset(samples), batch_size=8)
    texts = texts_of(trainer(**STAGES, microbatches=2).test, module, data, verbose=False)
    return NO_MEANS.findall(" ".join(texts)), module.counted


def test_what_is_found_by_joining_microbatches_is_found_where_outputs_of_blocks_are_added_up() -> None:
    assert run_ranks(residual_told_of, 2, elastic=True)[0] == (["!root"], [8, 6])


ODD_LOGS = ["!F1", "!batches", "!codes", "!least mean", "!metric RMSE", "!metric sum"]
ODD_LOGS += ["!perplexity", "!root", "!samples", "!size"]


WHOLE = {**STAGES, "microbatches": 1}


@pytest.mark.parametrize(
    ("settings", "batch_size"),
    [
        pytest.param(STAGES, 16, id="1F1B"),
        pytest.param(STAGES, 4, id="one sample each", marks=pytest.mark.long),
        pytest.param(ZBV, 16, id="ZBV", marks=pytest.mark.long),
        pytest.param(WHOLE, 16, id="whole", marks=pytest.mark.long),
    ],
)
def test_logs_that_are_no_means_are_told_of_once(settings: dict[str, Any], batch_size: int) -> None:
    told = run_ranks(logs_told_of, 2, settings, batch_size, elastic=True)[0]
    other = [*ODD_LOGS] if "microbatches" not in settings else []
    if batch_size == 4 and other:
        other.remove("!F1")  # is 0 of the first two samples, and of both
    assert {method: sorted(names) for method, names in told.items()} == {"test": other, "fit": other}


class Padded(UndroppedMean):
    """On one data rank a mean over numbers that vary, and on the other over equal ones; ranks call each other."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.all_gather(x.detach())
        return F.cross_entropy(x, y.where(y < (8 if self.global_rank % 2 else 4), -100), ignore_index=-100)


def three_batches() -> list[Tensor]:
    return [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)) for number in range(3)]


class AttendsTimeFirst(UndroppedMean):
    """Its blocks attend over the first dimension, as ``nn.MultiheadAttention`` does unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.0) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, x.roll(1, 1), x.roll(2, 1)])
        x = self.through(x)
        return self.head(x[0])  # type: ignore[no-any-return]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()  # type: ignore[no-any-return]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)  # type: ignore[no-any-return]


def test_rows_of_networks_that_have_the_time_first_are_joined_from_microbatches_of_one_sample() -> None:
    assert_trains_alike(AttendsTimeFirst, three_batches, ["pp2"], microbatches=8)
