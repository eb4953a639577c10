"""Shows ``on_save_checkpoint`` a state of a model as one process has it: with all names, each tensor whole.

A rank holds a part of it. Whole tensors are lazy: the stage that holds values which a hook uses sends them, in a
collective call of the pipeline, whose ranks all run the hook. What hooks have changed is taken apart again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_shard.checkpoint.sharded_values import rebuilt
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.saving.own_loading import LazyTensor, copy_part
from lightning_shard.sharding import full_tensor


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


def shown_whole(own: Mapping[str, Any], groups: Groups, device: torch.device) -> dict[str, Any]:
    """What hooks see of a state that is to be saved, of which this stage has ``own``; a collective call."""
    described = {name: _Like(v.shape, v.dtype) if isinstance(v, Tensor) else v for name, v in own.items()}
    whole: dict[str, Any] = {}
    stages = groups.gather_over_stages(described)
    for stage, entries in enumerate(stages):
        for name, like in entries.items():
            # the group's first rank has the last stage
            send = partial(values_of, len(stages) - 1 - stage, group=groups.pipeline, device=device)
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


def _laid_out(whole: Tensor, like: Tensor) -> Tensor:
    target = torch.empty_like(like.detach(), dtype=whole.dtype)
    return copy_part(target, whole)
