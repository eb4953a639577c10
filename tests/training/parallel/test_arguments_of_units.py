"""Blocks that FSDP2 gathers get the objects that they are given: containers of any class, and tensors, to be changed.

FSDP2 gives its units copies of containers, and views of tensors, whose changes in place autograd would refuse.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard import _fsdp_state as states
from torch.nn import functional as F

from tests.alike import Trains, assert_train_alike
from tests.parity import layout
from tests.refusals import Refusal, assert_refused
from tests.training.parallel.small import Descends
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
)


class OfNet(Descends):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss(self, batch)


def samples() -> list[Tensor]:
    """Equal ones in each batch, so that a mean over a rank's is one over all."""
    return [x[:1].repeat(4, 1) for x in batches()]


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
            given.sums.append(new.mean())  # type: ignore[attr-defined]
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


class Noting(Net):
    """Its blocks write into one object of a kind."""

    block = Notes

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        given = KINDS[self.kind](hidden * 1)
        for block in self.blocks:
            returned = block(given, hidden)
            assert block.seen[0] is given
            assert block.seen[1] is hidden
            hidden = returned
        rest = sum(given.sums) if isinstance(given, Named) else 0
        return self.head(self.norm(hidden + hidden_of(given))) + rest


# -- changed in place


class BeginsWithReLU(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(F.relu(x, inplace=True))


class Adds(Block):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x += super().forward(x * 1)
        return x


class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.embed(x)))


class InPlaceReLU(InPlace):
    block = BeginsWithReLU


class InPlaceSum(InPlace):
    block = Adds


class UsesWhatItGave(InPlaceSum):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            given = hidden * 1
            hidden = block(given) + given
        return self.head(self.norm(hidden))


class Flow(Block):
    def forward(self, x: Tensor, state: list[Tensor]) -> Tensor:  # type: ignore[override]
        moved = super().forward(x)
        state[0] += moved.tanh().sum(-1)
        return moved


class Flows(InPlace):
    """A sum that no block returns, in a list."""

    block = Flow

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        state = [torch.zeros(hidden.shape[:-1])]
        for block in self.blocks:
            hidden = block(hidden, state)
        return self.head(self.norm(hidden)) * state[0].unsqueeze(-1)


class AddsLater(Block):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        self.calls += 1
        if self.calls > 1:
            x += 1
        return super().forward(x * 1)


class ChangesLater(InPlace):
    block = AddsLater


class OfTwo(Block):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:  # type: ignore[override]
        x += super().forward(other * 1)
        return x


class GivesAView(InPlace):
    block = OfTwo

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, hidden.view_as(hidden))
        return self.head(self.norm(hidden))


class Saves(InPlaceSum):
    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.through(self.embed(x).exp()))  # which its backward needs


# -- as on a device

MOVED: list[nn.Module] = []
as_on_a_cpu = states.FSDPState._root_pre_forward


def moving(state: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What torch 2.11 does with a device: its first argument's place has to be there."""
    is_root_call = state._state_ctx.iter_forward_root is None
    args, kwargs = as_on_a_cpu(state, module, args, kwargs)
    if is_root_call:
        MOVED.append(module)
        ((args, *_), (kwargs, *_)) = states._to_kwargs(args, kwargs, torch.device("cpu"), False)
    return args, kwargs


class AsOnADevice(OfNet):
    def on_fit_start(self) -> None:
        states.FSDPState._root_pre_forward = moving  # type: ignore[method-assign]

    def on_fit_end(self) -> None:
        states.FSDPState._root_pre_forward = as_on_a_cpu  # type: ignore[method-assign]
        assert MOVED or self.trainer.world_size == 1


GIVEN = (PassesDict, PassesList, PassesState, ChangesDict, ChangesState, Appends, AppendsWithin)
CHANGED = (InPlaceReLU, UsesWhatItGave, Flows, ChangesLater, GivesAView)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{network.__name__: network for network in (*GIVEN, *CHANGED)},
    **{kind: partial(Noting, kind) for kind in KINDS},
}


def test_what_units_change_in_what_they_are_given_is_seen_around_them() -> None:
    cases = {name: Trains(partial(OfNet, network), samples, "dp2") for name, network in NETWORKS.items()}
    assert_train_alike({**cases, "as on a device": Trains(partial(AsOnADevice, PassesDict), samples, "dp2")})


def test_what_is_saved_for_backwards_is_still_guarded() -> None:
    make = partial(OfNet, Saves)
    in_place = "modified by an inplace operation"
    assert_refused({"saved": Refusal(layout(data=2), make, RuntimeError, in_place, batches=samples)})
