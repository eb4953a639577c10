"""Kinds of loaders and of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler, default_collate

from tests.training.habits.harness import GLOBAL_BATCH, Habits, Module, Run, Samples

habit = Habits("Loaders and batches")


# -- several


class OfSeveral(Module):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log(f"x{dataloader_idx}", batch["x"].mean(), sync_dist=True, add_dataloader_idx=False)


@habit("several loaders to validate on, as a list and as a dict")
def several_to_validate(run: Run) -> Any:
    by_name = {"a": run.loader(16), "b": run.loader(24)}
    listed = run.fit(OfSeveral(), val=[run.loader(16), run.loader(24)], max_steps=1)
    return listed, run.fit(OfSeveral(), val=by_name, max_steps=1, num_sanity_val_steps=1)


@habit("several loaders to predict on", long=True)
def several_to_predict(run: Run) -> Any:
    found = run.trainer().predict(Module(), [run.loader(16), run.loader(10, batch=4)])
    return [run.in_order([row for batch in of_loader for row in batch]) for of_loader in found]


class Joined(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = [part for part in batch.values() if part is not None]
        return super().training_step({key: torch.cat([part[key] for part in parts]) for key in "xy"}, batch_idx)


def combined(mode: Any, run: Run) -> Any:
    return run.fit(Joined(), CombinedLoader({"a": run.loader(32), "b": run.loader(16)}, mode), max_epochs=2)


@habit("CombinedLoader max_size_cycle, also as a dict of loaders", long=True)
def cycled(run: Run) -> Any:
    return combined("max_size_cycle", run), run.fit(Joined(), {"a": run.loader(32), "b": run.loader(16)})


habit("CombinedLoader min_size", long=True)(partial(combined, "min_size"))
habit("CombinedLoader max_size", long=True)(partial(combined, "max_size"))


# -- their ends


@habit("a last batch that is smaller")
def smaller_last(run: Run) -> Any:
    return run.fit(train=run.loader(28), val=run.loader(12), max_epochs=2)


@habit("drop_last", long=True)
def drop_last(run: Run) -> Any:
    return run.fit(train=run.loader(30, drop_last=True))


@habit("no batch to validate on", long=True)
def none_to_validate(run: Run) -> Any:
    return run.fit(val=run.loader(0))


@habit("batches smaller than microbatches, to train on", refused={"pp2": "BatchError: .*can't be cut into 4"})
def too_small(run: Run) -> Any:
    return run.fit(train=run.loader(8, batch=2))


@habit("batches smaller than microbatches, to evaluate", long=True)
def small_to_validate(run: Run) -> Any:
    return run.fit(val=run.loader(6, batch=2))


# -- other kinds


class Stream(IterableDataset[Any]):
    """This data rank's share of the first so many samples."""

    def __init__(self, run: Run, count: int = 32) -> None:
        self.samples = Samples(40)
        self.places = range(run.data_rank, count, run.data_size)

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in self.places)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.places)


def streamed(run: Run, stream: Any) -> Any:
    return DataLoader(stream, batch_size=GLOBAL_BATCH // run.data_size)


@habit("IterableDataset that deals by data rank, with and without a length")
def stream(run: Run) -> Any:
    sized = run.fit(train=streamed(run, SizedStream(run)), max_epochs=2)
    return sized, run.fit(train=streamed(run, Stream(run)), val=streamed(run, Stream(run, 16)), val_check_interval=2)


@habit("IterableDataset that ends earlier on a data rank: all end there")
def stream_of_unequal_lengths(run: Run) -> Any:
    # a ninth batch's worth of samples comes to rank 0 alone, and a plain process is given none of it
    count = 33 if run.data_size > 1 else 32
    return run.fit(train=streamed(run, Stream(run, count)), max_epochs=2)


@habit(
    "IterableDataset of unequal known lengths",
    refused={"dp2": r"ConfigurationError: .* gives 5 batches on rank 0 and 4"},
)
def stream_of_unequal_known_lengths(run: Run) -> Any:
    return run.fit(train=streamed(run, SizedStream(run, 33 if run.data_size > 1 else 32)))


class Batches:
    """An iterable that is no DataLoader; deals by data rank."""

    def __init__(self, run: Run) -> None:
        samples = Samples()
        self.batches = [
            default_collate([samples[i] for i in range(start + run.data_rank, start + GLOBAL_BATCH, run.data_size)])
            for start in range(0, len(samples), GLOBAL_BATCH)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@habit("an iterable that is no DataLoader", long=True)
def no_loader(run: Run) -> Any:
    return run.fit(train=Batches(run), max_epochs=2)


@habit("shuffle, WeightedRandomSampler: as many batches, in the order of the run's seed", long=True)
def random_order(run: Run) -> Any:
    class Ordered(Module):
        samples: tuple[float, ...] = ()

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.samples += tuple(batch["x"][:, 0].tolist())

    module = Ordered()
    run.fit(module, run.loader(shuffle=True))
    weighted = run.fit(train=run.loader(sampler=WeightedRandomSampler(torch.ones(32), 24)))
    run.weights = {}  # other orders, other weights
    return sorted(run.in_order(module.samples)), weighted["steps"]


@habit("a batch_sampler of one's own", long=True)
def own_batches(run: Run) -> Any:
    size = GLOBAL_BATCH // run.data_size
    # whole batches are dealt, so those of a step are the parts of one process's batch
    batches = [[*range(start, start + size)] for start in range(0, 32, size)]
    return run.fit(train=DataLoader(Samples(), batch_sampler=batches), max_epochs=2)


@habit("workers, persistent ones", long=True)
def workers(run: Run) -> Any:
    options: Any = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
    streams = DataLoader(Stream(run), batch_size=GLOBAL_BATCH // run.data_size, **options)
    return run.fit(train=run.loader(**options), max_epochs=2), run.fit(train=streams, max_epochs=2)


class Data(L.LightningDataModule):
    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.epochs = 0
        self.loaded: Any = None

    def train_dataloader(self) -> Any:
        return self.run.loader()

    def val_dataloader(self) -> Any:
        return self.run.loader(16)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "y": batch["y"] + 1}

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": 1, "of a tensor": torch.arange(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


@habit("LightningDataModule with a state", long=True)
def data_module(run: Run) -> Any:
    path = run.folder / "saved.ckpt"
    trainer = run.trainer()
    trainer.fit(Module(), datamodule=Data(run))
    trainer.save_checkpoint(path)
    data = Data(run)
    return run.fit(datamodule=data, ckpt_path=str(path), max_epochs=2), data.loaded


# -- batches


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor
    name: str = "a"


class Own:
    """No node of a tree, but known how to be moved."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x = x
        self.y = y

    def to(self, device: Any) -> Own:
        return Own(self.x.to(device), self.y.to(device))


class OfPairs(Module):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch if isinstance(batch, (tuple, list)) else (batch.x, batch.y)
        return super().loss({"x": x, "y": y})


def of(kind: Callable[[Tensor, Tensor], Any]) -> Any:
    return lambda samples: kind(*(torch.stack([sample[key] for sample in samples]) for key in "xy"))


@habit("batches of tuples, named tuples, dataclasses", long=True)
def nested(run: Run) -> Any:
    kinds: list[Any] = [lambda x, y: (x, y), Pair, Record]
    return [run.fit(OfPairs(), run.loader(collate_fn=of(kind)), limit_val_batches=0, max_steps=2) for kind in kinds]


@habit("batches with texts, arrays, None and numbers", long=True)
def mixed(run: Run) -> Any:
    def collate(samples: Any) -> Any:
        count = len(samples)
        others = {"names": ["a"] * count, "array": np.arange(count), "none": None, "scale": 2.0}
        return {**default_collate(samples), **others}

    class Checked(Module):
        def loss(self, batch: Any) -> Tensor:
            assert len(batch["names"]) == len(batch["array"]) == len(batch["x"])
            return super().loss(batch) * batch["scale"]

    return run.fit(Checked(), run.loader(collate_fn=collate), run.loader(16, collate_fn=collate))


@habit("batches of a class of one's own", refused={"pp2": "BatchError: A batch without tensors"})
def own_class(run: Run) -> Any:
    return run.fit(OfPairs(), run.loader(collate_fn=of(Own)), limit_val_batches=0)
