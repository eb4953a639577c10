"""Loading optimizers: restores the state of torch optimizers from tensors and values keyed by name, on any layout.

Stored tensors are read into new tensors; an optimizer is changed only when all of them have been read, so a refused
load leaves it as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.format.typed_json import decode
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
from lightning_shard.checkpoint.names import Rename, renamed_among
from lightning_shard.checkpoint.optimizers.named import (
    NAMES_OF_NOTHING_ELSE,
    OPTIMIZER_STATES,
    State,
    apart,
    listed_in,
    name_numbered,
    with_names,
)
from lightning_shard.checkpoint.optimizers.taken import (
    is_by_name,
    is_state_dict,
    named_state_dict,
    parameter_names,
    several,
)
from lightning_shard.checkpoint.sharded_values import rebuilt
from lightning_shard.checkpoint.tensors import is_dtensor, locate
from lightning_shard.errors import StateMismatchError, UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")
"""Keys that torch's learning rate schedulers add to parameter groups."""


class Restored:
    """The optimizers that one load restores; their parameters are those of a state.

    Attributes:
        asked: The parameters, as ``optimizer:0/name``, that the checkpoint's groups should contain.
    """

    def __init__(self, optimizer: Any, into: State) -> None:
        self._optimizers: list[torch.optim.Optimizer] = several(optimizer)
        for item in self._optimizers:
            if not isinstance(item, torch.optim.Optimizer):
                raise UnsupportedStateError(
                    f"optimizer holds a {type(item).__name__}: to load into, pass the torch.optim.Optimizer itself, a"
                    " list of them, or one mapping of names to tensors."
                )
        self._names = parameter_names(self._optimizers, into)
        self._listed = [[[self._names[id(p)] for p in g["params"]] for g in o.param_groups] for o in self._optimizers]
        self.asked = [asked_as(i, name) for i, groups in enumerate(self._listed) for group in groups for name in group]
        self._plans: list[Plan] = []

    @classmethod
    def of(cls, optimizer: Any, into: State) -> list[Restored]:
        """A list of one, or an empty list for no optimizer and for a mapping of tensors."""
        return [] if optimizer is None or is_by_name(optimizer) else [cls(optimizer, into)]

    def find(
        self, checkpoint: Checkpoint, strip_prefix: str | None, rename: Rename | None, asked_by_any: Collection[str]
    ) -> set[str]:
        """Find the optimizers' state in a checkpoint; returns its parameters, in the form of :attr:`asked`.

        Args:
            asked_by_any: All ranks' :attr:`asked`.

        Raises:
            StateMismatchError: The checkpoint has other optimizers or other groups.
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
        tensors, states = name_numbered(tensors, states, self._listed)
        self._plans = plan_optimizers(self._optimizers, self._names, tensors, states, asked_by_any)
        return {asked_as(index, name) for index, names in enumerate(listed_in(states)) for name in names}

    def pairs(self) -> list[tuple[StoredTensor, Tensor]]:
        """The stored tensors, each with the new tensor to read it into."""
        return [pair for plan in self._plans for pair in plan.pairs]

    def finish(self) -> None:
        """Set the optimizers' state, once all :meth:`pairs` have been read."""
        for plan in self._plans:
            plan.finish()


def asked_as(index: int, name: str) -> str:
    """The name of a parameter of optimizer number ``index``, in reports of missing and unexpected names."""
    return f"optimizer:{index}/{name}"


def stored_states(checkpoint: Checkpoint) -> list[dict[str, Any]] | None:
    """The optimizers' entries of the trainer state; None if it has none. Reads its tensors, but not sharded ones."""
    tree = checkpoint.state_json()
    if not isinstance(tree, dict):
        return None
    raw = tree if "$" in tree else {OPTIMIZER_STATES: tree.get(OPTIMIZER_STATES)}
    state = decode(raw, lambda name: checkpoint.trainer[name].full(), checkpoint.optimizer.__getitem__)
    states = state.get(OPTIMIZER_STATES) if isinstance(state, Mapping) else None
    return None if states is None else [described(index, item) for index, item in enumerate(states)]


def described(index: int, state: Any) -> dict[str, Any]:
    """Normalize an entry: our form is unchanged; a plain ``state_dict()``, which Trainers on one process keep whole in
    the trainer state, is converted."""
    if isinstance(state, Mapping) and "values" in state and "param_groups" in state:
        return dict(state)
    if not isinstance(state, Mapping) or not is_state_dict(state):
        raise StateMismatchError(f"The trainer state's {OPTIMIZER_STATES} ({index}) aren't of an optimizer of torch.")
    named = named_state_dict(state, {})  # its numbers serve as names
    return {**named, "values": named["state"]}


def renamed(
    tensors: Mapping[str, Any], states: Sequence[dict[str, Any]], strip_prefix: str | None, rename: Rename | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rename the parameters in optimizers' tensors and states as the model's tensors are renamed; numbers stay."""
    names = []
    for state, listed in zip(states, listed_in(states)):
        new = {} if state.get("numbered") else renamed_among(listed, strip_prefix, rename)
        names.append(None if state.get("numbered") else {old: name for name, old in new.items()})
    return with_names(tensors, states, names)


@dataclass
class Plan:
    """The plan to restore one optimizer: ``pairs`` are read into new tensors, which :meth:`finish` makes its state."""

    optimizer: torch.optim.Optimizer
    groups: list[dict[str, Any]]
    shared: Mapping[Any, Any]
    pairs: list[tuple[StoredTensor, Tensor]] = field(default_factory=list)
    states: dict[Tensor, dict[str, Any]] = field(default_factory=dict)

    def finish(self) -> None:
        for group, saved in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update({key: value for key, value in saved.items() if key not in NAMES_OF_NOTHING_ELSE})
        for parameter, state in self.states.items():
            self.optimizer.state.pop(parameter, None)
            if state:
                self.optimizer.state[parameter] = state
        self.optimizer.state.update(self.shared)


def plan_optimizers(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    stored: Mapping[str, Any],
    states: Sequence[dict[str, Any]],
    asked_by_any: Collection[str],
) -> list[Plan]:
    """Plan the restoring of optimizers, with state tensors sharded like their parameters. Doesn't change them.

    Args:
        names: ``id(parameter)`` to name.
        stored: The checkpoint's optimizer tensors by ``"{optimizer}/{parameter}/{key}"``.
        states: The second result of :func:`flatten_optimizer_states`.
        asked_by_any: The parameters of all ranks' optimizers, by :func:`asked_as`.

    Raises:
        StateMismatchError: The checkpoint has other parameter groups.
    """
    by_parameter: dict[tuple[str, str], dict[str, Any]] = {}
    listed = listed_in(states)
    for path, value in stored.items():
        owner, name, key = apart(path)
        by_parameter.setdefault((owner, name), {})[key] = value
    plans = []
    for index, (optimizer, rest_of) in enumerate(zip(optimizers, states, strict=True)):
        groups = _groups_of(index, optimizer, names, rest_of, asked_by_any)
        plan = Plan(optimizer, groups, rest_of.get("shared", {}))
        known, referred = set(listed[index]), _stored_in(rest_of["values"])
        for group, saved in zip(optimizer.param_groups, groups):
            # torch keeps step counts on the CPU, unless the step itself runs on the device
            hyperparameters = {**group, **saved}
            step_on_device = bool(hyperparameters.get("capturable") or hyperparameters.get("fused"))
            casts = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
            for parameter in group["params"]:
                name = names[id(parameter)]
                values = rest_of["values"].get(name, {})
                state: dict[str, Any] = {}
                for key, value in {**by_parameter.get((str(index), name), {}), **values}.items():
                    if key in values or value.name not in referred:
                        device = torch.device("cpu") if key == "step" and not step_on_device else parameter.device
                        dtype = parameter.dtype if casts and key != "step" and parameter.is_floating_point() else None
                        state[key] = _placed(value, parameter, device, dtype, key in values, plan.pairs)
                if state or name in known:
                    plan.states[parameter] = state
        plans.append(plan)
    return plans


def _groups_of(
    index: int,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    rest: Mapping[str, Any],
    asked_by_any: Collection[str],
) -> list[dict[str, Any]]:
    """The saved group for each of the optimizer's groups, by position.

    A pipeline stage has some of each group's parameters, maybe none. Parameters that weren't optimized when saving may
    be in any group. A group of only such parameters, on all stages, keeps its settings.
    """
    saved = rest["param_groups"]
    _check_kind(index, optimizer, saved)
    if len(saved) != len(optimizer.param_groups):
        raise StateMismatchError(
            f"The checkpoint's optimizer {index} has {len(saved)} parameter groups, and the one here has"
            f" {len(optimizer.param_groups)}: make the same groups."
        )
    places = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found = []
    for number, group in enumerate(optimizer.param_groups):
        own = [names[id(parameter)] for parameter in group["params"]]
        theirs = {places[name] for name in own if name in places}
        if theirs - {number}:
            other = next(name for name in own if places.get(name, number) != number)
            raise StateMismatchError(
                f"{other!r} is in group {number} of optimizer {index}, and was in group {places[other]} when it was"
                " saved: make the same groups, in the same order."
            )
        before = saved[number]["params"]
        known = theirs or any(asked_as(index, name) in asked_by_any for name in before) or not (own or before)
        found.append(saved[number] if known else {})
    return found


def _check_kind(index: int, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse the state of an optimizer of another class: its learning rate would be used, and its state misread.

    The class isn't stored. Another version of the same class may have more settings, or fewer; another class has both.
    """
    known = {*optimizer.defaults, *_SCHEDULERS, *NAMES_OF_NOTHING_ELSE}
    for group, before in zip(optimizer.param_groups, saved):
        unknown = [key for key in before if key not in known and key not in group]
        missing = [key for key in optimizer.defaults if key not in before]
        if unknown and missing:
            raise StateMismatchError(
                f"The checkpoint's optimizer {index} has the settings {', '.join(sorted(unknown))}, and lacks"
                f" {', '.join(sorted(missing))}, so it was saved by another optimizer class than"
                f" {type(optimizer).__name__}: use that class, or load only the weights (load_from_checkpoint of a"
                " LightningModule) and leave out ckpt_path."
            )


def _stored_in(value: Any) -> set[str]:
    """The names of all stored tensors nested in a value."""
    if isinstance(value, StoredTensor):
        return {value.name}
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return {name for item in items for name in _stored_in(item)}


def _placed(
    value: Any,
    parameter: Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    referred: bool,
    pairs: list[tuple[StoredTensor, Tensor]],
) -> Any:
    """A parameter's state with new tensors in place of stored ones; adds each (stored, new) to ``pairs``.

    Args:
        device: The device of new tensors that aren't laid out like the parameter.
        dtype: What floating-point tensors are converted to, as by ``torch.optim.Optimizer.load_state_dict``; ``None``:
            they are as stored.
        referred: The stored tensors were referred to from the state, so they were DTensors when saved.
    """

    def dtype_of(leaf: StoredTensor | Tensor) -> torch.dtype:
        return dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype

    def place(leaf: Any) -> Any:
        if isinstance(leaf, StoredTensor):
            target = _target(leaf, parameter, device, dtype_of(leaf), referred)
            pairs.append((leaf, target))
            return target
        if isinstance(leaf, Tensor):
            if is_dtensor(parameter) and leaf.ndim and leaf.shape == parameter.shape:
                return _part_of(leaf, parameter, dtype_of(leaf))
            return leaf.to(device, dtype_of(leaf))
        return rebuilt(leaf, lambda _, item: place(item))

    return place(value)


def _target(leaf: StoredTensor, parameter: Tensor, device: torch.device, dtype: torch.dtype, referred: bool) -> Tensor:
    if leaf.shape and leaf.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    target = torch.empty(leaf.shape, dtype=dtype, device=device)
    if referred and is_dtensor(parameter):
        from torch.distributed.tensor import DTensor, Replicate

        mesh: DeviceMesh = parameter.device_mesh  # type: ignore[attr-defined]
        return DTensor.from_local(target, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return target


def _part_of(full: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Shard a whole tensor like the parameter."""
    from lightning_shard.sharding import local_part

    target = torch.empty_like(parameter.detach(), dtype=dtype)
    locate("", target).local.copy_(local_part(full, target))  # type: ignore[arg-type]
    return target
