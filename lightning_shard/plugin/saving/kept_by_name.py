"""Completes what callbacks and hooks keep of each parameter, by its name, in plain tensors that each stage has made.

An average of weights goes over ``named_parameters()``, which has a stage's own parameters. In whole tensors, it is up
to date on each stage for these only, and the first rank's is saved. What is kept as DTensors is saved in parts instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard.dense import is_dense
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps.checks.copies_of_stages import sums_of

_MAPPINGS = (dict, OrderedDict)
_OF_THE_STRATEGY = {"state_dict", "current_model_state", "optimizer_states"}
_Path = tuple[Any, ...]
Shape = tuple[int, ...]


class _Holder(NamedTuple):
    stage: int
    shapes: Collection[Shape]
    """Of its parameters of that name, or of that end."""


def of_holders(
    checkpoint: dict[str, Any], shapes: Mapping[str, Shape], groups: Groups, device: torch.device
) -> dict[str, Any]:
    """The checkpoint, on the last stage with tensors under parameters' names as the stages have them that hold these.

    They are tensors of the parameters' shapes: a callback may keep something else under such a name.

    A collective call over the pipeline.

    Args:
        checkpoint: Not modified.
        shapes: Of this stage's parameters, by name. A key may be a name's end, as of ``module.net.named_parameters()``.
        device: Where this rank computes, which the pipeline's group serves.
    """
    holders = _holders(groups.gather_over_stages(dict(shapes)))
    kept = {key: value for key, value in checkpoint.items() if key not in _OF_THE_STRATEGY}
    found = {path: t for path, t in _tensors(kept, ()) if path[-1] in holders and t.shape in holders[path[-1]].shapes}
    told_here = {path: (sums, found[path].shape, found[path].dtype) for path, sums in sums_of(found).items()}
    stages: list[Mapping[_Path, Any]] = groups.gather_over_stages(told_here)
    last = len(stages) - 1
    for path in dict.fromkeys(path for stage in stages for path in stage):
        holder = holders[path[-1]].stage
        told = stages[holder].get(path)
        if told is None or told == stages[last].get(path):
            continue
        _, shape, dtype = told
        like = found.get(path)
        own = like
        if own is None or (own.shape, own.dtype) != (shape, dtype):
            own = torch.empty(shape, dtype=dtype)
        values = values_of(last - holder, own, groups.pipeline, device)
        if groups.pipeline.rank() == 0:  # the last stage's
            checkpoint = _with(checkpoint, path, values if like is None else values.to(like.device))
    return checkpoint


def _holders(stages: Sequence[Mapping[str, Shape]]) -> dict[Any, _Holder]:
    """The stage that holds a parameter, by the ends of its name, where these tell it; without what all stages hold."""
    of_name: dict[str, list[int]] = {}
    for stage, held in enumerate(stages):
        for name in held:
            of_name.setdefault(name, []).append(stage)
    of_end: dict[str, dict[int, set[Shape]]] = {}
    for name, stage in ((name, at[-1]) for name, at in of_name.items() if len(at) < len(stages)):
        parts = name.split(".")
        for start in range(len(parts)):
            held_by = of_end.setdefault(".".join(parts[start:]), {})
            held_by.setdefault(stage, set()).add(stages[stage][name])
    return {end: _Holder(*next(iter(held.items()))) for end, held in of_end.items() if len(held) == 1}


def _tensors(tree: Any, path: _Path) -> Iterator[tuple[_Path, Tensor]]:
    if type(tree) in (Tensor, nn.Parameter) and is_dense(tree) and path and not tree.is_meta:
        yield path, tree.detach()
    elif type(tree) in _MAPPINGS:
        for key, value in tree.items():
            yield from _tensors(value, (*path, key))
    elif type(tree) in (list, tuple):
        for index, value in enumerate(tree):
            yield from _tensors(value, (*path, index))


def _with(tree: Any, path: _Path, value: Tensor) -> Any:
    """A copy of the tree with ``value`` at ``path``; itself where it has no such place."""
    if not path:
        return value
    key, *rest = path
    if type(tree) in _MAPPINGS:
        copy = type(tree)(tree)
        copy[key] = _with(tree.get(key, {}), tuple(rest), value)
        return copy
    if type(tree) in (list, tuple) and key < len(tree):
        return type(tree)(_with(each, tuple(rest), value) if index == key else each for index, each in enumerate(tree))
    return tree
