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
    Change,
    Outline,
    Unsendable,
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


def test_what_both_stages_have_added_since_the_batch_began_is_there_once() -> None:
    last, other = apart(["earlier"])
    before, begun = Outline.of(last), Outline.of(other)
    for held in (last, other):
        held.append("before the network")
    last.append("after it")
    change_since(before, last).apply(other, begun, receive)
    assert other == last == ["earlier", "before the network", "after it"]


@pytest.mark.parametrize("value", [3, "text", np.float64(2), np.arange(3), (1, {"a": None}), {1, 2}, torch.float16])
def test_plain_values_are_sent_as_they_are(value: Any) -> None:
    assert np.all(receive(sent(value)) == value)


@pytest.mark.parametrize("value", [lambda: None, [SimpleNamespace()], {"a": iter([1])}, np.array([object()])])
def test_what_isnt_plain_cant_be_sent(value: Any) -> None:
    with pytest.raises(Unsendable):
        sent(value)
