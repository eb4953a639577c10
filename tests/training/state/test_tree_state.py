"""What running a network changes is put back, beside its parameters."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard.state.tree_state import take


def test_a_tensor_that_a_graph_holds_may_be_changed_and_put_back() -> None:
    module = nn.Module()
    module.register_buffer("scale", torch.full((), 2.0))
    weight = torch.ones((), requires_grad=True)
    result = weight * module.scale
    memory = take(module)
    module.scale.fill_(3.0)
    memory.put_back()
    result.backward()
    assert weight.grad == 2.0


STREAM: Iterator[int] = itertools.count()


class OfGlobals(nn.Module):
    def draw(self) -> int:
        return next(STREAM)


class OfClass(nn.Module):
    stream: Iterator[int] = itertools.count()

    def draw(self) -> int:
        return next(self.stream)


class OfClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stream = itertools.count()
        self.draw: Callable[[], int] = lambda: next(stream)


@pytest.mark.parametrize("kind", [OfGlobals, OfClass, OfClosure])
def test_iterators_outside_of_objects_give_the_same_entries_again(kind: Any) -> None:
    module = kind()
    begin = module.draw()
    memory = take(module)
    for _ in range(3):
        memory.put_back()
        assert [module.draw(), module.draw()] == [begin + 1, begin + 2]
    memory.put_back()
    assert module.draw() == begin + 1
    memory.forget()
    assert module.draw() == begin + 2


def test_what_is_beside_parameters_is_put_back() -> None:
    module: Any = nn.Linear(2, 2)
    module.state = {"weight": module.weight, "steps": 0}
    module.entries = [0, module.weight, "a"]
    module.recent = deque([module.weight, 0])
    module.some = {module.weight, "a"}
    memory = take(module)
    gathered = nn.Parameter(torch.zeros_like(module.weight))
    for _ in range(2):
        module.state["steps"] += 1
        module.state["more"] = 1
        module.state["weight"] = gathered
        module.entries[:] = [1, gathered, "b", "c"]
        module.recent.append(1)
        module.some.add("b")
        assert len(memory.changed()) == 4
        memory.put_back()
        assert module.state == {"weight": gathered, "steps": 0}
        assert module.entries[0] == 0
        assert module.entries[1] is gathered
        assert module.entries[2:] == ["a"]
        assert [*module.recent] == [module.weight, 0]
        assert module.some == {module.weight, "a"}
        assert not memory.changed()


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_put_back(layout: torch.layout) -> None:
    module = nn.Module()
    module.register_buffer("listed", torch.eye(3).to_sparse(layout=layout))
    module.phases = torch.zeros(2, dtype=torch.complex32)
    memory = take(module)
    assert memory.changed() == []
    module.listed.mul_(2)
    module.phases.real.fill_(1)
    assert sorted(memory.changed()) == ["_buffers.listed", "phases"]
    memory.put_back()
    assert torch.equal(module.listed.to_dense(), torch.eye(3))
    assert memory.changed() == []
