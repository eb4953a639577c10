"""The stored form of torch optimizers: state keyed by parameter name, so that it can be restored on any layout.

Tensors are in the checkpoint's ``optimizer`` section, named ``"{optimizer}/{parameter}/{key}"``. Other values and the
groups are in the trainer state under ``optimizer_states``, with an entry for each optimizer: ``values`` by parameter
and key, ``shared`` (state that belongs to no parameter), and ``param_groups`` with parameters' names. Trainers write
the same form, so a Trainer and a plain loop can resume from each other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.loading.stored import StoredTensor
from lightning_shard.checkpoint.sharded_values import lift
from lightning_shard.checkpoint.tensors import is_dtensor
from lightning_shard.errors import StateMismatchError, UnsupportedStateError

OPTIMIZER_STATES = "optimizer_states"
"""Key of the trainer state for everything of optimizers but the tensors of the ``optimizer`` section."""
NAMES_OF_NOTHING_ELSE = {"params", "param_names"}
"""The keys of a parameter group that list its parameters; all others are hyperparameters."""

State = Mapping[str, Any] | torch.nn.Module


def apart(path: str) -> tuple[str, str, str]:
    """The optimizer, the parameter and the key of a tensor's name. Parameters' names may contain ``/``; keys don't."""
    owner, _, rest = path.partition("/")
    name, _, key = rest.rpartition("/")
    return owner, name, key


def listed_in(states: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    """Each optimizer's parameters, in the order of its groups."""
    return [[name for group in state["param_groups"] for name in group["params"]] for state in states]


def named_optimizer_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], elsewhere: Collection[str] = ()
) -> dict[str, Any]:
    """An optimizer's state dict, keyed by parameter names instead of numbers.

    Args:
        names: ``id(parameter)`` to name.
        elsewhere: Names of parameters that are left out, since another rank saves them.
    """
    more = optimizer.state_dict().keys() - {"state", "param_groups"}
    if more:
        raise UnsupportedStateError(
            f"{type(optimizer).__name__}.state_dict() has {', '.join(map(repr, sorted(more)))} in addition to 'state'"
            " and 'param_groups', which can't be sharded: have it keep that in its state, or save it in the trainer"
            " state (LightningModule.on_save_checkpoint) and leave it out of the optimizer's state_dict."
        )
    states = {names[id(p)]: dict(state) for p, state in optimizer.state.items() if isinstance(p, Tensor)}
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    listed = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return {
        "state": {name: state for name, state in states.items() if name not in elsewhere},
        "shared": {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
        "param_groups": [
            {**group, "params": [name for name in own if name not in elsewhere]}
            for group, own in zip(optimizer.param_groups, listed)
        ],
        "parameters": {name: p for name, p in parameters.items() if name not in elsewhere},
    }


def flatten_optimizer_states(states: Iterable[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Split optimizers' states into tensors by ``"{optimizer}/{parameter}/{key}"``, and the rest (groups and values).

    A DTensor that is inside a list or dict, or hasn't its parameter's shape, is among the tensors, and the rest has a
    reference to it.

    Args:
        states: Results of :func:`named_optimizer_state`; ``"parameters"`` may lack unknown ones.
    """
    tensors: dict[str, Tensor] = {}
    rest: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        values: dict[str, dict[str, Any]] = {}
        for name, entries in state["state"].items():
            parameter = state["parameters"].get(name)
            for key, value in entries.items():
                label = f"{index}/{name}/{key}"
                whole = parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape
                lifted = {label: value}
                # tensors' names need string keys without slashes; only the rest can have other keys
                is_name = isinstance(key, str) and "/" not in key
                if not (is_name and isinstance(value, Tensor) and (whole or not is_dtensor(value))):
                    values.setdefault(name, {})[key], lifted = lift(value, label)
                if taken := tensors.keys() & lifted.keys():
                    raise UnsupportedStateError(
                        f"Two tensors of an optimizer's state are named {taken.pop()!r} once keys are joined by '/':"
                        " rename one."
                    )
                tensors.update(lifted)
        numbered = {"numbered": True} if state.get("numbered") else {}
        rest.append({**numbered, "values": values, "shared": state["shared"], "param_groups": state["param_groups"]})
    return tensors, rest


def merge_stages(
    rests: Iterable[list[dict[str, Any]]], order_of: Callable[[int], Mapping[str, int]]
) -> list[dict[str, Any]]:
    """Merge all stages' descriptions of the optimizers; each stage has the same groups, with its own parameters.

    Args:
        rests: Each stage's second result of :func:`flatten_optimizer_states`.
        order_of: Each parameter's position in the optimizer of a number, as one process would make it. A group that is
            in that order on every stage is in that order in the result, too.
    """
    order_of = cache(order_of)
    merged: list[dict[str, Any]] = []
    in_order: dict[tuple[int, int], bool] = {}
    for rest in rests:
        for index, own in enumerate(rest):
            if index == len(merged):
                groups = [{**group, "params": []} for group in own["param_groups"]]
                merged.append({**own, "values": {}, "param_groups": groups})
            merged[index]["values"].update(own["values"])
            for number, (group, own_group) in enumerate(zip(merged[index]["param_groups"], own["param_groups"])):
                order = order_of(index)
                places = [order[name] for name in own_group["params"]]
                in_order[index, number] = in_order.get((index, number), True) and places == sorted(places)
                group["params"] = group["params"] + own_group["params"]
    for (index, number), kept in in_order.items():
        if kept:
            merged[index]["param_groups"][number]["params"].sort(key=order_of(index).__getitem__)
    return merged


def name_numbered(
    tensors: Mapping[str, StoredTensor], states: Sequence[dict[str, Any]], names: Sequence[Sequence[Sequence[str]]]
) -> tuple[dict[str, StoredTensor], list[dict[str, Any]]]:
    """Replace parameter numbers, as plain torch saves them, by names; states that have names already are unchanged.

    Args:
        tensors: By ``"{optimizer}/{number}/{key}"``, or with the parameter's name instead of the number.
        names: The names of all stages' parameters, for each optimizer and group, in the order of the groups.
    """
    found: list[dict[str, str] | None] = []
    for index, (state, groups) in enumerate(zip(states, names, strict=True)):
        if not state.get("numbered"):
            found.append(None)
            continue
        saved = [group["params"] for group in state["param_groups"]]
        if (theirs := [*map(len, saved)]) != (ours := [*map(len, groups)]):
            raise StateMismatchError(
                f"The checkpoint's optimizer {index} has groups of {theirs} parameters, and the one here has groups of"
                f" {ours}: make the same groups."
            )
        named = {number: name for numbers, group in zip(saved, groups) for number, name in zip(numbers, group)}
        if lost := sorted(state["values"].keys() - named.keys()):
            raise StateMismatchError(
                f"The checkpoint's optimizer {index} has state of a parameter {lost[0]} that none of its groups lists:"
                " save it by the optimizer's own state_dict()."
            )
        found.append(named)
    return with_names(tensors, states, found)


def with_names(
    tensors: Mapping[str, Any], states: Sequence[dict[str, Any]], names: Sequence[Mapping[str, str] | None]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Optimizers' tensors and states with new names of parameters, which ``names`` has for each optimizer by the old
    ones (None: they stay). A parameter without a new name is left out."""

    def named(state: dict[str, Any], new: Mapping[str, str]) -> dict[str, Any]:
        own = [[new[name] for name in group["params"] if name in new] for group in state["param_groups"]]
        groups = [{**group, "params": params} for group, params in zip(state["param_groups"], own)]
        values = {new[name]: entries for name, entries in state["values"].items() if name in new}
        return {**state, "numbered": False, "values": values, "param_groups": groups}

    described = [state if new is None else named(state, new) for state, new in zip(states, names, strict=True)]
    by_owner = {str(index): new for index, new in enumerate(names) if new is not None}
    found: dict[str, Any] = {}
    for path, stored in tensors.items():
        owner, name, key = apart(path)
        new = by_owner.get(owner)
        if new is None:
            found[path] = stored
        elif name in new:
            found[f"{owner}/{new[name]}/{key}"] = stored
    return found, described
