"""``assert_trains_alike``: it passes where a layout trains as one process does, and says where it doesn't.

The last ones are of what counts as a difference.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_shard.errors import BatchError, ConfigurationError, LayoutError
from lightning_shard.testing import RanksFailed, TrainsDifferently, assert_trains_alike
from lightning_shard.testing.compare import Moment, first_parting
from lightning_shard.testing.layouts import parse
from tests.paths import ROOT

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attending(nn.Module):
    """The bias of its keys has no effect, so its gradient is nothing but rounding, and Adam's step along it too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])


class Network(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Module(L.LightningModule):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.network = Network(**options)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        loss = self.loss(tokens)
        self.log("train_loss", loss)
        return {"loss": loss, "first": tokens[:, 0]}

    def validation_step(self, tokens: Tensor, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(tokens))
        return tokens[:, 0]

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class CountsSamples(Module):
    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        self.log("samples", float(len(tokens)))
        return super().training_step(tokens, batch_idx)


class SumsLosses(Module):
    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * len(tokens)


class KeepsASum(Module):
    def on_validation_epoch_start(self) -> None:
        self.total = 0.0

    def validation_step(self, tokens: Tensor, batch_idx: int) -> None:
        self.total += float(self.loss(tokens))

    def on_validation_epoch_end(self) -> None:
        self.log("total", self.total)


class NormalisesBatches(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x.transpose(1, 2)).transpose(1, 2))))


class LeavesOutABatch(Module):
    """Its second batch's loss needs no parameter, so there is no gradient."""

    def training_step(self, tokens: Tensor, batch_idx: int) -> Any:
        result = super().training_step(tokens, batch_idx)
        return {**result, "loss": torch.zeros((), requires_grad=True)} if batch_idx == 1 else result


class DropsOut(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x))


class LeavesOutPadding(Module):
    def loss(self, tokens: Tensor) -> Tensor:
        targets = tokens[:, 1:].flatten()
        return F.cross_entropy(self.network(tokens[:, :-1].clamp(min=0)).flatten(0, 1), targets, ignore_index=-100)

    def predict_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        return self.network(tokens.clamp(min=0))


class Crashes(Module):
    def training_step(self, tokens: Tensor, batch_idx: int) -> Tensor:
        raise KeyError("a mistake of the user's")


def batches(samples: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (samples, 9), generator=generator) for _ in range(3)]


def padded_batches() -> Iterator[Tensor]:
    for tokens in batches():
        lengths = torch.arange(2, 10)[:, None]
        yield tokens.masked_fill(torch.arange(9) >= lengths, -100)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def test_it_passes_where_layouts_train_alike() -> None:
    compared = assert_trains_alike(partial(Module, block=Attending), batches, steps=2)
    assert compared == ["pp2", "dp2"]  # nothing says how to split it over tensor ranks


@pytest.mark.long
def test_it_passes_where_layouts_of_all_kinds_train_alike() -> None:
    four: dict[str, Any] = {"pipeline_parallel_size": 2, "data_parallel_size": 2, "schedule": "GPipe"}
    compared = assert_trains_alike(Module, batches, ["tp2", four], tensor_parallel_plan=PLAN, steps=2)
    assert compared == ["tp2", "pp2 x dp2, schedule='GPipe'"]


@pytest.mark.parametrize(
    ("module", "layout", "moment", "first", "says"),
    [
        pytest.param(
            *(CountsSamples, "pp2", "training batch 0", "the log 'samples'"),
            "a count of samples becomes",
            marks=pytest.mark.long,
        ),
        (SumsLosses, "dp2", "training batch 0", "the output 'loss'", "reduction='sum'"),
        pytest.param(
            *(KeepsASum, "pp2", "the end of training", "the log 'total'", "kept once for each part"),
            marks=pytest.mark.long,
        ),
        (
            partial(Module, block=NormalisesBatches),
            "pp2",
            "training batch 0",
            "the output",
            r"blocks\.0\.norm.*GroupNorm",
        ),
    ],
)
def test_it_says_where_they_part_first_and_what_that_means(
    module: Any, layout: str, moment: str, first: str, says: str
) -> None:
    with pytest.raises(TrainsDifferently, match=says) as caught:
        assert_trains_alike(module, batches, layout, steps=1)
    assert (caught.value.layout, caught.value.moment) == (layout, moment)
    assert str(caught.value.first).startswith(first)
    assert caught.value.hint in str(caught.value)


def test_a_log_is_left_out_by_a_pattern_that_fits_one() -> None:
    with pytest.raises(TrainsDifferently, match=r"log 'samples'"):
        assert_trains_alike(CountsSamples, batches, "dp2", steps=1)
    assert assert_trains_alike(CountsSamples, batches, "dp2", steps=1, ignore_logs="sam*s") == ["dp2"]
    with pytest.raises(ConfigurationError, match=r"ignore_logs has 'samp', which fits none of the logs \['samples'"):
        assert_trains_alike(CountsSamples, batches, "dp2", steps=1, ignore_logs=["samples", "samp"])


@pytest.mark.long
def test_it_says_so_of_means_over_unequal_numbers_of_targets() -> None:
    with pytest.raises(TrainsDifferently, match=r"a mean over what counts \(targets of -100"):
        assert_trains_alike(LeavesOutPadding, padded_batches, "dp2", steps=1)


def test_random_numbers_are_refused_by_the_modules_that_draw_them_if_they_have_an_effect() -> None:
    with pytest.raises(ConfigurationError, match=r"drawn by network\.blocks\.0\.dropout \(Dropout\), .* allow_random"):
        assert_trains_alike(partial(Module, block=DropsOut), batches, "pp2")
    assert_trains_alike(partial(Module, block=DropsOut), batches, "dp1", allow_random=True, steps=1)


def test_refusals_are_raised_as_they_are_and_crashes_with_every_account() -> None:
    with pytest.raises(BatchError, match="3 samples, which 2 data ranks can't share"):
        assert_trains_alike(Module, partial(batches, 3), "dp2")
    with pytest.raises(RanksFailed, match="a mistake of the user's") as caught:
        assert_trains_alike(Crashes, batches, "pp2")
    assert "plain Trainer on one process" in caught.value.__notes__[0]


def test_a_step_without_gradients_is_compared_too() -> None:
    assert_trains_alike(LeavesOutABatch, batches, "dp1", steps=2)


class OptimizesItself(Module):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        optimizer.step()


def nothing() -> list[Tensor]:
    return []


def test_a_module_that_returns_no_loss_is_compared_and_one_without_batches_is_not() -> None:
    assert_trains_alike(OptimizesItself, batches, "dp1", steps=1)
    with pytest.raises(ConfigurationError, match="make_batches gave no batch"):
        assert_trains_alike(Module, nothing, "dp1")


def test_functions_that_other_processes_cannot_import_are_refused() -> None:
    def local() -> Module:
        return Module()

    with pytest.raises(ConfigurationError, match=r"make_module .*local.* can't be sent to other processes"):
        assert_trains_alike(local, batches)
    with pytest.raises(ConfigurationError, match="make_batches is a list: pass a function that makes one"):
        assert_trains_alike(Module, batches(4))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"make_batches .*lambda.* can't be sent"):
        assert_trains_alike(Module, lambda: batches(4))
    with pytest.raises(LayoutError, match=r"'pq2'.*pp, dp, cp, tp and ep"):
        assert_trains_alike(Module, batches, "pq2")


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.testing.test_trains_alike import Module, SumsLosses, batches
from lightning_shard.testing import assert_trains_alike

def make_module():
    return Module()

if __name__ == "__main__":
    print(assert_trains_alike(make_module, batches, "dp2"))
"""


@pytest.mark.long  # imports everything twice
def test_it_runs_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "['dp2']\n"), done.stderr


def _differs(difference: float) -> bool:
    def moment(mean: float) -> Moment:
        return Moment(state={"norm.running_mean": torch.tensor([mean]), "norm.running_var": torch.tensor([1.0])})

    return first_parting({"0": moment(2e-3)}, [{"0": moment(2e-3 + difference)}], parse("dp1", {}), 1e-4) is not None


def test_a_running_mean_is_looked_at_beside_its_deviation() -> None:
    assert not _differs(1e-6)
    assert _differs(1e-4)


def test_numbers_of_any_kind_are_compared() -> None:
    """Imaginary parts were left out, and integers of two data ranks an error."""

    def parts(one: torch.Tensor, others: list[torch.Tensor]) -> bool:
        ranks = [{"0": Moment(outputs={"": other})} for other in others]
        return first_parting({"0": Moment(outputs={"": one})}, ranks, parse(f"dp{len(others)}", {}), 1e-4) is not None

    assert parts(torch.tensor([1 + 1j]), [torch.tensor([1 + 2j])])
    assert not parts(torch.tensor([1 + 1j]), [torch.tensor([1 + 1j])])
    assert not parts(torch.arange(4), [torch.arange(2), torch.arange(2, 4)])
    assert parts(torch.arange(4), [torch.arange(2), torch.arange(2)])
    assert not parts(torch.arange(3), [torch.arange(2), torch.tensor([2])])


def test_complex_and_sparse_values_are_compared_and_shown() -> None:
    """A complex number where one process had a float, a conjugated tensor and a sparse one ended the comparison."""

    def parts(one: object, *others: object) -> bool:
        ranks = [{"0": Moment(outputs={"": other}, weight=1.0)} for other in others]
        return first_parting({"0": Moment(outputs={"": one})}, ranks, parse(f"dp{len(others)}", {}), 1e-4) is not None

    waves = torch.tensor([1 + 2j, 3 - 1j])
    assert parts(waves.conj(), waves)
    assert not parts(waves.conj(), torch.tensor([1 - 2j, 3 + 1j]))
    assert not parts(waves.to_sparse(), waves.to_sparse())
    assert parts(waves.to_sparse(), (2 * waves).to_sparse())
    assert parts(1.0, 1.0 + 1j)
    assert not parts(2j, 2j)
    assert parts(2j, 3j)
    assert not parts(2j, 1j, 3j)  # the mean of two data ranks
    assert not parts(waves, waves - 1j, waves + 1j)
