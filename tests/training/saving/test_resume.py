"""A checkpoint of any layout goes on in any other: same bytes, same loss curve, every sample once.

In another precision its optimizer's state goes on in that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_shard import checkpoint
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import GLOBAL_BATCH, LAYOUTS, Model, combine, layout, loader, train, trainer_of, world
from tests.training.habits.harness import Net

SAVED, TRAINED = 2, 4  # the checkpoint is of the second step, in the middle of an epoch of six; the curve has four


def save(name: str, folder: str) -> Any:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1, save_last=True)
    settings = {"enable_checkpointing": True}
    return train("gpt", LAYOUTS[name], steps=SAVED, shuffle=True, callbacks=[keep], trainer=settings)


class Restored(L.Callback):
    """The state as it was loaded, whole, before the first step: this stage's parameters and optimizer tensors."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = {name: full_tensor(parameter).clone() for name, parameter in module.named_parameters()}
        names = {parameter: name for name, parameter in module.named_parameters()}
        for parameter, entries in trainer.optimizers[0].state.items():
            for key, value in entries.items():
                self.state[f"0/{names[parameter]}/{key}"] = full_tensor(value).clone()


def load_all(name: str, folders: list[str]) -> list[tuple[dict[str, bytes], list[float]]]:
    loaded = []
    for folder in folders:
        restored = Restored()
        seen = train(
            "gpt",
            LAYOUTS[name],
            steps=TRAINED,
            shuffle=True,
            callbacks=[restored],
            resume=str(Path(folder, "last.ckpt")),
        )
        loaded.append(({key: _bytes(value) for key, value in restored.state.items()}, seen.losses))
    return loaded


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The folder of a layout's checkpoint, which is saved when it is first asked for."""

    @cache
    def folder(name: str) -> str:
        path = str(tmp_path_factory.mktemp("saved"))
        run_ranks(save, world(LAYOUTS[name]), name, path, elastic=True)
        return path

    return folder


@pytest.fixture(scope="module")
def curve() -> list[float]:
    """The uninterrupted run's losses; on two data ranks, since a shuffled order is drawn by the strategy."""
    sizes = layout(data=2)
    seen = run_ranks(train, 2, "gpt", sizes, steps=TRAINED, shuffle=True, elastic=True)
    return combine(seen, sizes).losses


NAMES = list(LAYOUTS)
SHORT = {"pp2×dp2": ["dp2×tp2"]}
"""What is resumed outside of long runs: on all axes but one, from all axes but one."""
NEAR = {name: [NAMES[(number + 3) % len(NAMES)]] for number, name in enumerate(NAMES)}
"""Another one for each, and each for another one: the whole table is long. In several runs, so that one of eight ranks
is far from its limit of a minute on a slow machine."""
REST = {name: [other for other in NAMES if other not in NEAR[name]] for name in NAMES}
PAIRS = [
    *SHORT.items(),
    *(pytest.param(name, NEAR[name], marks=pytest.mark.long) for name in NAMES),
    *(pytest.param(name, part, marks=pytest.mark.long) for name in NAMES for part in (REST[name][:3], REST[name][3:])),
]


@pytest.mark.parametrize(("name", "sources"), PAIRS)
def test_any_layout_goes_on_from_any_other(
    name: str, sources: list[str], saved: Callable[[str], str], curve: list[float]
) -> None:
    per_rank = run_ranks(load_all, world(LAYOUTS[name]), name, [saved(source) for source in sources], elastic=True)
    for i, source in enumerate(sources):
        path = Path(saved(source), "last.ckpt")
        assert checkpoint.verify(path).ok
        stored = checkpoint.read(path)
        expected = {key: _bytes(value.full()) for part in (stored, stored.optimizer) for key, value in part.items()}
        whole: dict[str, bytes] = {}
        for loaded in per_rank:
            state, losses = loaded[i]
            assert all(whole.setdefault(key, value) == value for key, value in state.items()), source
            assert losses == pytest.approx(curve[SAVED:], rel=2e-6), source
        assert whole == expected, source


# -- the place in the data


class Samples(Model):
    """Notes which samples this rank trains on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen += (batch["x"][:, 0] + 64 * batch["x"][:, 1] + 64**2 * batch["x"][:, 2]).tolist()
        return super().training_step(batch, batch_idx)


def read(
    sizes: dict[str, int], folder: str, steps: int, resume: str | None, shuffle: bool, batch: int
) -> tuple[int, list[int]]:
    L.seed_everything(3)
    keep = ModelCheckpoint(folder, filename=f"{steps}", every_n_train_steps=1, save_top_k=-1)
    module = Samples()
    trainer = trainer_of(
        sizes, world(sizes), max_steps=steps, max_epochs=1, callbacks=[keep], enable_checkpointing=True
    )
    trainer.fit(module, loader(batch, shuffle=shuffle), ckpt_path=resume)
    return trainer.strategy.layout.data_rank, module.seen


@pytest.mark.parametrize("shuffle", [pytest.param(False, marks=pytest.mark.long), True], ids=["in order", "shuffled"])
def test_every_sample_is_seen_once_on_4_then_2_then_1_data_ranks(shuffle: bool, tmp_path: Path) -> None:
    # 96 samples in one epoch: 2 × 16, then 3 × 8 (two stages), then 10 × 4
    parts = [(layout(data=4), 2, 4), (layout(pipeline=2, data=2), 5, 4), (layout(), 100, 4)]
    seen: list[int] = []
    resume = None
    for sizes, steps, batch in parts:
        folder = str(tmp_path / str(steps))
        ranks = run_ranks(read, world(sizes), sizes, folder, steps, resume, shuffle, batch, elastic=True)
        by_data_rank = dict(ranks)
        for data_rank, samples in ranks:
            assert samples == by_data_rank[data_rank]  # all ranks of a pipeline read the same
        seen += [sample for samples in zip(*by_data_rank.values()) for sample in samples]
        resume = str(Path(folder, f"{steps}.ckpt"))
    data = loader(1).dataset
    everything = [int(x[0] + 64 * x[1] + 64**2 * x[2]) for x in (data[i]["x"] for i in range(len(data)))]
    assert len(seen) == len(everything)
    assert Counter(seen) == Counter(everything)
    assert (seen == everything) is not shuffle


def read_and_save(
    sizes: dict[str, int], path: str, steps: int, resume: str | None, batch: int
) -> tuple[int, list[int]]:
    """As a script does: fit, then save."""
    L.seed_everything(3)
    module = Samples()
    trainer = trainer_of(sizes, world(sizes), max_steps=steps)
    trainer.fit(module, loader(batch, shuffle=True, samples=80), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return trainer.strategy.layout.data_rank, module.seen


def test_what_is_saved_after_a_fit_goes_on_where_it_was(tmp_path: Path) -> None:
    # 80 samples in each epoch: 2 × 16, then 6 × 8 to its end, then 5 × 16 and 1 × 16 of the next one
    parts = [(layout(data=2), 2, 8), (layout(pipeline=2), 8, 8), (layout(), 14, 16)]
    seen: list[int] = []
    resume = None
    for sizes, steps, batch in parts:
        path = str(tmp_path / str(steps))
        ranks = run_ranks(read_and_save, world(sizes), sizes, path, steps, resume, batch, elastic=True)
        by_data_rank = dict(ranks)
        seen += [sample for samples in zip(*by_data_rank.values()) for sample in samples]
        resume = path
    first, second, third = seen[:80], seen[80:160], seen[160:]
    assert Counter(first) == Counter(second) == Counter(set(first))
    assert len(third) == GLOBAL_BATCH
    assert first != second


AFTER = {"32-true": torch.float32, "bf16-true": torch.bfloat16}


class Module(L.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.kind = Net(), optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch.to(self.net.embed.weight.dtype)) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.kind == "AdamW":
            return torch.optim.AdamW(self.parameters(), lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(sizes: dict[str, int], folder: Path) -> dict[str, tuple[set[torch.dtype], int]]:
    found: dict[str, tuple[set[torch.dtype], int]] = {}
    loader: Any = DataLoader(list(torch.randn(16, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)
    for optimizer in ("AdamW", "SGD"):
        path = str(folder / optimizer)
        for first, then in (("32-true", "bf16-true"), ("bf16-true", "32-true")):
            for precision, steps in ((first, 2), (then, 4)):
                trainer = trainer_of(sizes, max_steps=steps, precision=precision)
                trainer.fit(Module(optimizer), loader, ckpt_path=path if precision == then else None)
                if precision == first:
                    trainer.save_checkpoint(path)
            states = trainer.optimizers[0].state.values()
            dtypes = {
                value.dtype for state in states for value in state.values() if isinstance(value, Tensor) and value.ndim
            }
            found[f"{optimizer} {then}"] = dtypes, trainer.global_step
    return found


@pytest.mark.parametrize(
    "sizes", [layout(pipeline=2), pytest.param(layout(data=2), marks=pytest.mark.long)], ids=["pp2", "dp2"]
)
def test_a_run_goes_on(sizes: dict[str, int], tmp_path: Path) -> None:
    for found in run_ranks(run, 2, sizes, tmp_path, elastic=True):
        assert len(found) == 4
        for name, (dtypes, steps) in found.items():
            assert dtypes == {AFTER[name.split()[1]]}, name
            assert steps == 4
