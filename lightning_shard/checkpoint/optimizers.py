"""Torch optimizers to a checkpoint and back: their state by parameter's name, so that it comes back on any layout.

Tensors are in the checkpoint's ``optimizer`` section, named ``"{optimizer}/{parameter}/{key}"``. What isn't a tensor,
and the groups, are in the trainer state under ``optimizer_states``, an entry for each optimizer: ``values`` by
parameter and key, ``shared`` (state that is of no parameter), ``param_groups`` with parameters' names. Trainers write
the same, so each reads the other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.format import codec
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor, StoredTensors
from lightning_shard.checkpoint.names import Rename, new_names
from lightning_shard.checkpoint.ranks import Ranks, together
from lightning_shard.checkpoint.sharded_values import lift, rebuilt
from lightning_shard.checkpoint.tensors import Located, flatten, identity, is_dtensor, locate
from lightning_shard.errors import StateMismatchError, UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OPTIMIZER_STATES = "optimizer_states"
"""Where the trainer state has what isn't a tensor of the ``optimizer`` section."""
_NAMES_OF_NOTHING_ELSE = {"params", "param_names"}
"""The keys of a parameter group that name its parameters; all others are hyperparameters."""

State = Mapping[str, Any] | torch.nn.Module


# -- an optimizer's state by name -------------------------------------------------------------------------------------


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
            " which no layout knows how to divide: have it keep that in its state, or save it in the trainer state"
            " (LightningModule.on_save_checkpoint) and leave it out of the optimizer's state_dict."
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

    Args:
        states: As :func:`named_optimizer_state` gives them; ``"parameters"`` may lack those that aren't known.

    Raises:
        UnsupportedStateError: A parameter's name has a ``/``, which parts the names of the optimizer's tensors.
    """
    tensors: dict[str, Tensor] = {}
    rest: list[dict[str, Any]] = []
    for index, state in enumerate(states):
        values: dict[str, dict[str, Any]] = {}
        for name, entries in state["state"].items():
            if "/" in name:
                raise UnsupportedStateError(f"{name!r}: an optimizer's parameter can't have a '/' in its name: rename.")
            parameter = state["parameters"].get(name)
            for key, value in entries.items():
                label = f"{index}/{name}/{key}"
                whole = parameter is not None and isinstance(value, Tensor) and value.shape == parameter.shape
                if isinstance(value, Tensor) and (whole or not is_dtensor(value)):
                    tensors[label] = value
                else:
                    values.setdefault(name, {})[key], lifted = lift(value, label)
                    tensors.update(lifted)
        flags = {flag: True for flag in ("numbered", "flattened") if state.get(flag)}
        rest.append({**flags, "values": values, "shared": state["shared"], "param_groups": state["param_groups"]})
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
                merged.append({**own, "values": {}, "param_groups": groups})
            merged[index]["values"].update(own["values"])
            for number, (group, own_group) in enumerate(zip(merged[index]["param_groups"], own["param_groups"])):
                places = [order[name] for name in own_group["params"]]
                in_order[index, number] = in_order.get((index, number), True) and places == sorted(places)
                group["params"] = group["params"] + own_group["params"]
    for (index, number), kept in in_order.items():
        if kept:
            merged[index]["param_groups"][number]["params"].sort(key=order.__getitem__)
    return merged


def name_numbered(
    tensors: Mapping[str, StoredTensor], states: Sequence[dict[str, Any]], names: Sequence[Sequence[Sequence[str]]]
) -> tuple[dict[str, StoredTensor], list[dict[str, Any]]]:
    """Optimizers' state that plain torch numbered by parameter, named by it; what has names already is left as it is.

    Args:
        tensors: By ``"{optimizer}/{number}/{key}"``, or parameter in place of the number where that is known.
        states: Each optimizer's values that aren't tensors, and its groups.
        names: Of all stages' parameters, for each optimizer and group, in the order of the optimizer's groups.

    Raises:
        StateMismatchError: Other groups, or others' sizes.
    """
    named: list[dict[str, Any]] = []
    by_number: dict[str, dict[str, str]] = {}
    for index, (state, groups) in enumerate(zip(states, names, strict=True)):
        if not state.get("numbered"):
            named.append(state)
            continue
        saved = [group["params"] for group in state["param_groups"]]
        if [len(numbers) for numbers in saved] != [len(group) for group in groups]:
            raise StateMismatchError(
                f"The checkpoint's optimizer {index} has groups of {[len(numbers) for numbers in saved]} parameters,"
                f" and the one here has groups of {[len(group) for group in groups]}: make the same groups."
            )
        find = {number: name for numbers, group in zip(saved, groups) for number, name in zip(numbers, group)}
        by_number[str(index)] = find
        described = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], groups)]
        values = {find[number]: entries for number, entries in state["values"].items()}
        named.append({**state, "numbered": False, "values": values, "param_groups": described})

    def new(path: str) -> str:
        owner, _, rest = path.partition("/")
        number, _, key = rest.partition("/")
        return f"{owner}/{by_number[owner][number]}/{key}" if owner in by_number else path

    return {new(path): stored for path, stored in tensors.items()}, named


# -- what save is given -----------------------------------------------------------------------------------------------


def take_apart(
    optimizer: Any, state: State, trainer_state: Any, mesh: DeviceMesh | None, ranks: Ranks
) -> tuple[Mapping[str, Tensor] | None, Any]:
    """The tensors by name of what ``save`` was given as ``optimizer``, and the trainer state with the rest of it.

    A collective call, but for tensors by name, which are taken as they are.

    Raises:
        UnsupportedStateError: Parameters that aren't in ``state``; a trainer state that has no place for the rest.
    """
    if optimizer is None or _is_by_name(optimizer):
        return optimizer, trainer_state
    tensors: dict[str, Tensor] = {}

    def describe() -> tuple[tuple[int, ...], list[dict[str, Any]]]:
        found, described = flatten_optimizer_states(_named(item, state) for item in _several(optimizer))
        tensors.update(found)
        holders = () if mesh is None else tuple(int(rank) for rank in mesh.mesh.flatten())
        # where all ranks hold the same, the first one's description is that of all
        return holders, described if mesh is not None or ranks.first else []

    def complete(everyone: list[tuple[tuple[int, ...], list[dict[str, Any]]]]) -> None:
        nonlocal trainer_state
        trainer_state = _with_states(trainer_state, _merged(everyone))

    together(ranks, describe, complete)
    return tensors, trainer_state


def _is_by_name(optimizer: Any) -> bool:
    return isinstance(optimizer, Mapping) and not _is_state_dict(optimizer) and not _is_flattened(optimizer)


def _is_state_dict(value: Mapping[str, Any]) -> bool:
    """Of an optimizer itself, or as ``torch.distributed.checkpoint.state_dict`` names it."""
    return isinstance(value.get("state"), Mapping) and isinstance(value.get("param_groups"), list)


def _is_flattened(value: Mapping[str, Any]) -> bool:
    """As ``get_optimizer_state_dict`` gives it with ``flatten_optimizer_state_dict=True``."""
    return any(str(key).startswith("param_groups.") and not isinstance(item, Mapping) for key, item in value.items())


def _several(optimizer: Any) -> list[Any]:
    return list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]


def _named(optimizer: Any, state: State) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.Optimizer):
        return named_optimizer_state(optimizer, parameter_names([optimizer], state))
    if isinstance(optimizer, Mapping) and _is_state_dict(optimizer):
        return _named_state_dict(optimizer, flatten(state))
    if isinstance(optimizer, Mapping) and _is_flattened(optimizer):
        return _unflattened(optimizer, flatten(state))
    raise UnsupportedStateError(
        f"optimizer holds a {type(optimizer).__name__}: pass a torch.optim.Optimizer, its state_dict(), what"
        " torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives, or a list of these; or one mapping of"
        " names to tensors."
    )


def _named_state_dict(content: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """By name, if it is known which they are; else the numbers are the names, and ``"numbered"`` says so."""
    groups: list[dict[str, Any]] = [dict(group) for group in content["param_groups"]]
    listed = [key for group in groups for key in group["params"]]
    # torch knows the names of an optimizer that was made from named_parameters()
    names = [name for group in groups for name in group.get("param_names", group["params"])]
    numbered = not all(name in parameters for name in names)
    if numbered and not all(isinstance(key, int) for key in listed):
        lost = [name for name in names if name not in parameters]
        raise UnsupportedStateError(
            f"The optimizer's state is of {lost[0]!r}, which isn't in state: pass the module that it optimizes."
        )
    find = {key: str(key) if numbered else name for key, name in zip(listed, names, strict=True)}
    for group in groups:
        group["params"] = [find[key] for key in group["params"]]
    return {
        "numbered": numbered,
        "state": {find[key]: dict(entries) for key, entries in content["state"].items() if key in find},
        "shared": {key: value for key, value in content["state"].items() if key not in find},
        "param_groups": groups,
        "parameters": {} if numbered else {name: parameters[name] for name in find.values()},
    }


def _unflattened(content: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Its groups aren't told: parameters of the same hyperparameters make up one, and ``"flattened"`` says so."""
    entries: dict[str, dict[str, Any]] = {"state": {}, "param_groups": {}}
    for key, value in content.items():
        section, _, rest = key.partition(".")
        # a key may have a dot, and so may a name: the longest name that fits is meant
        cuts = [rest[:at] for at in range(len(rest), 0, -1) if rest[at : at + 1] == "."]
        name = next((name for name in cuts if name in parameters), None)
        if section not in entries or name is None:
            raise UnsupportedStateError(
                f"The optimizer's {key!r} is of no parameter that is in state: pass the module that it optimizes."
            )
        entries[section].setdefault(name, {})[rest[len(name) + 1 :]] = value
    groups: list[dict[str, Any]] = []
    for name, values in entries["param_groups"].items():
        found = next((group for group in groups if _same_values(group, values)), None)
        if found is None:
            groups.append(found := {**values, "params": []})
        found["params"].append(name)
    known = {name: parameters[name] for name in entries["param_groups"] | entries["state"]}
    return {"flattened": True, "state": entries["state"], "shared": {}, "param_groups": groups, "parameters": known}


def _same_values(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two groups have the same hyperparameters, which may be tensors (``lr`` is, where steps are captured)."""
    keys = group.keys() - _NAMES_OF_NOTHING_ELSE
    return keys == other.keys() - _NAMES_OF_NOTHING_ELSE and all(_equal(group[key], other[key]) for key in keys)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def _merged(everyone: list[tuple[tuple[int, ...], list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """One description of the optimizers, of those of every mesh's first rank."""
    by_mesh: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for holders, described in everyone:
        by_mesh.setdefault(holders, described)
    stages = list(by_mesh.values())
    if len(stages) > 1 and any(optimizer.get("numbered") for stage in stages for optimizer in stage):
        raise UnsupportedStateError(
            "An optimizer's state_dict() numbers its parameters, and each pipeline stage numbers from 0: pass the"
            " optimizer itself, whose parameters have names."
        )
    order: dict[str, int] = {}
    for stage in stages:
        for optimizer in stage:
            for group in optimizer["param_groups"]:
                for name in group["params"]:
                    order.setdefault(name, len(order))
    return merge_stages(stages, order)


def _with_states(trainer_state: Any, described: list[dict[str, Any]]) -> dict[Any, Any]:
    if trainer_state is not None and (not isinstance(trainer_state, Mapping) or OPTIMIZER_STATES in trainer_state):
        raise UnsupportedStateError(
            f"trainer_state must be a dict without the key {OPTIMIZER_STATES!r} where an optimizer is saved: its"
            " parameter groups are kept there."
        )
    return {**(trainer_state or {}), OPTIMIZER_STATES: described}


def parameter_names(optimizers: Iterable[torch.optim.Optimizer], state: State) -> dict[int, str]:
    """``id(parameter)`` to name, of the optimizers' parameters: those of a module, or tensors of one memory with them.

    Raises:
        UnsupportedStateError: One isn't there.
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
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                known = by_id.get(id(parameter), by_memory.get(identity(locate("", parameter))))
                own = _of_one_storage(parameter, without_memory) if known is None else [known]
                if len(own) != 1:
                    why = f"whose empty part here may be of any of {own}" if own else "that isn't in the state"
                    raise UnsupportedStateError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} {why}: pass"
                        " the module that it optimizes, and make the optimizer after the module was sharded."
                    )
                (found[id(parameter)],) = own
    return found


def _of_one_storage(parameter: Tensor, empty: Sequence[Located]) -> list[str]:
    """The names of the tensors whose part on this rank is empty that are views of the parameter's storage."""
    _, local, spread = locate("", parameter)
    alike = [other for other in empty if other.spread is spread and other.local.device == local.device]
    return [other.name for other in alike if local.layout is torch.strided and other.local.is_set_to(local)]


# -- what load is given -----------------------------------------------------------------------------------------------


class Restored:
    """Optimizers that are to be filled from a checkpoint, with the parameters of a state.

    Attributes:
        asked: The parameters, as ``optimizer:0/name``, that are to have a place in the checkpoint's groups.
    """

    def __init__(self, optimizer: Any, into: State) -> None:
        self._optimizers: list[torch.optim.Optimizer] = _several(optimizer)
        for item in self._optimizers:
            if not isinstance(item, torch.optim.Optimizer):
                raise UnsupportedStateError(
                    f"optimizer holds a {type(item).__name__}: to load into, pass the torch.optim.Optimizer itself, a"
                    " list of them, or one mapping of names to tensors."
                )
        self._names = parameter_names(self._optimizers, into)
        self.asked = [
            f"optimizer:{index}/{self._names[id(parameter)]}"
            for index, item in enumerate(self._optimizers)
            for group in item.param_groups
            for parameter in group["params"]
        ]
        self._plans: list[Plan] = []

    @classmethod
    def of(cls, optimizer: Any, into: State) -> list[Restored]:
        """None for no optimizer, and for tensors by name."""
        return [] if optimizer is None or _is_by_name(optimizer) else [cls(optimizer, into)]

    def find(self, checkpoint: Checkpoint, strip_prefix: str | None, rename: Rename | None) -> set[str]:
        """Look everything up; returns the checkpoint's parameters, named as :attr:`asked`.

        Raises:
            StateMismatchError: Other optimizers, or other groups.
        """
        states = stored_states(checkpoint)
        if states is None:
            if len(checkpoint.optimizer):
                raise StateMismatchError(
                    f"{checkpoint.path} holds an optimizer's tensors by names that the program gave them, without its"
                    " groups: load them by these names, with optimizer= a mapping."
                )
            return set()
        if len(states) != len(self._optimizers):
            raise StateMismatchError(
                f"{checkpoint.path} holds the states of {len(states)} optimizers, and {len(self._optimizers)} are to be"
                " loaded: pass the same ones."
            )
        tensors: Mapping[str, Any] = checkpoint.optimizer
        if strip_prefix or rename:
            tensors, states = renamed(tensors, states, strip_prefix, rename)
        if any(state.get("numbered") for state in states):
            names = [
                [[self._names[id(parameter)] for parameter in group["params"]] for group in item.param_groups]
                for item in self._optimizers
            ]
            tensors, states = name_numbered(tensors, states, names)
        self._plans = plan_optimizers(self._optimizers, self._names, tensors, states)
        return {
            f"optimizer:{index}/{name}"
            for index, state in enumerate(states)
            for group in state["param_groups"]
            for name in group["params"]
        }

    def pairs(self) -> list[tuple[StoredTensor, Tensor]]:
        """What is to be read into new tensors."""
        return [pair for plan in self._plans for pair in plan.pairs]

    def finish(self) -> None:
        """Give the optimizers what has been read."""
        for plan in self._plans:
            plan.finish()


def stored_states(checkpoint: Checkpoint) -> list[dict[str, Any]] | None:
    """What the trainer state says of the optimizers; None if nothing. Its own tensors are read, sharded ones aren't."""
    tree = checkpoint.state_json()
    if not isinstance(tree, dict):
        return None
    tensors = StoredTensors(checkpoint.manifest.trainer, checkpoint)
    raw = tree if "$" in tree else {OPTIMIZER_STATES: tree.get(OPTIMIZER_STATES)}
    state = codec.decode(raw, lambda name: tensors[name].full(), checkpoint.optimizer.__getitem__)
    states = state.get(OPTIMIZER_STATES) if isinstance(state, Mapping) else None
    return None if states is None else [_described(index, item) for index, item in enumerate(states)]


def _described(index: int, state: Any) -> dict[str, Any]:
    """As it is, or a plain ``state_dict()``, which Trainers on one process keep whole in the trainer state."""
    if isinstance(state, Mapping) and "values" in state and "param_groups" in state:
        return dict(state)
    if not isinstance(state, Mapping) or not _is_state_dict(state):
        raise StateMismatchError(f"The trainer state's {OPTIMIZER_STATES} ({index}) aren't of an optimizer of torch.")
    named = _named_state_dict(state, {})  # its numbers as names
    return {**named, "values": named["state"]}


def renamed(
    tensors: Mapping[str, Any], states: Sequence[dict[str, Any]], strip_prefix: str | None, rename: Rename | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """With the names that the model's tensors of the checkpoint have for the state that is loaded; numbers stay."""
    named, found = [], {}
    for index, state in enumerate(states):
        if state.get("numbered"):
            named.append(state)
            found.update({path: stored for path, stored in tensors.items() if path.partition("/")[0] == str(index)})
            continue
        listed = [name for group in state["param_groups"] for name in group["params"]]
        new = {old: name for name, old in new_names(listed, strip_prefix, rename).items()}
        groups = [{**g, "params": [new[name] for name in g["params"] if name in new]} for g in state["param_groups"]]
        values = {new[name]: entries for name, entries in state["values"].items() if name in new}
        named.append({**state, "values": values, "param_groups": groups})
        for path in tensors:
            owner, _, rest = path.partition("/")
            name, _, key = rest.partition("/")
            if owner == str(index) and name in new:
                found[f"{index}/{new[name]}/{key}"] = tensors[path]
    return found, named


class Plan:
    """What fills one optimizer: ``pairs`` are read into new tensors, which :meth:`finish` makes its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], shared: Mapping[Any, Any]):
        self._optimizer = optimizer
        self._groups = groups
        self._shared = shared
        self.pairs: list[tuple[StoredTensor, Tensor]] = []
        self.states: dict[Tensor, dict[str, Any]] = {}

    def finish(self) -> None:
        for group, saved in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in _NAMES_OF_NOTHING_ELSE})
        for parameter, state in self.states.items():
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state
        self._optimizer.state.update(self._shared)


def plan_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    stored: Mapping[str, Any],
    states: Sequence[dict[str, Any]],
) -> list[Plan]:
    """What fills optimizers, their tensors sharded like their parameters; they are left as they are until then.

    Args:
        optimizers: Over this rank's parameters.
        names: ``id(parameter)`` to name.
        stored: The checkpoint's optimizer tensors by ``"{optimizer}/{parameter}/{key}"``.
        states: What :func:`flatten_optimizer_states` kept beside them.

    Raises:
        StateMismatchError: Other parameter groups.
    """
    by_parameter: dict[tuple[str, str], dict[str, Any]] = {}
    for path, value in stored.items():
        owner, _, rest = path.partition("/")
        name, _, key = rest.partition("/")
        by_parameter.setdefault((owner, name), {})[key] = value
    plans = []
    for index, (optimizer, rest_of) in enumerate(zip(optimizers, states, strict=True)):
        plan = Plan(optimizer, _groups_of(index, optimizer, names, rest_of), rest_of.get("shared", {}))
        known = {name for group in rest_of["param_groups"] for name in group["params"]}
        for group, saved in zip(optimizer.param_groups, plan._groups):
            # torch keeps step counts on the CPU, unless the step itself runs on the device
            hyperparameters = {**group, **saved}
            step_on_device = bool(hyperparameters.get("capturable") or hyperparameters.get("fused"))
            for parameter in group["params"]:
                name = names[id(parameter)]
                values = rest_of["values"].get(name, {})
                referred = _stored_in(values)
                state: dict[str, Any] = {}
                for key, value in {**by_parameter.get((str(index), name), {}), **values}.items():
                    if key in values or value.name not in referred:
                        device = torch.device("cpu") if key == "step" and not step_on_device else parameter.device
                        state[key] = _placed(value, parameter, device, key in values, plan.pairs)
                if state or name in known:
                    plan.states[parameter] = state
        plans.append(plan)
    return plans


def _groups_of(
    index: int, optimizer: torch.optim.Optimizer, names: Mapping[int, str], rest: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """For each of the optimizer's groups the saved one: of the same place, or where that isn't told, of its parameters.

    A pipeline stage has a part of each group's parameters, maybe none; parameters that weren't optimized may be in any.
    A group of these alone keeps its settings.
    """
    saved = rest["param_groups"]
    flattened = bool(rest.get("flattened"))
    if len(saved) != len(optimizer.param_groups) and not flattened:
        raise StateMismatchError(
            f"The checkpoint's optimizer {index} has {len(saved)} parameter groups, and the one here has"
            f" {len(optimizer.param_groups)}: make the same groups."
        )
    places = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        own = [names[id(parameter)] for parameter in group["params"]]
        theirs = {places[name] for name in own if name in places}
        if flattened:
            if len(theirs) > 1:
                raise StateMismatchError(
                    f"Group {number} of optimizer {index} holds parameters that had different hyperparameters when they"
                    f" were saved: make the groups anew as they were."
                )
            found.append(saved[theirs.pop()] if theirs else {})
        elif theirs - {number}:
            other = next(name for name in own if places.get(name, number) != number)
            raise StateMismatchError(
                f"{other!r} is in group {number} of optimizer {index}, and was in group {places[other]} when it was"
                " saved: make the same groups, in the same order."
            )
        else:
            found.append(saved[number] if theirs or not own else {})
    return found


def _stored_in(value: Any) -> set[str]:
    """The names of the stored tensors anywhere in a value."""
    if isinstance(value, StoredTensor):
        return {value.name}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return {name for item in items for name in _stored_in(item)}


def _placed(
    value: Any, parameter: Tensor, device: torch.device, referred: bool, pairs: list[tuple[StoredTensor, Tensor]]
) -> Any:
    """A parameter's state with empty tensors for the stored ones, which are added to ``pairs``.

    Args:
        device: For what is no DTensor.
        referred: The state refers to the stored tensors, which were DTensors then.
    """

    def place(leaf: Any) -> Any:
        if isinstance(leaf, StoredTensor):
            target = _target(leaf, parameter, device, referred)
            pairs.append((leaf, target))
            return target
        if isinstance(leaf, Tensor):
            if is_dtensor(parameter) and leaf.ndim and leaf.shape == parameter.shape:
                return _part_of(leaf, parameter)
            return leaf.to(device)
        return rebuilt(leaf, lambda _, item: place(item))

    return place(value)


def _target(leaf: StoredTensor, parameter: Tensor, device: torch.device, referred: bool) -> Tensor:
    if leaf.shape and leaf.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=leaf.dtype)
    target = torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    if referred and is_dtensor(parameter):
        from torch.distributed.tensor import DTensor, Replicate

        mesh: DeviceMesh = parameter.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return target


def _part_of(full: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a whole tensor, laid out like the parameter."""
    from lightning_shard.sharding import local_part

    target = torch.empty_like(parameter.detach(), dtype=full.dtype)
    locate("", target).local.copy_(local_part(full, target))  # type: ignore[arg-type]
    return target
