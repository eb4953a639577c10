"""Units of FSDP2's get the objects that they are given: containers of any class, and tensors."""

from __future__ import annotations

import copy
import os
import socket
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.parallel.fsdp.arguments import watch_calls
from lightning_shard.parallel.fsdp.bypassed_units import BypassedUnits
from lightning_shard.sharding import full_tensor
from tests.training.pipeline.test_crossing import (
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
from tests.training.pipelines import Root


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

    block = AppendingWithin

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
    """A network in units, and the plain one."""
    plain = Sharded(seeded(network)())
    root = copy.deepcopy(plain)
    mesh = init_device_mesh("cpu", (1,))
    blocks = list(root.net.blocks)  # type: ignore[arg-type]
    fully_shard(root, mesh=mesh, ignored_params={p for block in blocks for p in block.parameters()})
    for block in blocks:
        fully_shard(block, mesh=mesh)
    watch_calls([root, *blocks])
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


def test_what_is_changed_is_seen_around_them() -> None:
    for network in (PassesDict, PassesList, PassesState, ChangesDict, ChangesState, Appends, AppendsWithin):
        root, plain = sharded(network)
        [x, *_] = batches()
        assert_step_alike(root, plain, x)


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class OwnDict(dict[str, Any]):
    """Can't be made from its entries alone."""

    def __init__(self, hidden: Tensor, *, name: str) -> None:
        super().__init__(hidden=hidden)
        self.name = name


class Named(NamedTuple):
    hidden: Any
    sums: list[Tensor]


@dataclass
class Frame:
    hidden: Tensor
    sums: list[Tensor] = field(init=False, default_factory=list)


def hidden_of(given: Any) -> Tensor:
    hidden = given["hidden"] if isinstance(given, (Mapping, UserDict)) else getattr(given, "hidden", None)
    return given[0] if hidden is None else hidden


class Notes(Block):
    """Computes with what is in an object, writes into it what it can, and keeps the object."""

    seen: Any = None

    def forward(self, given: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        self.seen = given, x
        new = super().forward(x + hidden_of(given))
        if isinstance(given, (MutableMapping, UserDict)):
            given["hidden"] = new * 2
        elif isinstance(given, list):
            given[0] = new * 2
        elif isinstance(given, tuple):
            given.sums.append(new.sum())  # type: ignore[attr-defined]
        else:
            given.hidden = new * 2
        return new


KINDS: dict[str, Callable[[Tensor], Any]] = {
    "a dict": lambda hidden: {"hidden": hidden},
    "a class of dicts": lambda hidden: OwnDict(hidden, name="own"),
    "a UserDict": lambda hidden: UserDict(hidden=hidden),
    "a list": lambda hidden: [hidden],
    "a namedtuple": lambda hidden: Named(hidden, []),
    "a dataclass": Frame,
    "slots": Slots,
}


def noting(kind: str) -> type[Net]:
    """A class of networks whose blocks write into one object of this kind."""

    class Noting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Notes() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.embed(x)
            given = KINDS[kind](hidden * 1)
            for block in self.blocks:
                returned = block(given, hidden)
                assert block.seen[0] is given
                assert block.seen[1] is hidden
                hidden = returned
            rest = sum(given.sums) if isinstance(given, Named) else 0
            return self.head(self.norm(hidden + hidden_of(given))) + rest

    return Noting


@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_is_given_the_object_itself_of_whatever_class(kind: str) -> None:
    root, plain = sharded(noting(kind))
    for x in batches()[:2]:
        assert_step_alike(root, plain, x)


def test_arguments_are_moved_as_torch_moves_them_to_a_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_state as states

    as_on_a_cpu = states.FSDPState._root_pre_forward
    calls = []

    def moving(state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What torch 2.11 does with a device: its first argument's place has to be there."""
        is_root_call = state._state_ctx.iter_forward_root is None
        args, kwargs = as_on_a_cpu(state, module, args, kwargs)
        if is_root_call:
            calls.append(module)
            ((args, *_), (kwargs, *_)) = states._to_kwargs(args, kwargs, torch.device("cpu"), False)
        return args, kwargs

    monkeypatch.setattr(states.FSDPState, "_root_pre_forward", moving)
    root, plain = sharded(PassesDict)
    for x in batches()[:2]:
        assert_step_alike(root, plain, x)
    assert calls == [root, root]
