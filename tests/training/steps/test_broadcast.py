"""What the last stage tells the others is what it has, on every rank, whatever it holds."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_shard.plugin.broadcast import Broadcaster
from lightning_shard.testing import run_ranks


class Pair(NamedTuple):
    one: Any
    other: Any


def value() -> Any:
    long = torch.arange(5000, dtype=torch.float32, requires_grad=True)
    return {
        "loss": torch.tensor(0.5, dtype=torch.float64),
        "long": long * 2,
        ("a", 1): [torch.ones(3, dtype=torch.bool), Pair("text", torch.zeros(0, 4))],
        "strided": torch.arange(12).reshape(3, 4).T[::2],
        "of one sample": torch.arange(6.0).view(2, 3)[:1, 0],
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "sparse": torch.eye(2).to_sparse(),
        "ordered": OrderedDict(n=None, m=3),
        "half": torch.ones(3, dtype=torch.bfloat16),
    }


def told() -> list[Any]:
    broadcaster = Broadcaster(dist.new_group(), dist.new_group())
    mine, device = dist.get_rank() == 0, torch.device("cpu")
    said = [
        value(),
        [torch.tensor(1.5), 3],
        [torch.tensor(2.5), 3],  # but for the tensors as before, which goes in one message
        [torch.tensor(2.5), 4],
        [torch.arange(999.0), True],
        [torch.arange(999.0) + 1, True],  # as before, and too large for it
        [torch.arange(999), True],
        {},
    ]
    return [broadcaster.broadcast(each if mine else None, device) for each in said]


def test_all_ranks_are_told_the_same() -> None:
    for large, *small, longer, again, whole, nothing in run_ranks(told, 2):
        expected = value()
        assert large.keys() == expected.keys()
        assert large["ordered"] == expected["ordered"]
        assert small == [[torch.tensor(1.5), 3], [torch.tensor(2.5), 3], [torch.tensor(2.5), 4]]
        assert nothing == {}
        assert torch.equal(longer[0] + 1, again[0])
        assert (whole[0].dtype, whole[1]) == (torch.int64, True)
        flags, pair = large["a", 1]
        assert torch.equal(flags, torch.ones(3, dtype=torch.bool))
        assert (type(pair), pair.one, pair.other.shape) == (Pair, "text", (0, 4))
        for name in ("loss", "long", "strided", "of one sample", "complex", "half"):
            assert large[name].dtype == expected[name].dtype
            assert torch.equal(large[name], expected[name]), name
        assert torch.equal(large["sparse"].to_dense(), torch.eye(2))
