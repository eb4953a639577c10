"""Makes the user's DataLoader read one data rank's part of the data.

Private, used here: torch 2.13's ``DataLoader`` reads ``sampler`` and ``batch_sampler`` from its attributes, which have
no setters; every iteration in this process goes through ``_get_iterator``. Lightning 2.6 can recreate a loader of a
user's own class (``_get_dataloader_init_args_and_kwargs``, ``_reinstantiate_wrapped_cls``), and wraps batch samplers to
know the indices of predictions.

A rank with more batches than others would wait for them forever: so loaders' lengths are compared, and IterableDatasets
end together.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import torch
from lightning.fabric.utilities.data import _reinstantiate_wrapped_cls
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from lightning.pytorch.utilities.data import _get_dataloader_init_args_and_kwargs
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.data.sampler import ShardedSampler, drawing_apart, length_of
from lightning_shard.plugin.steps.randomness import derive

_BY_DATASET = {
    True: "have the dataset give equally many samples on each data rank, or leave out its __len__, and all end with the"
    " first.",
    False: "have all ranks read the same samples, which are dealt to data ranks for you; look for files that some"
    " machines lack, and for a part that is taken by rank.",
}


def check_lengths(dataloader: Any, ranks: Ranks) -> None:
    """Compare the lengths of distributed loaders; a collective call over all ranks, which raise together."""
    lengths = ranks.broadcast(ranks.gather(length_of(dataloader)))
    other = next((rank for rank, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None:
        raise ConfigurationError(
            f"A DataLoader of a {type(dataloader.dataset).__name__} gives {_shown(lengths[0])} on rank 0 and"
            f" {_shown(lengths[other])} on rank {other}, and all ranks have to take the same number of steps:"
            f" {_BY_DATASET[isinstance(dataloader.dataset, IterableDataset)]}"
        )


def _shown(length: int | None) -> str:
    return "an unknown number of batches" if length is None else f"{length} batches"


def end_together(dataloader: Any, ranks: Ranks) -> None:
    """Make all ranks take the same number of batches of their DataLoaders. Taking a batch becomes a collective call."""
    alone = dataloader._get_iterator
    dataloader._get_iterator = lambda: _EndingTogether(alone(), ranks)
    dataloader._ends_together = True


def iterates_collectively(dataloader: Any) -> bool:
    """Whether taking a batch is a collective call over all ranks, so that they must do it at the same time."""
    return getattr(dataloader, "_ends_together", False)


class _EndingTogether:
    """Yields a rank's batches as long as every rank has one."""

    def __init__(self, batches: Iterator[Any], ranks: Ranks) -> None:
        self._batches = batches
        self._ranks = ranks
        self._count = 0

    def __iter__(self) -> _EndingTogether:
        return self

    def __next__(self) -> Any:
        own = list(islice(self._batches, 1))
        [one_has_ended] = self._ranks.any(not own)
        if one_has_ended:
            if own:
                warnings.warn(
                    f"The IterableDataset of another data rank ended after {self._count} batches, but this rank's has"
                    " more. They are dropped, since all ranks must take the same number of steps. To read all samples,"
                    " have the dataset give equally many on each data rank.",
                    stacklevel=2,
                )
            raise StopIteration
        self._count += 1
        return own[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def shard_dataloader(
    dataloader: Any,
    *,
    data_rank: int,
    data_size: int,
    seed: int,
    train: bool,
    batches_trained: Callable[[], int] | None = None,
    epoch: Callable[[], int] = int,
    beside: Sequence[Any] = (),
    ranks: Ranks | None = None,
) -> Any:
    """A copy of the loader that reads data rank ``data_rank``'s part, of ``data_size``, of its own sampler's order.

    Ranks with the same ``data_rank`` read equal batches, random augmentation included. Returned unchanged are objects
    that aren't DataLoaders, and loaders with their own ``state_dict`` that distribute by data rank. A loader over an
    IterableDataset only gets seeds, and ends on all ranks when the first one ends.

    Args:
        seed: The seed of the order and of what the dataset draws; a generator of the user's own takes precedence.
        train: A training loader draws other random numbers than one for evaluation.
        batches_trained: The training loop's count of this epoch's batches, by which a training loader's state, which
            Lightning saves and restores, tells the place in the data.
        epoch: The present epoch, for loaders that keep their own samplers, or have none.
        beside: The earlier ones of loaders that are iterated together, as in one process they draw one after the other.
        ranks: All ranks, whose loaders must have equal lengths; creating the loader is then a collective call.

    Raises:
        ConfigurationError: A sampler or a loader of the user's own distributes by other ranks than the data ranks, or
            can't be distributed; or a loader has another length on another rank.
    """
    # a user's CombinedLoader holds loaders that this function returned in an earlier run
    dataloader = getattr(dataloader, "_before_sharding", dataloader)
    if not isinstance(dataloader, DataLoader):
        return dataloader
    if hasattr(dataloader, "state_dict"):
        _check_dealt_itself(dataloader, data_rank, data_size)
        return dataloader
    own = dataloader.generator
    if isinstance(own, torch.Generator):
        seed, beside = own.initial_seed(), [each for each in beside if getattr(each, "generator", None) is own]
    if beside:
        seed = derive(seed, "loader", len(beside))
    worker_generator = torch.Generator()
    worker_generator.manual_seed(derive(seed, "workers", train, data_rank))

    def deal(order: Any, batch_size: int | None, drop_last: bool = False) -> ShardedSampler:
        return ShardedSampler(
            order,
            data_rank=data_rank,
            data_size=data_size,
            seed=_seed_of(order, seed, apart_from=own),
            batch_size=batch_size,
            drop_last=drop_last,
            purpose="train" if train else "predict" if is_predicting else "evaluate",
            worker_generator=worker_generator,
        )

    sampler = None
    is_predicting = isinstance(dataloader.batch_sampler, _IndexBatchSamplerWrapper)
    if isinstance(dataloader.dataset, IterableDataset) or _is_dealt_already(dataloader, data_rank, data_size):
        sharded = copy.copy(dataloader)
        sharded._iterator = None
    else:
        batches: Any = dataloader.batch_sampler
        if is_predicting:
            batches = batches._batch_sampler
        dealt: Any = None
        if batches is None:
            sampler = deal(_for_one_rank(dataloader.sampler), 1)
        elif type(batches) is BatchSampler:
            sampler = deal(_for_one_rank(batches.sampler), batches.batch_size, batches.drop_last)
            dealt = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        else:
            sampler = dealt = deal(batches, None)
        sharded = _with_samplers(dataloader, sampler, _IndexBatchSamplerWrapper(dealt) if is_predicting else dealt)
        if train and batches_trained is not None:
            _carry_place(sharded, sampler, batches_trained)
    next_pass = _counted_passes(epoch) if sampler is None else sampler.next_pass
    _seed_fetches(sharded, worker_generator, sampler, next_pass, derive(seed, "fetch", train, data_rank))
    if ranks is not None:
        check_lengths(sharded, ranks)
        if isinstance(dataloader.dataset, IterableDataset) and data_size > 1:
            end_together(sharded, ranks)
    sharded._before_sharding = dataloader
    return sharded


def sharded_sampler(dataloader: Any) -> ShardedSampler | None:
    """The sampler that :func:`shard_dataloader` installed in this loader, if it did."""
    if not isinstance(dataloader, DataLoader):
        return None
    return next((sampler for sampler in _samplers(dataloader) if isinstance(sampler, ShardedSampler)), None)


def _samplers(dataloader: Any) -> tuple[Any, Any, Any]:
    batches: Any = dataloader.batch_sampler
    if isinstance(batches, _IndexBatchSamplerWrapper):
        batches = batches._batch_sampler
    return dataloader.sampler, batches, getattr(batches, "sampler", None)


def drop_repeated(predictions: list[Any], dataloader: Any) -> None:
    """Remove the last prediction if its batch was only padding, which repeats a sample of the epoch's start."""
    sampler = sharded_sampler(dataloader)
    if sampler is not None and sampler.ends_with_a_repeated_batch and len(predictions) == len(dataloader):
        predictions.pop()


def _carry_place(dataloader: Any, sampler: ShardedSampler, batches_trained: Callable[[], int]) -> None:
    dataloader.state_dict = lambda: sampler.state_dict(batches_trained())
    dataloader.load_state_dict = sampler.load_state_dict


def _seed_of(order: Any, seed: int, *, apart_from: torch.Generator | None) -> int:
    """The seed of a sampler's own generator, if it isn't the loader's."""
    own = getattr(order, "generator", None)
    return own.initial_seed() if isinstance(own, torch.Generator) and own is not apart_from else seed


def _for_one_rank(sampler: Any) -> Any:
    """Replace torch's DistributedSampler, whose ranks may not be data ranks, by one that yields the global order."""
    if type(sampler) is DistributedSampler:
        return DistributedSampler(
            sampler.dataset, 1, 0, shuffle=sampler.shuffle, seed=sampler.seed, drop_last=sampler.drop_last
        )
    return sampler


def _is_dealt_already(dataloader: DataLoader, data_rank: int, data_size: int) -> bool:
    """Whether the user's own sampler distributes by data rank."""
    batches: Any = dataloader.batch_sampler
    sampler = getattr(batches, "sampler", None) if batches is not None else dataloader.sampler
    has_own_batches = batches is not None and type(batches) is not BatchSampler
    if not isinstance(sampler, DistributedSampler) or (type(sampler) is DistributedSampler and not has_own_batches):
        return False
    if (sampler.num_replicas, sampler.rank) == (data_size, data_rank):
        return True
    raise ConfigurationError(
        f"{type(sampler).__name__} distributes samples to rank {sampler.rank} of {sampler.num_replicas}, but this"
        f" process is data rank {data_rank} of {data_size}: give the DataLoader a plain sampler, which the strategy"
        " distributes, or create this one with num_replicas=strategy.layout.data_parallel_size and"
        " rank=strategy.layout.data_rank."
    )


def _check_dealt_itself(dataloader: Any, data_rank: int, data_size: int) -> None:
    """Check a loader with its own state: another sampler can't be installed, as that state wouldn't cover it."""
    if data_size == 1 or isinstance(dataloader.dataset, IterableDataset):
        return
    for sampler in _samplers(dataloader):
        if (getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)) == (data_size, data_rank):
            return
    raise ConfigurationError(
        f"{type(dataloader).__name__} has a state_dict of its own, so it isn't dealt to the {data_size} data ranks, and"
        " each would read all samples: use a torch DataLoader, whose place in the data is saved with the checkpoint; or"
        " deal it by a sampler with num_replicas=strategy.layout.data_parallel_size and"
        " rank=strategy.layout.data_rank."
    )


def _with_samplers(dataloader: DataLoader, sampler: ShardedSampler, batch_sampler: Any) -> Any:
    """A loader of the same class with other samplers."""
    kind = type(dataloader)
    if all(getattr(kind, name) is getattr(DataLoader, name) for name in ("__iter__", "__len__", "_get_iterator")):
        twin = copy.copy(dataloader)
        vars(twin).update(sampler=sampler, batch_sampler=batch_sampler, _iterator=None)
        return twin
    # a class with its own iteration may store its sampler elsewhere too, so the loader is created again
    hidden = vars(dataloader).get("batch_sampler")
    # otherwise Lightning would rebuild the user's batch sampler around the sampler
    vars(dataloader)["batch_sampler"] = None
    try:
        arguments, named = _get_dataloader_init_args_and_kwargs(dataloader, sampler)
    finally:
        vars(dataloader)["batch_sampler"] = hidden
    if batch_sampler is not None and dataloader.batch_size is None:
        named |= {"sampler": None, "batch_sampler": batch_sampler, "batch_size": 1, "drop_last": False}
    return _reinstantiate_wrapped_cls(dataloader, *arguments, **named)


# -- random numbers drawn while a batch is made -----------------------------------------------------------------------


def _seed_fetches(
    dataloader: Any,
    worker_generator: torch.Generator,
    sampler: ShardedSampler | None,
    next_pass: Callable[[], tuple[int, ...]],
    seed: int,
) -> None:
    """Seed what a dataset draws, in workers or in this process, equally on the ranks of one data rank."""
    dataloader.generator = worker_generator
    if dataloader.worker_init_fn is None:
        dataloader.worker_init_fn = _keep_seeds
    if dataloader.num_workers == 0:
        unseeded = dataloader._get_iterator
        dataloader._get_iterator = lambda: _SeededFetches(unseeded(), _places(sampler, next_pass), seed)


def _keep_seeds(worker: int) -> None:
    """Does nothing: torch seeds a worker's generators from the loader's; Lightning would reseed them by global rank."""


def _counted_passes(epoch: Callable[[], int]) -> Callable[[], tuple[int, ...]]:
    """The epoch, and which pass over a loader whose sampler isn't ours begins; to be called once for each."""
    begun: Counter[int] = Counter()

    def next_pass() -> tuple[int, ...]:
        now = epoch()
        begun[now] += 1
        return now, begun[now] - 1

    return next_pass


class _SeededFetches:
    """The batches of a loader without workers, each made under generators that are seeded by its place in the data."""

    def __init__(self, batches: Iterator[Any], places: Iterator[tuple[int, ...]], seed: int) -> None:
        self._batches = batches
        self._places = places
        self._seed = seed

    def __iter__(self) -> _SeededFetches:
        return self

    def __next__(self) -> Any:
        with drawing_apart(derive(self._seed, *next(self._places))):
            return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _places(sampler: ShardedSampler | None, next_pass: Callable[[], tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Each batch's pass and position, from the first one on: Lightning creates an iterator before it sets the epoch."""
    first, per_batch = (0, 1) if sampler is None else (sampler.next_start, sampler.data_size * sampler.batch_size)
    begun = next_pass()
    for number in count():
        yield *begun, first + number * per_batch
