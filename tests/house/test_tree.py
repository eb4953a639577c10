"""Batches of any nesting are cut into microbatches and results put together again."""

from __future__ import annotations

import pickle
import threading
from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import BatchError

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    image: Tensor
    names: list[str]
    scale: float = 2.0


def test_any_nesting_is_cut_alike_and_keeps_its_types() -> None:
    x = torch.arange(12).reshape(6, 2)
    batch = {
        "pair": Pair(x, [x * 2, (x * 3,)]),
        "sample": Sample(x, [f"s{i}" for i in range(6)]),
        "mapping": UserDict(ids=x[:, 0]),
        "constant": torch.tensor(5.0),
        "label": "train",
    }
    first, second, third = tree.split(batch, 3)
    assert isinstance(second["pair"], Pair)
    assert torch.equal(second["pair"].y[1][0], x[2:4] * 3)
    assert isinstance(second["sample"], Sample)
    assert second["sample"].names == ["s2", "s3"]
    assert second["sample"].scale == 2.0
    assert isinstance(third["mapping"], UserDict)
    assert torch.equal(third["mapping"]["ids"], x[4:, 0])
    assert first["constant"] == 5
    assert first["label"] == "train"


@pytest.mark.parametrize(
    ("batch", "parts", "says"),
    [
        (torch.zeros(6), 4, r"batch of 6 samples can't be cut into 4.*divisor of 6"),
        ({"x": torch.zeros(4), "y": torch.zeros(3)}, 2, r"first dimension \(x: 4, y: 3\)"),
        ({"x": torch.tensor(1.0), "names": ["a"]}, 2, "without tensors"),
        (torch.eye(4).to_sparse_csr(), 2, "layout torch.sparse_csr can't be cut"),
        (
            torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
            2,
            "nested tensor of layout torch.strided can't",
        ),
    ],
)
def test_what_cant_be_cut_says_why(batch: Any, parts: int, says: str) -> None:
    with pytest.raises(BatchError, match=says):
        tree.split(batch, parts)


def test_a_list_of_numbers_has_one_for_each_sample_also_as_tensors() -> None:
    batch = {
        "x": torch.arange(4),
        "scales": [torch.tensor(float(i)) for i in range(4)],
        "targets": [{"id": torch.tensor(i), "name": f"n{i}"} for i in range(4)],
    }
    _, second = tree.split(batch, 2)
    assert [float(scale) for scale in second["scales"]] == [2, 3]
    assert [target["name"] for target in second["targets"]] == ["n2", "n3"]


def test_a_list_of_samples_is_no_list_of_features() -> None:
    x, key, value = torch.zeros(3, 4, 2)
    for batch, drawn in (
        ([x, x], 4),  # an input and a target
        ({"x": x, "scales": [x, x, x]}, 4),
        ([x[:2], x[:2]], None),  # an input and a target, of two samples
        ([x, x, x, x.long()], 4),
        ([torch.zeros(6, 3), torch.zeros(6)], 2),  # samples that are several each
        ({"x": x, "views": [{"x": x}, {"x": x}]}, None),
        ({"x": x, "targets": [{"id": torch.tensor(i)} for i in range(4)]}, 4),
        ({"x": torch.zeros(6, 3), "scales": [torch.tensor(1.0), torch.tensor(2.0)]}, 2),
        ([x[:1], x[:1]], 2),  # an epoch's last batch
        ([x[:2], x[:2], x[:2]], 3),
        ({"x": x, "layers": [(key, value) for _ in range(3)]}, None),
        ((x, tuple((key, value) for _ in range(3))), 4),
        ((x[:2], x[:2]), 2),
        ((x[:3], x[:3], x[:3]), 3),
        ({"x": x, "packed": nn.utils.rnn.PackedSequence(x, torch.ones(4))}, 2),
    ):
        tree.refuse_list_of_samples(batch, drawn)
    sequences = [torch.zeros(12, 3) for _ in range(4)]
    for batch, drawn, says in (
        ([torch.zeros(3, 8, 8)] * 3, 3, "list of 3 entries.*dim 0 is 3, and a batch is made of 3 samples"),
        (
            sequences,
            4,
            "list of 4 entries, and the size of their tensors' dim 0 is 12, and a batch is made of 4 samples",
        ),
        ({"sequences": [{"x": x} for x in sequences]}, 4, "dim 0 is 12"),
        ({"x": x, "targets": [{"boxes": torch.zeros(4, 4)} for _ in range(4)]}, None, "list of 4 entries.*dim 0 is 4"),
        ({"targets": [(x, x) for _ in range(4)]}, None, "list of 4 entries.*dim 0 is 4"),
        (
            {"x": x, "layers": [(key, value) for _ in range(4)]},
            4,
            "list of 4 entries.*dim 0 is 4",
        ),  # as many as samples
        ((tuple(sequences), tuple(torch.tensor(i) for i in range(4))), 4, "tuple of 4 entries.*dim 0 is 12"),
        ([torch.zeros(4, 5 + i, 7) for i in range(3)], 3, "list of 3 entries.*dim 0 is 4"),
        ({"x": x, "boxes": [x, x, x, x]}, 4, "list of 4 entries.*dim 0 is 4, and a batch is made of 4 samples"),
        ([torch.zeros(4, 3)] * 4, None, "list of 4 entries.*dim 0 is 4.*ambiguous"),
    ):
        with pytest.raises(BatchError, match=says):
            tree.refuse_list_of_samples(batch, drawn)
    with pytest.raises(BatchError, match=r"list of 4 entries.*dim 0 is 2"):
        tree.refuse_list_of_samples([torch.zeros(2, 3) for _ in range(4)], 4, may_be_last=False)


def test_numbers_in_lists_are_not_asked_for_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    kind_of = tree._kind_of_node
    monkeypatch.setattr(tree, "_kind_of_node", lambda kind: asked.append(kind) or kind_of(kind))
    tree.refuse_list_of_samples({"x": torch.zeros(4, 2), "ids": [[1] * 100 for _ in range(4)]}, 4)
    assert len(asked) < 20


def test_sparse_tensors_are_cut_too() -> None:
    x = torch.eye(4)
    assert all(torch.equal(part.to_dense(), own) for part, own in zip(tree.split(x.to_sparse(), 2), x.split(2)))


def test_packed_sequences_take_what_stands_for_tensors() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    shapes = tree.map_leaves(lambda leaf: leaf if leaf is None else str(tuple(leaf.shape)), packed)
    assert type(shapes) is type(packed)
    assert pickle.loads(pickle.dumps(shapes)) == shapes == ("(5,)", "(3,)", None, None)
    assert torch.equal(pickle.loads(pickle.dumps(packed)).data, packed.data)


class Checked:
    """A descriptor that takes tensors only."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return None if instance is None else vars(instance)[self.name]

    def __set__(self, instance: object, value: object) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self.name} isn't a tensor")
        vars(instance)[self.name] = value


@dataclass
class Picture:
    image: Any = Checked()


def test_an_outline_has_what_shapes_may_depend_on_wherever_it_lies() -> None:
    class Graph:
        def __init__(self, nodes: int) -> None:
            self.x, self.itself, self.more = torch.zeros(nodes, 2), self, {"edges": torch.zeros(2, 3)}

    graph = Graph(4)
    assert tree.outline((graph, "a")) == (((4, 2), torch.float32), ((2, 3), torch.float32))
    assert tree.outline([Graph(5)]) != tree.outline([graph])
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])
    assert tree.outline([nested]) == (((2,), torch.float32), ((3,), torch.float32))
    assert tree.outline({"x": torch.zeros(2), "text": "a"}) == tree.outline({"x": torch.ones(2), "text": "another"})
    assert tree.outline(["a text", 1]) == tree.outline(["a text", 1]) != tree.outline(["another", 1])


def test_a_copy_of_a_batch_may_be_changed_in_place() -> None:
    batch = {"x": torch.zeros(2), "held": SimpleNamespace(x=torch.zeros(2)), "lock": threading.Lock()}
    copied = tree.copied(batch)
    copied["x"] += 1
    copied["held"].x += 1
    assert not batch["x"].any()
    assert not batch["held"].x.any()  # type: ignore[attr-defined]
    assert copied["lock"] is batch["lock"]


def test_joined_batches_are_split_again() -> None:
    one: Any = {"x": torch.arange(4.0), "names": [*"abcd"], "array": np.arange(4), "scale": torch.tensor(2.0)}
    joined = tree.joined(one, {**one, "x": -one["x"]}, 4)
    assert joined["names"] == [*"abcdabcd"]
    assert joined["array"].tolist() == [0, 1, 2, 3] * 2
    first, second = tree.split(joined, 2)
    torch.testing.assert_close(first["x"], one["x"])
    torch.testing.assert_close(second["x"], -one["x"])
    with pytest.raises(BatchError, match="other shapes"):
        tree.joined({"x": torch.zeros(2)}, {"x": torch.zeros(3)}, 2)
