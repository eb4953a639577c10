"""Shows users' hooks each state of a model in a checkpoint as one process has it: with all names, each tensor whole.

A rank holds a part of it. Whole tensors are lazy: while loading, values that a hook uses are read from the checkpoint;
while saving, the stage that holds them sends them, in a collective call of the pipeline, whose ranks all run the hook.
What hooks have changed is taken apart again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint import StoredTensor
from lightning_shard.checkpoint.sharded_values import rebuilt
from lightning_shard.errors import CheckpointError
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.saving.own_loading import LazyTensor, as_lazy, copy_part
from lightning_shard.sharding import full_tensor

COME_S = 60
"""How long a rank waits for the others to use the same values."""


class _Like(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class _Held:
    """A tensor that some stage holds: what a :class:`LazyTensor` reads, by a collective call of the pipeline."""

    def __init__(self, own: Tensor | None, like: _Like, send: Callable[[Tensor], Tensor]) -> None:
        self.own = own
        self.shape, self.dtype = like
        self._send = send

    def full(self) -> Tensor:
        empty = torch.empty(self.shape, dtype=self.dtype)
        return self._send(empty if self.own is None else full_tensor(self.own.detach())).cpu()


def _send(name: str, source: int, groups: Groups, device: torch.device, own: Tensor) -> Tensor:
    try:
        dist.monitored_barrier(groups.control, timedelta(seconds=COME_S))
    except RuntimeError as error:
        raise CheckpointError(
            f"on_save_checkpoint uses the values of {name!r} in the checkpoint on some ranks only: the stage that holds"
            f" them sends them to all, and after {COME_S} s some haven't asked. Use them on all ranks, as outside of"
            " rank_zero_only."
        ) from error
    return values_of(source, own, groups.pipeline, device)


def shown_whole(own: Mapping[str, Any], groups: Groups, device: torch.device) -> dict[str, Any]:
    """What hooks see of a state that is to be saved, of which this stage has ``own``; a collective call."""
    described = {name: _Like(v.shape, v.dtype) if isinstance(v, Tensor) else v for name, v in own.items()}
    whole: dict[str, Any] = {}
    stages = groups.gather_over_stages(described)
    for stage, entries in enumerate(stages):
        for name, like in entries.items():
            # the group's first rank has the last stage
            send = partial(_send, name, len(stages) - 1 - stage, groups, device)
            whole[name] = LazyTensor.of(_Held(own.get(name), like, send)) if isinstance(like, _Like) else like
    return whole


def own_parts(tree: Any) -> Any:
    """This rank's parts of what was shown, wherever hooks have put it, changed or not; a collective call."""
    if isinstance(tree, LazyTensor):
        return tree.plain()
    if type(tree) not in (dict, OrderedDict):
        return rebuilt(tree, lambda _, value: own_parts(value))
    parts: dict[Any, Any] = type(tree)()
    for key, value in tree.items():
        held = value.source if isinstance(value, LazyTensor) else None
        if not isinstance(held, _Held):
            parts[key] = own_parts(value)
        elif held.own is not None:
            parts[key] = held.own if value.content is held else _laid_out(value, held.own)
    return parts


class ShownWhole(dict[Any, Any]):
    """A model's state among callbacks' in a loaded checkpoint, as hooks see it.

    A deep copy, which Lightning gives to a callback's ``load_state_dict``, is this rank's part of it.
    """

    def __init__(self, state: Mapping[Any, Any], live: Mapping[str, Tensor], elsewhere: Collection[str]) -> None:
        super().__init__(as_lazy(state))
        self._live, self._elsewhere = live, elsewhere

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[Any, Any]:
        part = {}
        for name, value in self.items():
            like = self._live.get(name)
            if isinstance(value, Tensor) and like is not None and like.shape == value.shape:
                part[name] = _laid_out(value, like)
            elif name not in self._elsewhere:
                part[name] = value.plain() if isinstance(value, LazyTensor) else deepcopy(value, memo)
        return part


def show_kept(tree: Any, live: Mapping[str, Tensor], elsewhere: Collection[str]) -> Any:
    """Callbacks' states with each mapping of stored tensors as :class:`ShownWhole`."""
    if isinstance(tree, dict) and any(isinstance(value, StoredTensor) for value in tree.values()):
        return ShownWhole(tree, live, elsewhere)
    return rebuilt(tree, lambda _, value: show_kept(value, live, elsewhere))


def _laid_out(whole: Tensor, like: Tensor) -> Tensor:
    target = torch.empty_like(like.detach(), dtype=whole.dtype)
    return copy_part(target, whole)
