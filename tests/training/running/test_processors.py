"""Which processors belong to a rank, and how many threads it computes with."""

import math

import pytest

from lightning_shard.processors import Available, shares

ALL = tuple(range(8))


def rank(processors=ALL, machine="a", container="a", quota=math.inf):
    return Available(machine, container, processors, quota)


@pytest.mark.parametrize(
    ("ranks", "number"),
    [
        ([rank()], 8),
        ([rank()] * 3, 2),
        ([rank()] * 20, 1),
        ([rank((0, 1, 2, 3)), rank((4, 5, 6, 7))], 4),
        ([rank((0, 1, 2, 3)), rank((0, 1, 2, 3)), rank(ALL)], 1),
        ([rank()] * 2 + [rank(machine="b")], 4),
        ([rank(container="a"), rank(container="b")], 4),
        ([rank(quota=2.0)] * 2, 1),
        ([rank(container="a", quota=3.5), rank(container="b", quota=3.5)], 3),
        ([rank(quota=0.5)], 1),
    ],
    ids=[
        "one",
        "shared",
        "more ranks than processors",
        "bound by the launcher",
        "partly bound",
        "the fullest machine counts",
        "containers of one machine",
        "a quota",
        "a quota for each container",
        "a quota below one",
    ],
)
def test_a_machines_processors_are_divided_among_its_ranks(ranks, number):
    assert shares(ranks) == number
