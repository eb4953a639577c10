"""What loading code makes of a checkpoint's tensors is plain."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_shard.checkpoint import StoredTensor
from lightning_shard.plugin.saving.own_loading import LazyTensor


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
