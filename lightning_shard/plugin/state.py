"""A module's and its optimizers' state by name, to and from a checkpoint.

Names are the LightningModule's own state-dict names on every layout; optimizer state is named by parameter:
``"{optimizer}/{parameter}/{key}"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_shard import checkpoint as ckpt
from lightning_shard.errors import ConfigurationError, StateMismatchError, UnsupportedStateError
from lightning_shard.pipeline.stage import Hollow
from lightning_shard.pipeline.tree import map_leaves, walk
from lightning_shard.plugin.sharded_values import lift
from lightning_shard.sharding import full_tensor, local_part, local_tensor


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """Leave out of each group what another stage holds; refuse what isn't the module's.

    Args:
        names: ``id(parameter)`` to name, of this rank's parameters.

    Raises:
        ConfigurationError: An optimizer over parameters that the module hasn't, as of before it was sharded.
    """
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if not isinstance(parameter, Hollow)]
            if any(id(parameter) not in names for parameter in group["params"]):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds parameters that aren't the module's, since it was made before"
                    " the module was sharded: make it in configure_optimizers, from self.parameters()."
                )


def named_optimizer_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """An optimizer's state dict with parameters' names in place of its numbers.

    Args:
        optimizer: Over this rank's parameters.
        names: ``id(parameter)`` to name.

    Returns:
        ``"state"`` by parameter's name, ``"shared"`` with what is the state of none, ``"param_groups"``, and the
        ``"parameters"`` by name.

    Raises:
        UnsupportedStateError: The optimizer's own state dict has more than torch's.
    """
    more = optimizer.state_dict().keys() - {"state", "param_groups"}
    if more:
        raise UnsupportedStateError(
            f"{type(optimizer).__name__} keeps {', '.join(map(repr, sorted(more)))} beside 'state' and 'param_groups',"
            " which no layout knows how to divide: have it keep that in its state, or save it in"
            " LightningModule.on_save_checkpoint and leave it out of the optimizer's state_dict."
        )
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    return {
        "state": {names[id(p)]: dict(state) for p, state in optimizer.state.items() if isinstance(p, Tensor)},
        "shared": {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)},
        "param_groups": groups,
        "parameters": parameters,
    }


def flatten_optimizer_states(states: Iterable[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors by ``"{optimizer}/{parameter}/{key}"``, and the rest: groups, and values that aren't tensors.

    A DTensor inside a list or dict, or of another shape than its parameter, is among both: the rest refers to it.
    """
    tensors: dict[str, Tensor] = {}
    rest: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        values: dict[str, dict[str, Any]] = {}
        for name, entries in state["state"].items():
            shape = state["parameters"][name].shape
            for key, value in entries.items():
                label = f"{index}/{name}/{key}"
                if isinstance(value, Tensor) and not (isinstance(value, DTensor) and value.shape != shape):
                    tensors[label] = value
                else:
                    values.setdefault(name, {})[key], lifted = lift(value, label)
                    tensors.update(lifted)
        rest.append({"values": values, "shared": state["shared"], "param_groups": state["param_groups"]})
    return tensors, rest


def merge_stages(rests: Iterable[list[dict[str, Any]]], order: Mapping[str, int]) -> list[dict[str, Any]]:
    """One description of the optimizers for all stages, each of which has the same groups of its own names.

    Args:
        order: Each parameter's place in the whole module. Groups that go through it in that order on every stage do so
            in the result, so that they are those of one process.
    """
    merged: list[dict[str, Any]] = []
    in_order: dict[tuple[int, int], bool] = {}
    for rest in rests:
        for index, own in enumerate(rest):
            if index == len(merged):
                groups = [{**group, "params": []} for group in own["param_groups"]]
                merged.append({"values": {}, "shared": own["shared"], "param_groups": groups})
            merged[index]["values"].update(own["values"])
            for number, (group, own_group) in enumerate(zip(merged[index]["param_groups"], own["param_groups"])):
                places = [order[name] for name in own_group["params"]]
                in_order[index, number] = in_order.get((index, number), True) and places == sorted(places)
                group["params"] = group["params"] + own_group["params"]
    for (index, number), kept in in_order.items():
        if kept:
            merged[index]["param_groups"][number]["params"].sort(key=order.__getitem__)
    return merged


def load_module(
    module: nn.Module,
    stored: Mapping[str, Any],
    elsewhere: Iterable[str],
    *,
    strict: bool,
    also: Iterable[str] = (),
) -> tuple[list[str], list[str]]:
    """Fill a module's parameters and buffers, in place.

    Args:
        module: Cut and sharded.
        stored: Names to stored tensors (a checkpoint's, or plain ones that a hook put in their place).
        elsewhere: Names that other stages fill.
        strict: Refuse missing and unexpected names.
        also: Buffers that are filled too, though they are another stage's state.

    Returns:
        Missing and unexpected names.

    Raises:
        StateMismatchError: Shapes that differ; with ``strict``, names.
    """
    state = module.state_dict(keep_vars=True)
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    live = {name for name, _ in (*parameters, *buffers)}
    own = {name: state[name] for name in state if name in live}
    own |= {name: module.get_buffer(name) for name in also if name in stored}
    # What a module keeps in other ways (extra state, a metric's state) goes in as it would come from a plain
    # checkpoint.
    others = {name: stored[name] for name in state if name in stored and name not in live}
    found = {id(tensor) for name, tensor in state.items() if name in stored}
    missing = sorted(name for name, tensor in state.items() if name not in stored and id(tensor) not in found)
    unexpected = sorted(stored.keys() - state.keys() - set(elsewhere))

    def pairs() -> list[ckpt.Pair]:
        if strict and (missing or unexpected):  # a stage may lack what the others have
            raise StateMismatchError(
                f"The checkpoint's tensors aren't the module's: {_some('missing', missing)};"
                f" {_some('unexpected', unexpected)}. Set strict_loading = False on the module to load those they"
                " share."
            )
        return _pairs(own, stored)

    ckpt.load_together(pairs)
    with ckpt.all_or_none():
        if others:
            whole = {n: v.full() if isinstance(v, ckpt.StoredTensor) else v for n, v in others.items()}
            module.load_state_dict(whole, strict=False)
    return missing, unexpected


def fill(targets: Mapping[str, Tensor], stored: Mapping[str, Any], *, strict: bool) -> None:
    """Fill tensors, in place, by name, from stored or plain ones; a collective call.

    Raises:
        StateMismatchError: Shapes that differ; with ``strict``, names that are missing.
    """

    def pairs() -> list[ckpt.Pair]:
        missing = sorted(targets.keys() - stored.keys())
        if strict and missing:
            raise StateMismatchError(f"The checkpoint's tensors aren't the average's: {_some('missing', missing)}.")
        return _pairs(targets, stored)

    ckpt.load_together(pairs)


def _pairs(targets: Mapping[str, Tensor], stored: Mapping[str, Any]) -> list[ckpt.Pair]:
    """What is to be read into which tensor; values that aren't stored ones are copied at once."""
    pairs = []
    for name, target in targets.items():
        value = stored.get(name)
        if isinstance(value, ckpt.StoredTensor):
            pairs.append((value, target.detach()))
        elif isinstance(value, Tensor):
            _copy_part(name, target, value)
    return pairs


def _copy_part(name: str, target: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a whole tensor that a hook put into the checkpoint, or of one that is laid out alike."""
    if value.shape != target.shape:
        raise StateMismatchError(
            f"{name} has shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} in the module."
        )
    full = full_tensor(value)
    local_tensor(target).copy_(local_part(full, target) if isinstance(target, DTensor) else full)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    index: int,
    names: Mapping[int, str],
    stored: Mapping[str, Any],
    rest: dict[str, Any],
) -> None:
    """Fill an optimizer's state, in place, its tensors sharded like their parameters.

    Args:
        optimizer: Over this rank's parameters.
        index: Which of the run's optimizers it is.
        names: ``id(parameter)`` to name.
        stored: The checkpoint's optimizer tensors by ``"{optimizer}/{parameter}/{key}"``.
        rest: What :func:`flatten_optimizer_states` kept beside them.

    Raises:
        StateMismatchError: Another number of parameter groups.
    """
    groups = rest["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise StateMismatchError(
            f"The checkpoint's optimizer {index} has {len(groups)} parameter groups, and configure_optimizers made"
            f" {len(optimizer.param_groups)}: make the same groups."
        )
    for group, saved in zip(optimizer.param_groups, groups):
        group.update({key: value for key, value in saved.items() if key != "params"})
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in stored.items():
        owner, name, entry = key.split("/", 2)
        if owner == str(index):
            by_parameter.setdefault(name, {})[entry] = value
    optimizer.state.update(rest.get("shared", {}))
    pairs: list[ckpt.Pair] = []
    for group in optimizer.param_groups:
        # torch keeps step counts on the CPU, unless the step itself runs on the device.
        step_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            name = names[id(parameter)]
            values = rest["values"].get(name, {})
            referred = {value.name for _, value in walk(values) if isinstance(value, ckpt.StoredTensor)}
            state: dict[str, Any] = {}
            for entry, value in {**by_parameter.get(name, {}), **values}.items():
                if entry in values or value.name not in referred:
                    device = torch.device("cpu") if entry == "step" and not step_on_device else parameter.device
                    state[entry] = _placed(value, parameter, device, entry in values, pairs)
            if state:
                optimizer.state[parameter] = state
    ckpt.load_together(lambda: pairs)


def _placed(value: Any, parameter: Tensor, device: torch.device, referred: bool, pairs: list[ckpt.Pair]) -> Any:
    """A parameter's state with empty tensors for the stored ones, which are added to ``pairs``.

    Args:
        device: For what is no DTensor.
        referred: The state refers to the stored tensors, which were DTensors then.
    """

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, ckpt.StoredTensor):
            return leaf.to(device) if isinstance(leaf, Tensor) else leaf
        if leaf.shape and leaf.shape == parameter.shape:
            target: Tensor = torch.empty_like(parameter.detach(), dtype=leaf.dtype)
        else:
            target = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            if referred and isinstance(parameter, DTensor):
                mesh = parameter.device_mesh
                target = DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
        pairs.append((leaf, target))
        return target

    return map_leaves(place, value)


def _some(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} {what}{' (' + ', '.join(names[:10]) + more + ')' if names else ''}"
