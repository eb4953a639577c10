"""Random numbers are others in each epoch, pass over a loader, and evaluation, as in one process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from lightning_shard.sharding import full_tensor
from tests.parity import trainer_of

SAMPLES = 8


class Numbered(Dataset[Tensor]):
    """Samples are their numbers, with noise below 1."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return index + torch.rand(1)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        numbers = [*range(SAMPLES)]
        random.shuffle(numbers)
        for number in numbers:
            yield number + torch.rand(1)


class Own(DistributedSampler[Any]):
    """One of a user's own, which deals already; its order is the same in each epoch."""


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.drop = nn.Dropout()
        self.seen: list[list[Any]] = []
        self.beside: list[list[Any]] = [[]]
        self.noise: list[list[float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if isinstance(batch, dict):
            self.beside[-1].append([*batch.values()][-1].flatten().tolist())
            batch = batch["short"]
        if batch_idx == 0:
            self.seen.append([])
        self.seen[-1].append(batch.flatten().tolist())
        return self.linear(batch).square().mean()

    def on_validation_epoch_start(self) -> None:
        self.noise.append([])

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.noise[-1].append(float(torch.rand(1)))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.drop.train()
        return self.drop(torch.ones(64))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def trainer(**options: Any) -> L.Trainer:
    return trainer_of({}, 1, **{"max_epochs": 3, **options})


def weight(module: Module) -> Tensor:
    return full_tensor(module.linear.weight.detach())


def own() -> DataLoader[Tensor]:
    numbered = Numbered()
    return DataLoader(numbered, batch_size=2, sampler=Own(numbered, 1, 0, shuffle=False))


@pytest.mark.parametrize("make", [lambda: DataLoader(Stream(), batch_size=2), own], ids=["stream", "own sampler"])
def test_epochs_of_loaders_without_a_sampler_of_ours_differ(make: Any) -> None:
    runs = []
    for _ in range(2):
        L.seed_everything(3, verbose=False)
        module = Module()
        trainer().fit(module, make())
        runs.append(module.seen)
    first, second, third = runs[0]
    assert first != second != third != first
    assert runs[0] == runs[1]  # which the seed decides


def both() -> CombinedLoader:
    loaders = {"long": DataLoader(Numbered(24), batch_size=2), "short": DataLoader(Numbered(), 2, shuffle=True)}
    return CombinedLoader(loaders, "max_size_cycle")


def test_passes_of_a_shorter_loader_differ_and_a_resume_goes_on_in_them(tmp_path: Path) -> None:
    L.seed_everything(3, verbose=False)
    module = Module()
    trainer(max_epochs=1).fit(module, both())
    [batches] = module.seen
    passes = [batches[:4], batches[4:8], batches[8:]]
    numbers = [[int(value) for batch in each for value in batch] for each in passes]
    assert [sorted(each) for each in numbers] == [[*range(SAMPLES)]] * 3
    assert numbers[0] != numbers[1] != numbers[2]
    assert len({value for each in passes for batch in each for value in batch}) == 3 * SAMPLES

    for done in (5, 8):  # within the second pass, and at its end
        L.seed_everything(3, verbose=False)
        stopped = trainer(max_steps=done)
        stopped.fit(Module(), both())
        stopped.save_checkpoint(tmp_path / f"{done}")
        resumed = Module()
        resumed.seen.append([])
        trainer(max_epochs=1).fit(resumed, both(), ckpt_path=tmp_path / f"{done}")
        assert [batch for each in resumed.seen for batch in each] == batches[done:]


def test_evaluations_draw_other_numbers_each_time() -> None:
    runs = []
    for _ in range(2):
        L.seed_everything(3, verbose=False)
        module, run, loader = Module(), trainer(), DataLoader(Numbered(), batch_size=4)
        run.fit(module, loader, loader)
        assert all(one != other for one, other in zip(module.noise, module.noise[1:]))
        found = [run.predict(module, loader) for _ in range(2)]
        assert not torch.equal(found[0][0], found[1][0])  # type: ignore[index, arg-type]
        runs.append((module.noise, found))
    assert runs[0][0] == runs[1][0]
    assert torch.equal(runs[0][1][1][0], runs[1][1][1][0])  # type: ignore[index, arg-type]


def test_loaders_beside_each_other_and_fits_after_each_other_draw_other_numbers() -> None:
    L.seed_everything(3, verbose=False)
    members = []
    for _ in range(2):
        module = Module()
        loaders = [DataLoader(Numbered(), batch_size=2, shuffle=True) for _ in range(2)]
        trainer(max_epochs=1).fit(module, {"short": loaders[0], "other": loaders[1]})
        members.append(module)
    one, other = members
    assert not torch.equal(weight(one), weight(other))
    assert one.seen != other.seen
    for module in members:
        assert module.seen != module.beside
