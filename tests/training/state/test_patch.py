"""Changes of containers and objects: applied on another stage they give what the last stage has."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_shard.state.patch import (
    LARGEST_SENT,
    Change,
    Outline,
    Unsendable,
    Unsent,
    change_since,
    received,
    sent,
)


def receive(value: Any) -> Any:
    return received(lambda each: each if isinstance(each, Tensor) else torch.empty(each.shape, device="meta"), value)


class Meter:
    def __init__(self) -> None:
        self.total, self.values = 0.0, [1.0]


def apart(value: Any) -> tuple[Any, Any]:
    """A container on two stages, which hold equal values in containers of their own."""
    return value, copy.deepcopy(value)


def moved(last: Any, other: Any, change: Any) -> Change:
    """``change`` runs on the last stage, and what it did on the other."""
    before = Outline.of(last)
    change(last)
    what = change_since(before, last)
    assert what.fits(other)
    what.apply(other, None, receive)
    return what


numbers = st.integers(0, 9)
actions = st.one_of(
    st.tuples(st.just("append"), numbers),
    st.tuples(st.just("pop"), st.none()),
    st.tuples(st.just("clear"), st.none()),
    st.tuples(st.just("set"), numbers),
    st.tuples(st.just("inner"), numbers),
    st.tuples(st.just("remove"), st.none()),
    st.tuples(st.just("turn"), st.none()),
)


def run(held: dict[str, Any], action: tuple[str, Any]) -> None:
    kind, value = action
    if kind == "append":
        held["list"].append(value)
    elif kind == "pop" and held["list"]:
        held["list"].pop()
    elif kind == "clear":
        held["list"].clear()
        held["recent"].clear()
    elif kind == "set":
        held[f"key {value % 3}"] = value
        held["object"].total += value
    elif kind == "inner":
        held["object"].values.append(value)
        held["recent"].append(value)
    elif kind == "remove":
        held.pop("key 1", None)
    elif kind == "turn":
        held["list"] = held.pop("list")


def plain(held: dict[str, Any]) -> dict[str, Any]:
    return {**held, "object": vars(held["object"])}


@given(st.lists(st.lists(actions, max_size=6), max_size=5))
def test_any_changes_of_nested_containers_are_those_of_the_other_stage_after_each_batch(batches: list[Any]) -> None:
    last, other = apart({"list": [1, 2], "recent": deque([0], maxlen=3), "object": Meter(), "key 1": 0})
    for batch in batches:
        moved(last, other, lambda held, batch=batch: [run(held, action) for action in batch])
        assert [*plain(other).items()] == [*plain(last).items()]


def test_of_a_list_that_grows_only_the_growth_is_sent() -> None:
    last, other = apart([torch.ones(2)] * 100)
    what = moved(last, other, lambda held: held.append(torch.zeros(2)))
    assert len(what.added) == 1
    assert not what.replaces
    assert len(other) == 101


def test_a_list_rewritten_to_the_same_length_and_last_entry_is_sent() -> None:
    last, other = apart([1, 2])

    def rewrite(held: list[int]) -> None:
        held[:] = [0, 2]

    moved(last, other, rewrite)
    assert other == [0, 2]


@pytest.mark.parametrize("place", [0, 150])
def test_a_long_list_rewritten_at_one_place_is_sent(place: int) -> None:
    """It was compared at some places."""
    last, other = apart([1.5] * 200)

    def rewrite(held: list[float]) -> None:
        held[place] = 2.5

    moved(last, other, rewrite)
    assert other[place] == 2.5


def test_a_dict_whose_order_has_changed_is_sent() -> None:
    last, other = apart({"a": 1, "b": [2], "c": 3})

    def move(held: dict[str, Any]) -> None:
        held["a"] = held.pop("a")

    moved(last, other, move)
    assert [*other.items()] == [("b", [2]), ("c", 3), ("a", 1)]


def test_what_both_stages_have_added_since_the_batch_began_is_there_once() -> None:
    last, other = apart(["earlier"])
    before, begun = Outline.of(last), Outline.of(other)
    for held in (last, other):
        held.append("before the network")
    last.append("after it")
    change_since(before, last).apply(other, begun, receive)
    assert other == last == ["earlier", "before the network", "after it"]


def test_tensors_are_sent_without_their_graph_and_as_they_were() -> None:
    last: list[Tensor] = []
    weight = torch.ones(3, requires_grad=True)
    last.append(weight * 2)
    (got,) = sent(last)
    last[0].detach().zero_()
    assert not got.requires_grad
    assert got.tolist() == [2, 2, 2]


@pytest.mark.parametrize("make", [torch.zeros, np.zeros], ids=["tensor", "array"])
@pytest.mark.parametrize("place", ["sum", 0])
def test_a_tensor_changed_in_place_inside_of_a_dict_or_list_is_sent(make: Any, place: Any) -> None:
    last, other = apart({"sum": make(2)} if place else [make(2), make(2)])

    def change(held: Any) -> None:
        held[place] += 3

    moved(last, other, change)
    assert other[place].tolist() == [3, 3]


def test_of_large_tensors_the_shape_is_sent() -> None:
    assert sent([torch.zeros(LARGEST_SENT + 1)]) == [Unsent((LARGEST_SENT + 1,), torch.float32)]


@pytest.mark.parametrize("value", [3, "text", np.float64(2), np.arange(3), (1, {"a": None}), {1, 2}, torch.float16])
def test_plain_values_are_sent_as_they_are(value: Any) -> None:
    assert np.all(receive(sent(value)) == value)


@pytest.mark.parametrize("value", [lambda: None, [SimpleNamespace()], {"a": iter([1])}, np.array([object()])])
def test_what_isnt_plain_cant_be_sent(value: Any) -> None:
    with pytest.raises(Unsendable):
        sent(value)


def test_a_change_of_another_kind_of_container_doesnt_fit() -> None:
    assert not Change(added=[1]).fits({})
    assert not Change(changed={"a": 1}).fits([])


def test_what_hasnt_changed_isnt_sent_so_it_may_be_anything() -> None:
    held = {"set": {object()}, "recent": deque([object()], maxlen=2), "list": [object()], "steps": 0}
    before = Outline.of(held)
    held["steps"] = 1
    assert change_since(before, held) == Change(changed={"steps": 1})


def test_an_equal_number_that_is_written_shows() -> None:
    """In the next microbatch it may be another one, and only what was seen to be written is followed then."""
    held = {"scale": 1.0}
    before = Outline.of(held)
    assert before.is_as(Outline.of(held))
    held["scale"] = float("1")
    assert not before.is_as(Outline.of(held))
