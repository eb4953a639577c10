"""What loading code makes of a checkpoint's tensors is plain."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.checkpoint import StoredTensor
from lightning_shard.plugin.saving import state
from lightning_shard.plugin.saving.own_loading import LazyTensor, replace_lazy


class Stored(StoredTensor):
    """Of ones; counts how often it is read."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        vars(self).update(own=shape, kind=dtype, reads=0)

    name = property(lambda self: "weight")
    shape = property(lambda self: torch.Size(self.own))
    dtype = property(lambda self: self.kind)

    def full(self) -> Tensor:
        vars(self)["reads"] += 1
        return torch.ones(self.own, dtype=self.kind)


def test_what_is_computed_is_plain_and_in_place_is_itself() -> None:
    stored = Stored(3, 4)
    given = LazyTensor.of(stored)
    assert (given.shape, given.dtype, given.numel(), stored.reads) == (torch.Size([3, 4]), torch.float32, 12, 0)
    for computed in (given * 2, given.clone(), given.float(), given[:2], torch.zeros_like(given), torch.cat([given])):
        assert type(computed) is Tensor
    assert given.mul_(2) is given
    given[0] = 5
    given[1:].add_(1)
    assert (given + 0)[:, 0].tolist() == [5, 3, 3]
    assert stored.reads == 1


def test_gradients_reach_what_was_made_of_it() -> None:
    module = nn.Linear(4, 4)
    given = LazyTensor.of(Stored(4))
    module.register_buffer("queue", torch.zeros_like(given))
    module.cloned = nn.Parameter(given.clone())
    module.made = nn.Parameter(given)
    module.register_buffer("itself", given)
    module.plain = given
    replace_lazy(module)
    assert {type(module.queue), type(module.itself), type(module.plain)} == {Tensor}
    assert type(module.made) is type(module.cloned) is nn.Parameter
    out = module(module.plain) * module.cloned * module.made + module.queue + module.itself
    assert type(out) is Tensor
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())
    frozen = nn.Parameter(LazyTensor.of(Stored(4)), requires_grad=False)
    module.made = frozen
    replace_lazy(module)
    assert type(module.made) is nn.Parameter
    assert not module.made.requires_grad


class Keeps:
    def __init__(self) -> None:
        self.values = {"a": [LazyTensor.of(Stored(2))], "b": (1, LazyTensor.of(Stored(3)))}
        self.last = LazyTensor.of(Stored(1))


def test_what_is_kept_in_containers_and_by_others_is_plain_too() -> None:
    module, callback = nn.Linear(2, 2), Keeps()
    module.kept, module.queue = Keeps(), deque([LazyTensor.of(Stored(4))])
    replace_lazy(module, callback)
    for holder in (module.kept, callback):
        held = [holder.values["a"][0], holder.values["b"][1], holder.last]
        assert [type(value) for value in held] == [Tensor] * 3
        assert holder.values["b"][0] == 1
    assert [type(value) for value in module.queue] == [Tensor]


def test_each_rank_tells_of_what_it_converts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero.rank_zero_only.rank", 1)
    pairs: Any = [(Stored(2, dtype=torch.bfloat16), torch.zeros(2))]
    with pytest.warns(UserWarning, match="weight is torch.bfloat16 in the checkpoint and torch.float32"):
        state._tell_of_types(pairs)
