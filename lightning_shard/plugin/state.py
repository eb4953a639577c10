"""A module's and its optimizers' state by name, to and from a checkpoint.

Names are the LightningModule's own state-dict names on every layout; optimizer state is named by parameter:
``"{optimizer}/{parameter}/{key}"``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import checkpoint as ckpt
from lightning_shard.errors import ConfigurationError, StateMismatchError
from lightning_shard.pipeline.stage import Hollow
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
    """
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[id(p)]: dict(state) for p, state in optimizer.state.items()}, "param_groups": groups}


def flatten_optimizer_states(states: Iterable[dict[str, Any]]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors by ``"{optimizer}/{parameter}/{key}"``, and the rest: groups, and values that aren't tensors."""
    tensors: dict[str, Tensor] = {}
    rest: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        values: dict[str, dict[str, Any]] = {}
        for name, entries in state["state"].items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{index}/{name}/{key}"] = value
                else:
                    values.setdefault(name, {})[key] = value
        rest.append({"values": values, "param_groups": state["param_groups"]})
    return tensors, rest


def merge_stages(rests: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One description of the optimizers for all stages, each of which has the same groups of its own names."""
    merged: list[dict[str, Any]] = []
    for rest in rests:
        for index, own in enumerate(rest):
            if index == len(merged):
                merged.append({"values": {}, "param_groups": [{**g, "params": []} for g in own["param_groups"]]})
            merged[index]["values"].update(own["values"])
            for group, own_group in zip(merged[index]["param_groups"], own["param_groups"]):
                group["params"] = group["params"] + own_group["params"]
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
    missing = sorted(state.keys() - stored.keys())
    unexpected = sorted(stored.keys() - state.keys() - set(elsewhere))
    with ckpt.all_or_none():  # a stage may lack what the others have
        if strict and (missing or unexpected):
            raise StateMismatchError(
                f"The checkpoint's tensors aren't the module's: {_some('missing', missing)};"
                f" {_some('unexpected', unexpected)}. Set strict_loading = False on the module to load those they"
                " share."
            )
        pairs = []
        for name, target in own.items():
            value = stored.get(name)
            if isinstance(value, ckpt.StoredTensor):
                pairs.append((value, target.detach()))
            elif isinstance(value, Tensor):
                _fill(name, target, value)
        ckpt.load_tensors(pairs)
        if others:
            whole = {n: v.full() if isinstance(v, ckpt.StoredTensor) else v for n, v in others.items()}
            module.load_state_dict(whole, strict=False)
    return missing, unexpected


def _fill(name: str, target: Tensor, value: Tensor) -> None:
    """Copy this rank's part of a whole tensor that a hook put into the checkpoint."""
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
        if int(owner) == index:
            by_parameter.setdefault(name, {})[entry] = value
    pairs = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            state: dict[str, Any] = dict(rest["values"].get(name, {}))
            for entry, value in by_parameter.get(name, {}).items():
                # torch keeps step counts on the CPU, unless the step itself runs on the device.
                on_device = bool(group.get("capturable") or group.get("fused"))
                target = _like(parameter, value, parameter.device if on_device or value.shape else torch.device("cpu"))
                pairs.append((value, target))
                state[entry] = target
            if state:
                optimizer.state[parameter] = state
    with ckpt.all_or_none():
        ckpt.load_tensors(pairs)


def _like(parameter: Tensor, stored: Any, device: torch.device) -> Tensor:
    """An empty tensor for a stored one: laid out as its parameter where it has the parameter's shape."""
    if stored.shape and tuple(stored.shape) == tuple(parameter.shape):
        return torch.empty_like(parameter.detach(), dtype=stored.dtype)
    return torch.empty(tuple(stored.shape), dtype=stored.dtype, device=device)


def _some(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} {what}{' (' + ', '.join(names[:10]) + more + ')' if names else ''}"
