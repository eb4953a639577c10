"""Saving optimizers: converts what ``save`` is passed, in any of torch's forms, to tensors and values keyed by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.optimizers.named import (
    OPTIMIZER_STATES,
    State,
    flatten_optimizer_states,
    listed_in,
    merge_stages,
    named_optimizer_state,
)
from lightning_shard.checkpoint.ranks import Ranks, together
from lightning_shard.checkpoint.tensors import Located, flatten, identity, locate
from lightning_shard.errors import UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def take_apart(
    optimizer: Any, state: State, trainer_state: Any, mesh: DeviceMesh | None, ranks: Ranks
) -> tuple[Mapping[str, Tensor] | None, Any]:
    """Split what ``save`` was passed as ``optimizer``. A collective call, unless it is a mapping of tensors.

    Returns:
        The optimizers' tensors by name, and the trainer state with the rest of the optimizers' state added.
    """
    if optimizer is None or is_by_name(optimizer):
        return optimizer, trainer_state
    tensors: dict[str, Tensor] = {}

    def describe() -> tuple[tuple[int, ...], list[dict[str, Any]]]:
        found, described = flatten_optimizer_states(_named(item, state) for item in several(optimizer))
        tensors.update(found)
        holders = () if mesh is None else tuple(int(rank) for rank in mesh.mesh.flatten())
        # if all ranks hold the same tensors, the first rank's description is complete
        return holders, described if mesh is not None or ranks.first else []

    def complete(everyone: list[tuple[tuple[int, ...], list[dict[str, Any]]]]) -> None:
        nonlocal trainer_state
        described = _merged(everyone)
        if trainer_state is not None and (not isinstance(trainer_state, Mapping) or OPTIMIZER_STATES in trainer_state):
            raise UnsupportedStateError(
                f"trainer_state must be a dict without the key {OPTIMIZER_STATES!r} where an optimizer is saved: its"
                " parameter groups are kept there."
            )
        trainer_state = {**(trainer_state or {}), OPTIMIZER_STATES: described}

    together(ranks, describe, complete)
    return tensors, trainer_state


def is_by_name(optimizer: Any) -> bool:
    return isinstance(optimizer, Mapping) and not is_state_dict(optimizer)


def is_state_dict(value: Mapping[str, Any]) -> bool:
    """Whether a mapping is an optimizer's ``state_dict()``, or one from ``torch.distributed.checkpoint.state_dict``."""
    return isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list)


def several(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _named(optimizer: Any, state: State) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return named_optimizer_state(optimizer, parameter_names([optimizer], state))
    if isinstance(optimizer, Mapping) and is_state_dict(optimizer):
        return named_state_dict(optimizer, flatten(state))
    raise UnsupportedStateError(
        f"optimizer holds a {type(optimizer).__name__}: pass a torch.optim.Optimizer, its state_dict(), what"
        " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives, or a list of these; or one mapping of"
        " names to tensors."
    )


def named_state_dict(content: Mapping[str, Any], parameters: Mapping[str, Tensor] | None) -> dict[str, Any]:
    """An optimizer's state dict keyed by names if these are known; else by the numbers, and ``"numbered"`` is true.

    Args:
        parameters: By name; None: no names are known, and a key that is no number counts as its position, as for torch.
    """
    groups: list[dict[str, Any]] = [dict(group) for group in content["param_groups"]]
    listed = [key for group in groups for key in group["params"]]
    # torch knows the names of an optimizer that was made from named_parameters()
    names = [name for group in groups for name in group.get("param_names", group["params"])]
    numbered = parameters is None or not all(name in parameters for name in names)
    if numbered and parameters is not None and not all(isinstance(key, int) for key in listed):
        lost = [name for name in names if name not in parameters]
        raise UnsupportedStateError(
            f"The optimizer's state is of {lost[0]!r}, which isn't in state: pass the module that it optimizes."
        )
    if numbered:
        names = [str(key if isinstance(key, int) else position) for position, key in enumerate(listed)]
    find = dict(zip(listed, names, strict=True))
    for group in groups:
        group["params"] = [find[key] for key in group["params"]]
    return {
        "numbered": numbered,
        "state": {find[key]: dict(entries) for key, entries in content["state"].items() if key in find},
        "shared": {key: value for key, value in content["state"].items() if key not in find},
        "param_groups": groups,
        "parameters": {} if numbered or parameters is None else {name: parameters[name] for name in names},
    }


def _merged(everyone: list[tuple[tuple[int, ...], list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Merge the descriptions of every mesh's first rank to one."""
    by_mesh: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for holders, described in everyone:
        by_mesh.setdefault(holders, described)
    stages = list(by_mesh.values())
    if len(stages) > 1 and any(optimizer.get("numbered") for stage in stages for optimizer in stage):
        raise UnsupportedStateError(
            "An optimizer's state_dict() numbers its parameters, and each pipeline stage numbers from 0: pass the"
            " optimizer itself, whose parameters have names."
        )
    names = dict.fromkeys(name for stage in stages for listed in listed_in(stage) for name in listed)
    order = {name: number for number, name in enumerate(names)}
    return merge_stages(stages, lambda _: order)


def parameter_names(optimizers: Iterable[torch.optim.Optimizer], state: State) -> dict[int, str]:
    """Find the names of the optimizers' parameters: ``id(parameter)`` to name.

    ``state`` is the module, or has tensors that share the parameters' memory.
    """
    if isinstance(state, torch.nn.Module):
        tensors: Iterable[tuple[str, Tensor]] = state.named_parameters(remove_duplicate=False)
    else:
        tensors = flatten(state).items()
    by_id: dict[int, str] = {}
    by_memory: dict[Any, str] = {}
    without_memory: list[Located] = []
    for name, tensor in tensors:
        by_id.setdefault(id(tensor), name)
        located = locate(name, tensor)
        memory = identity(located)
        if memory is not None:
            by_memory.setdefault(memory, name)
        elif located.local.layout is torch.strided and not located.local.is_meta:
            without_memory.append(located)
    found = {}
    for optimizer, parameter in ((o, p) for o in optimizers for group in o.param_groups for p in group["params"]):
        known = by_id.get(id(parameter), by_memory.get(identity(locate("", parameter))))
        own = _of_one_storage(parameter, without_memory) if known is None else [known]
        if len(own) != 1:
            why = f"whose shard is empty on this rank, so it may be any of {own}" if own else "that isn't in the state"
            raise UnsupportedStateError(
                f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} {why}: pass the module"
                " that it optimizes, and make the optimizer after the module was sharded."
            )
        (found[id(parameter)],) = own
    return found


def _of_one_storage(parameter: Tensor, empty: Sequence[Located]) -> list[str]:
    """The names of those tensors with an empty shard on this rank that are views of the parameter's storage."""
    _, local, spread = locate("", parameter)
    alike = [other for other in empty if other.spread is spread and other.local.device == local.device]
    return [other.name for other in alike if local.layout is torch.strided and other.local.is_set_to(local)]
