"""The order of samples is one for all layouts, and a place in it means the same on each of them."""

import random
from itertools import chain, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_shard.errors import StateMismatchError
from lightning_shard.plugin.data.sampler import READ_AHEAD, ShardedSampler


class Drawing:
    """A custom sampler that draws from every generator, and more than once per sample."""

    def __init__(self, length):
        self.length = length
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)

    def __len__(self):
        return self.length

    def __iter__(self):
        for _ in range(self.length):
            drawn = torch.randint(100, ()).item() + np.random.randint(100) + random.randrange(100)
            yield drawn % self.length


ORDERS = {
    "sequential": lambda n: SequentialSampler(range(n)),
    "random": lambda n: RandomSampler(range(n)),
    "with replacement": lambda n: RandomSampler(range(n), replacement=True, num_samples=2 * n),
    "several times over": lambda n: RandomSampler(range(n), num_samples=2 * n + n // 2),
    "with a generator": lambda n: RandomSampler(range(n), generator=torch.Generator().manual_seed(7)),
    "subset": lambda n: SubsetRandomSampler(range(0, n, 2), generator=torch.Generator()),
    "weighted": lambda n: WeightedRandomSampler([1.0] * n, n),
    "custom": Drawing,
    "list": lambda n: list(range(n))[::-1],
}


def samplers(order, size, **options):
    return [ShardedSampler(order(), data_rank=rank, data_size=size, **{"seed": 3, **options}) for rank in range(size)]


def interleave(parts):
    """What the ranks read, in the order of the positions."""
    return list(chain.from_iterable(zip(*parts, strict=True)))


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("length", [24, READ_AHEAD, 2 * READ_AHEAD + 1])
def test_the_ranks_together_read_what_one_process_reads_in_its_order(kind, length):
    (alone,) = ([*sampler] for sampler in samplers(lambda: ORDERS[kind](length), 1))
    for size in (2, 3, 4):
        ranks = samplers(lambda: ORDERS[kind](length), size)
        # every rank's process has drawn other numbers
        for rank, sampler in enumerate(ranks):
            torch.manual_seed(rank)
            random.seed(rank)
            np.random.seed(rank)
            part = list(sampler)
            ranks[rank] = part
            assert len(part) == -(-len(alone) // size)
        together = interleave(ranks)
        assert together[: len(alone)] == alone
        assert together[len(alone) :] == alone[: len(together) - len(alone)]


@pytest.mark.parametrize("kind", ["random", "with a generator", "subset", "weighted", "custom"])
def test_each_epoch_and_seed_has_an_order_of_its_own(kind):
    (sampler,) = samplers(lambda: ORDERS[kind](60), 1)
    (other,) = samplers(lambda: ORDERS[kind](60), 1, seed=4)
    first = list(sampler)
    assert list(sampler) == first
    assert list(other) != first
    sampler.set_epoch(1)
    assert list(sampler) != first
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_the_order_of_the_first_release_is_kept():
    """A resumed run must meet the order that it was begun in: a change of it breaks every checkpoint in mid-epoch."""
    (sampler,) = samplers(lambda: ORDERS["random"](8), 1, seed=0)
    assert list(sampler) == [3, 6, 4, 7, 1, 0, 5, 2]
    sampler.set_epoch(1)
    assert list(sampler) == [2, 1, 3, 0, 5, 4, 7, 6]


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 4))
def test_with_drop_last_no_sample_is_repeated_and_the_steps_are_those_of_one_process(length, size, batch_size):
    def batches_of(sampler):
        return list(BatchSampler(sampler, batch_size, True))

    ranks = samplers(lambda: ORDERS["random"](length or 1), size, batch_size=batch_size, drop_last=True)
    (alone,) = samplers(lambda: ORDERS["random"](length or 1), 1, batch_size=size * batch_size, drop_last=True)
    parts = [batches_of(sampler) for sampler in ranks]
    whole = list(BatchSampler(alone, size * batch_size, True))
    assert {len(part) for part in parts} == {len(whole)}
    assert [len(part) for part in parts] == [len(BatchSampler(sampler, batch_size, True)) for sampler in ranks]
    for step, batch in enumerate(whole):
        assert sorted(batch) == sorted(chain.from_iterable(part[step] for part in parts))


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_without_it_every_rank_takes_equal_steps_and_less_than_a_round_is_repeated(length, size, batch_size):
    ranks = samplers(lambda: ORDERS["random"](length), size, batch_size=batch_size)
    parts = [list(BatchSampler(sampler, batch_size, False)) for sampler in ranks]
    assert len({tuple(map(len, part)) for part in parts}) == 1
    seen = sorted(index for part in parts for batch in part for index in batch)
    assert len(seen) - length < size
    assert set(seen) == set(range(length))


# The place in an epoch


def train(state, length, size, batch_size, steps, *, fetched_ahead=0, kind="random", drop_last=False, batches=None):
    """Run some steps of an epoch on ``size`` ranks from a state; what was trained on, and the state after it."""
    seen, states = [], []
    for sampler in samplers(lambda: ORDERS[kind](length), size, batch_size=batch_size, drop_last=drop_last):
        sampler.seed = 3
        before = 0
        if state is not None:
            sampler.load_state_dict(state)
            before = sampler.batches_until(sampler.start) if batches is None else batches
            sampler.begin(state["epoch"], before)
        loader = iter(BatchSampler(sampler, batch_size, drop_last))
        trained = list(islice(loader, steps))
        list(islice(loader, fetched_ahead))
        seen.append(trained)
        states.append(sampler.state_dict(before + len(trained)))
    assert all(other == states[0] for other in states)
    return list(
        chain.from_iterable(chain.from_iterable(zip(*part, strict=True)) for part in zip(*seen, strict=True))
    ), states[0]


@given(
    layouts=st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.integers(0, 4), st.integers(0, 9)),
        max_size=5,
    ),
    kind=st.sampled_from(["random", "sequential", "list"]),
)
def test_from_layout_to_smaller_layout_every_sample_is_seen_once_in_the_one_order(layouts, kind):
    """Each number of ranks divides those before it, so what is left is never to be filled up."""
    alone = [index for sampler in samplers(lambda: ORDERS[kind](240), 1) for index in sampler]
    state, seen = None, []
    for size, batch_size, steps, fetched_ahead in sorted(layouts, reverse=True):
        part, state = train(state, 240, size, batch_size, steps, fetched_ahead=fetched_ahead, kind=kind)
        seen += part
        assert state["position"] == len(seen)
    part, state = train(state, 240, 1, 1, 240, kind=kind)
    seen += part
    assert state["position"] == 240
    assert seen == alone


@given(
    length=st.integers(1, 100),
    first=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 6)),
    second=st.tuples(st.integers(1, 5), st.integers(1, 4)),
)
def test_where_it_does_not_divide_less_than_a_round_is_repeated(length, first, second):
    part, state = train(None, length, *first)
    rest, state = train(state, length, *second, 1000)
    seen = part + rest
    assert set(seen) == set(range(length))
    assert len(seen) - length < first[0] + second[0]
    assert state["position"] == length


def test_batches_are_not_taken_for_samples():
    (sampler,) = samplers(lambda: [[0], [1]], 1, batch_size=None)
    with pytest.raises(StateMismatchError, match="counts samples, and this DataLoader deals batches"):
        sampler.load_state_dict({"epoch": 0, "position": 1, "unit": "samples", "seed": 3})
