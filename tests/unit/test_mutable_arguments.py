"""What units of FSDP2's put into the lists, dicts and dataclasses that they are given."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp import mutable_arguments
from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.parallel.fsdp.mutable_arguments import write_back_arguments
from lightning_shard.sharding import full_tensor
from tests.unit.pipelines import Root
from tests.unit.test_crossing import (
    Appends,
    Block,
    ChangesDict,
    ChangesState,
    Net,
    PassesDict,
    PassesList,
    PassesState,
    batches,
    loss,
    seeded,
)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """One rank: FSDP2 copies what it hands to its units there too."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class AppendingWithin(Block):
    def forward(self, x: Tensor, state: Any) -> Any:  # type: ignore[override]
        hidden = super().forward(x)
        state["means"].append(hidden.mean())
        return hidden, {"again": (state,)}


class AppendsWithin(Net):
    """Blocks fill a list within the dict that they are given, and return the dict within another one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendingWithin() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden, means = self.embed(x), []
        state: Any = {"means": means}
        for block in self.blocks:
            hidden, returned = block(hidden, state)
            [state] = returned["again"]
        assert state["means"] is means
        assert len(means) == 4
        return self.head(self.norm(hidden)) * sum(means)


class Sharded(Root):
    def forward(self, x: Tensor) -> Tensor:
        return loss(self, x)


def sharded(network: type[Net]) -> tuple[Sharded, Sharded]:
    plain = Sharded(seeded(network)())
    root = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    blocks = list(root.net.blocks)  # type: ignore[arg-type]
    fully_shard(root, mesh=mesh, ignored_params={p for block in blocks for p in block.parameters()})
    for block in blocks:
        fully_shard(block, mesh=mesh)
    write_back_arguments(blocks)
    return root, plain


def assert_step_alike(root: Sharded, plain: Sharded, x: Tensor) -> None:
    """The loss of a batch and all gradients, which are added to earlier ones, are those of the plain network."""
    bypassed = BypassedUnits(root, dist.group.WORLD, torch.device("cpu"))
    with bypassed.watched():
        values = [each(x) for each in (root, plain)]
    torch.testing.assert_close(*values)
    bypassed.gather(values[0])
    for value in values:
        value.backward()
    for (name, own), expected in zip(root.named_parameters(), plain.parameters()):
        assert own.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(full_tensor(own.grad), expected.grad, msg=name)


SEES_DATACLASSES = torch.__version__ >= "2.12"


def test_what_is_changed_is_seen_around_them() -> None:
    dataclasses = [PassesState, ChangesState] if SEES_DATACLASSES else []
    for network in (PassesDict, PassesList, ChangesDict, Appends, AppendsWithin, *dataclasses):
        root, plain = sharded(network)
        [x, *_] = batches()
        assert_step_alike(root, plain, x)


@pytest.mark.parametrize("network", [PassesState, ChangesState])
def test_dataclasses_that_fsdp2_doesnt_look_into_are_refused(
    network: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutable_arguments, "_LOOKS_INTO_DATACLASSES", False)
    root, _ = sharded(network)
    with pytest.raises(StepError, match="A Passes returns or changes a State, and FSDP2 of torch 2"):
        root(batches()[0])
