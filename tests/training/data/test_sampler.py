"""The user's DataLoader, whatever its kind, reads one data rank's part and stays itself in everything else."""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource, _request_dataloader
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _update_dataloader
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.data.loader import drop_repeated, shard_dataloader, sharded_sampler


def shard(loader, rank=0, size=2, seed=5, train=True, **options):
    return shard_dataloader(loader, data_rank=rank, data_size=size, seed=seed, train=train, **options)


def read(loader):
    return [batch.tolist() for batch in loader]


def read_ranks(make, size=2, **options):
    return [read(shard(make(), rank, size, **options)) for rank in range(size)]


def test_shuffled_batches_of_the_ranks_are_the_batch_of_one():
    def steps(size, batch_size):
        ranks = read_ranks(lambda: DataLoader(range(24), batch_size=batch_size, shuffle=True), size)
        return [sorted(chain.from_iterable(parts)) for parts in zip(*ranks, strict=True)]

    assert steps(1, 8) == steps(2, 4) == steps(4, 2)
    assert steps(1, 8) != [[*range(i, i + 8)] for i in range(0, 24, 8)]


def test_the_users_generator_is_the_seed():
    def make(seed):
        return DataLoader(range(24), shuffle=True, generator=torch.Generator().manual_seed(seed))

    assert read(shard(make(1), seed=5)) == read(shard(make(1), seed=6)) != read(shard(make(2), seed=5))
    loader = make(1)
    assert read(shard(loader)) == read(shard(loader))


@pytest.mark.ranks
def test_everything_else_of_a_loader_is_kept():
    def collate(samples):
        return torch.tensor(samples) * 10

    loader = DataLoader(range(10), batch_size=4, drop_last=True, collate_fn=collate, num_workers=1, prefetch_factor=3)
    sharded = shard(loader)
    for name in ("dataset", "batch_size", "drop_last", "collate_fn", "num_workers", "prefetch_factor"):
        assert getattr(sharded, name) == getattr(loader, name)
    assert read(sharded) == [[0, 20, 40, 60]]
    assert len(sharded) == 1
    assert read(loader) == [[0, 10, 20, 30], [40, 50, 60, 70]]


class Positional(DataLoader):
    """A user's class whose arguments aren't DataLoader's."""

    def __init__(self, count, *args, label="", **kwargs):
        self.count, self.label = count, label
        super().__init__(range(count), *args, **kwargs)


def from_hook(make):
    """A loader as Lightning gets it from a ``train_dataloader`` method, its arguments recorded."""
    source = _DataLoaderSource(None, "train_dataloader")
    source.dataloader = make
    return _request_dataloader(source)


@pytest.mark.parametrize("get", [lambda make: make(), from_hook])
def test_a_subclass_stays_of_its_class_and_reads_its_part(get):
    sharded = shard(get(lambda: Positional(8, batch_size=2, label="a")))
    assert (type(sharded), sharded.count, sharded.label) == (Positional, 8, "a")
    assert read(sharded) == [[0, 2], [4, 6]]
    ranks = read_ranks(lambda: get(lambda: DataLoader(range(6), batch_sampler=OwnBatches([1, 2, 3], secret=1))))
    assert ranks == [[[0], [3, 4, 5]], [[1, 2], [0]]]


class OwnBatches:
    """A batch sampler that is no subclass of torch's and takes what it likes."""

    def __init__(self, lengths, *, secret):
        self.lengths, self.secret = lengths, secret

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        first = 0
        for length in self.lengths:
            yield list(range(first, first + length))
            first += length


class ShuffledBatches(BatchSampler):
    def __iter__(self):
        batches = list(super().__iter__())
        random.shuffle(batches)
        yield from batches


def test_a_batch_sampler_that_shuffles_does_so_alike_on_all_ranks():
    def make():
        return from_hook(
            lambda: DataLoader(range(12), batch_sampler=ShuffledBatches(RandomSampler(range(12)), 2, False))
        )

    random.seed(1), torch.manual_seed(1)
    first = read(shard(make(), 0))
    random.seed(2), torch.manual_seed(2)
    second = read(shard(make(), 1))
    assert sorted(index for batch in first + second for index in batch) == list(range(12))


def test_the_epoch_reaches_every_kind():
    """By the two paths that Lightning takes: ``loader.sampler`` and ``loader.batch_sampler.sampler``."""
    for loader in (
        DataLoader(range(30), shuffle=True),
        DataLoader(range(30), batch_sampler=BatchSampler(RandomSampler(range(30)), 1, False)),
        DataLoader(range(30), batch_sampler=ShuffledBatches(RandomSampler(range(30)), 1, False)),
        DataLoader(torch.arange(30), batch_size=None, shuffle=True),
    ):
        sharded = shard(loader)
        first = read(sharded)
        for sampler in {
            id(s): s for s in (sharded.sampler, getattr(sharded.batch_sampler, "sampler", None)) if s
        }.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(1)
        assert sharded_sampler(sharded).epoch == 1
        assert read(sharded) != first


def test_a_distributed_sampler_of_torch_is_dealt_by_the_data_ranks_instead():
    def make():
        return DataLoader(range(8), sampler=DistributedSampler(range(8), num_replicas=8, rank=3, shuffle=False))

    assert read_ranks(make) == [[[0], [2], [4], [6]], [[1], [3], [5], [7]]]


class OwnDistributed(DistributedSampler):
    pass


def test_a_distributed_sampler_of_the_users_deals_by_data_rank_or_is_refused():
    def make(size, rank):
        return DataLoader(range(8), batch_size=2, sampler=OwnDistributed(range(8), size, rank, shuffle=False))

    assert read(shard(make(2, 1), 1, 2)) == [[1, 3], [5, 7]]
    with pytest.raises(
        ConfigurationError, match="OwnDistributed distributes samples to rank 3 of 8, but this process is data rank 1"
    ):
        shard(make(8, 3), 1, 2)


class Stateful(DataLoader):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_loader_with_a_state_of_its_own_is_left_alone_where_it_deals_and_else_refused():
    loader = Stateful(range(8))
    assert shard(loader, size=1) is loader
    with pytest.raises(ConfigurationError, match=r"Stateful has a state_dict of its own.*each would read all samples"):
        shard(loader)
    dealt = Stateful(range(8), sampler=DistributedSampler(range(8), 2, 1))
    assert shard(dealt, rank=1) is dealt
    with pytest.raises(ConfigurationError):
        shard(dealt, rank=0)
    stream = Stateful(Stream())
    assert shard(stream) is stream


class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(4):
            yield torch.rand(()).item() + random.random() + np.random.rand()


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.ranks)])
def test_a_stream_is_not_dealt_but_its_draws_are_those_of_its_data_rank(workers):
    def draws(rank, noise):
        torch.manual_seed(noise), random.seed(noise), np.random.seed(noise)
        return read(shard(DataLoader(Stream(), num_workers=workers), rank))

    assert draws(0, 1) == draws(0, 2) != draws(1, 1)


class Augmented(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index + (torch.rand(()).item() + random.random() + np.random.rand()) / 3


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.ranks, pytest.mark.long])])
@pytest.mark.parametrize("seed_workers", ["0", "1"])
def test_random_augmentation_is_one_for_all_ranks_that_read_a_batch(workers, seed_workers, monkeypatch):
    """These differ in their global ranks, and in what their stages have drawn before."""
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn

    monkeypatch.setenv("PL_SEED_WORKERS", seed_workers)

    def batches(data_rank, global_rank, train=True):
        torch.manual_seed(global_rank), random.seed(global_rank), np.random.seed(global_rank)
        loader = shard(DataLoader(Augmented(), batch_size=4, num_workers=workers), data_rank, train=train)
        _auto_add_worker_init_fn(loader, global_rank)
        return read(loader)

    def noise(batches):
        return [round(value % 1, 6) for batch in batches for value in batch]

    assert batches(0, 1) == batches(0, 2)
    assert noise(batches(0, 1)) != noise(batches(1, 1))
    if workers == 0:
        assert noise(batches(0, 1)) != noise(batches(0, 1, train=False))
        assert len(set(noise(batches(0, 1)))) == 8


@pytest.mark.parametrize("kind", ["plain", "own batches"])
def test_predictions_are_dealt_under_lightnings_record_of_their_indices(kind):
    def make():
        if kind == "plain":
            return DataLoader(range(7), batch_size=2, drop_last=True)
        return from_hook(lambda: DataLoader(range(7), batch_sampler=ShuffledBatches(range(7), 2, False)))

    ranks = []
    for rank in range(2):
        wrapped = _update_dataloader(make(), make().sampler if kind == "plain" else range(7), RunningStage.PREDICTING)
        sharded = shard(wrapped, rank, train=False)
        assert isinstance(sharded.batch_sampler, _IndexBatchSamplerWrapper)
        ranks.append(read(sharded))
        assert sharded.batch_sampler.seen_batch_indices == ranks[-1]
    assert len(ranks[0]) == len(ranks[1])
    assert sorted(index for part in ranks for batch in part for index in batch) == [*range(7)]


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 12, 19])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_each_sample_is_predicted_once(samples, batch_size):
    def make():
        loader = DataLoader(range(samples), batch_size=batch_size)
        return _update_dataloader(loader, loader.sampler, RunningStage.PREDICTING)

    loaders = [shard(make(), rank, 3, train=False) for rank in range(3)]
    ranks = [read(loader) for loader in loaders]
    assert [len(part) for part in ranks] == [len(loader) for loader in loaders]  # no rank waits for another
    for part, loader in zip(ranks, loaders):
        drop_repeated(part, loader)
    assert sorted(index for part in ranks for batch in part for index in batch) == [*range(samples)]
