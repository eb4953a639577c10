"""A module's state from a checkpoint, by its own state-dict names; and which parameters its optimizers may hold."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.optimizers.named import NAMES_OF_NOTHING_ELSE
from lightning_shard.errors import ConfigurationError, StateMismatchError, StepError
from lightning_shard.pipeline.taint import Hollow
from lightning_shard.plugin.saving.own_loading import load_by_own_code
from lightning_shard.sharding import full_tensor, local_part, local_tensor


class Built:
    """A module's parameters as they were before it was sharded, by id; they are not kept alive."""

    def __init__(self, known: dict[int, tuple[weakref.ref[Tensor], str]]) -> None:
        self._known = known

    @classmethod
    def of(cls, module: nn.Module) -> Built:
        refuse_parameter_hooks(module)
        # torch swaps the contents of DTensors that it moves, and refuses where a weak reference is
        named = ((name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor))
        return cls({id(p): (weakref.ref(p), name) for name, p in named})

    def replace(self, optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, Tensor]) -> None:
        """Give optimizers that were made early, as LightningCLI's are, what the parameters have become.

        What is on another stage is left out. One that has state, or keeps its parameters elsewhere too, stays.
        """
        for optimizer in optimizers:
            if optimizer.state or hasattr(optimizer, "_params"):  # LBFGS
                continue
            for group in optimizer.param_groups:
                names = [self._name_of(parameter) for parameter in group["params"]]
                group["params"] = [
                    parameter if name is None else parameters[name]
                    for parameter, name in zip(group["params"], names)
                    if name is None or name in parameters
                ]

    def refuse_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Have a backward fail that would give gradients to those that are still used: nothing would train by them."""
        for reference, name in self._known.values():
            before = reference()
            if before is not None and before is not parameters.get(name) and before.requires_grad:
                before.register_hook(partial(_refuse_gradient, name))

    def _name_of(self, parameter: Tensor) -> str | None:
        reference, name = self._known.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise StepError(
        f"A step computes with {name} as it was before the module was laid out on ranks, such as from a list that was"
        " made in __init__, so its gradient would be lost: take parameters from the module in the step, as by"
        " self.parameters()."
    )


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Before a module is sharded, and before it trains.

    Raises:
        ConfigurationError: A parameter has hooks on its gradient, which aren't called where another holds its values.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim and parameter._backward_hooks:
            raise ConfigurationError(
                f"{name} has a hook on its gradient (register_hook), which wouldn't be called: parameters are gathered"
                " anew in each step. Change gradients in on_before_optimizer_step, or on_after_backward."
            )


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


def groups_of(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[int, str], tied: Collection[str]
) -> dict[str, str]:
    """For each of this rank's ``tied`` parameters by name, which optimizers step it, and how."""
    found: dict[str, str] = dict.fromkeys((name for name in names.values() if name in tied), "")
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            settings = {key: value for key, value in group.items() if _is_setting(key, value)}
            for name in (names[id(parameter)] for parameter in group["params"]):
                if name in found:
                    found[name] += f"{type(optimizer).__name__} with {settings}"
    return found


def _is_setting(key: str, value: Any) -> bool:
    values = value if isinstance(value, (tuple, list)) else [value]
    return key not in NAMES_OF_NOTHING_ELSE and all(isinstance(v, (str, int, float, type(None))) for v in values)


def check_same_groups(stages: Iterable[Mapping[str, str]]) -> None:
    """Compare what the stages' :func:`groups_of` gave: copies that are stepped in two ways would part.

    Raises:
        ConfigurationError: On all stages alike.
    """
    first: dict[str, str] = {}
    for groups in stages:
        for name, settings in groups.items():
            if first.setdefault(name, settings) != settings:
                raise ConfigurationError(
                    f"{name} is on two pipeline stages, since it is tied, and configure_optimizers puts it into"
                    f" {first[name] or 'no optimizer'} on one and {settings or 'none'} on the other: choose groups by"
                    " parameters' names or shapes, which are the same on both."
                )


def load_module(
    module: nn.Module,
    stored: Mapping[str, Any],
    elsewhere: Iterable[str],
    *,
    strict: bool,
    also: Iterable[str] = (),
    left_out: Collection[str] = (),
    by_own_code: bool = False,
) -> tuple[list[str], list[str]]:
    """Fill a module's parameters and buffers, in place.

    Args:
        module: Cut and sharded.
        stored: Names to stored tensors (a checkpoint's, or plain ones that a hook put in their place).
        elsewhere: Names that other stages fill.
        strict: Refuse missing and unexpected names.
        also: Buffers that are filled too, though they are another stage's state.
        left_out: Names that may be missing: the module has what they should be.
        by_own_code: Call its ``load_state_dict``, since some stage has loading code of its own; the same on all ranks.

    Returns:
        Missing and unexpected names.

    Raises:
        StateMismatchError: Shapes that differ; with ``strict``, names.
    """
    state = module.state_dict(keep_vars=True)
    parameters, buffers = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    live = {name for name, _ in (*parameters, *buffers)}
    own = {name: state[name] for name in state if name in live}
    foreign = {name: module.get_buffer(name) for name in also if name in stored}
    if by_own_code:
        ckpt.load_together(lambda: _pairs(foreign, stored))
        plain = state.keys() - live
        return load_by_own_code(module, stored, set(elsewhere), strict=strict, plain=plain, left_out=left_out)
    own |= foreign
    # What a module keeps in other ways (extra state, a metric's state) goes in as it would come from a plain
    # checkpoint.
    others = {name: stored[name] for name in state if name in stored and name not in live}
    found = {id(tensor) for name, tensor in state.items() if name in stored}
    missing = sorted(
        name
        for name, tensor in state.items()
        if name not in stored and id(tensor) not in found and name not in left_out
    )
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


def _some(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} {what}{' (' + ', '.join(names[:10]) + more + ')' if names else ''}"
