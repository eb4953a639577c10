"""Optimizers over sharded parameters: made before these were sharded or after, of which parameters, and which can't be.

A stage's optimizers hold its own parameters; what is tied is stepped on each stage that holds it, so alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.optimizers.named import NAMES_OF_NOTHING_ELSE
from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.layout import Layout
from lightning_shard.parallel.fsdp.adam import update_shards
from lightning_shard.plugin.assembly.all_parameters import leave_out_elsewhere
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.optimizers.coupled import depends_on_others


def prepare(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    built: Built | None,
    tied: Collection[str],
    layout: Layout,
    groups: Groups,
) -> None:
    """Have optimizers step this rank's parameters, or refuse them; a collective call over the pipeline.

    Args:
        parameters: This rank's, by name.
        built: The module's before it was sharded, where that was for this run.
        tied: Names of those that other stages hold too.

    Raises:
        ConfigurationError: One that holds other parameters, can't be right on the layout, or would step copies of a
            tied parameter in two ways.
    """
    if built is not None:
        built.replace(optimizers, parameters)
        built.refuse_gradients(parameters)
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        _leave_out_others(optimizer, names)
    _check_same_groups(groups.gather_over_stages(_groups_of(optimizers, names, tied)))
    for optimizer in optimizers:
        refuse(optimizer, layout)
        update_shards(optimizer)


class Built:
    """A module's parameters as they were before it was sharded, by id; they are not kept alive."""

    def __init__(self, known: dict[int, tuple[weakref.ref[Tensor], str]]) -> None:
        self._known = known

    @classmethod
    def of(cls, module: nn.Module) -> Built:
        refuse_parameter_hooks(module)
        _refuse_accumulation_hooks(module)
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


def _refuse_accumulation_hooks(module: nn.Module) -> None:
    """Before a module is sharded; those that are set later are called.

    Raises:
        ConfigurationError: A parameter has hooks that are called when its gradient was added up.
    """
    for name, parameter in module.named_parameters():
        if parameter.ndim and not isinstance(parameter, DTensor) and parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook that is called when its gradient was added up (register_post_accumulate_grad_hook),"
                " and another tensor takes its place when the module is laid out on ranks: register it in on_fit_start"
                " or on_train_start."
            )


def refuse_hooks_on_sums(module: nn.Module) -> None:
    """Before a step whose gradients are added to others: they come once an optimizer step, or once a microbatch.

    Raises:
        ConfigurationError: A parameter has hooks that are called when its gradient was added up.
    """
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a hook that is called when its gradient was added up (register_post_accumulate_grad_hook):"
                " on one process that is after each batch, and here it isn't. Leave accumulate_grad_batches at 1 and"
                " reduce_each_microbatch at False, or the hook out."
            )


def _leave_out_others(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Leave out of each group what another stage holds; refuse what isn't the module's.

    Args:
        names: ``id(parameter)`` to name, of this rank's parameters.

    Raises:
        ConfigurationError: An optimizer over parameters that the module hasn't, as of before it was sharded.
    """
    leave_out_elsewhere(optimizer)
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise ConfigurationError(
                f"{type(optimizer).__name__} holds parameters that aren't the module's, since it was made before"
                " the module was sharded: make it in configure_optimizers, from self.parameters()."
            )


def _groups_of(
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


def _check_same_groups(stages: Iterable[Mapping[str, str]]) -> None:
    """Compare what the stages' :func:`_groups_of` gave: copies that are stepped in two ways would part.

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


def refuse(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Check what ``configure_optimizers`` made.

    Raises:
        ConfigurationError: An optimizer that can't be right on the layout, or that torch hasn't for sharded tensors.
    """
    reason = _unfit(optimizer, layout)
    if reason is not None:
        raise ConfigurationError(f"{type(optimizer).__name__} {reason}")


def _unfit(optimizer: torch.optim.Optimizer, layout: Layout) -> str | None:
    if layout.pipeline_parallel_size > 1 and depends_on_others(optimizer):
        return (
            "takes something over all of its parameters, such as a norm, and with several pipeline stages that would be"
            " over one stage's only: use an optimizer that steps each parameter by itself (gradient_clip_val clips by"
            " the norm of all), or pipeline_parallel_size=1."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)]
    if isinstance(optimizer, torch.optim.LBFGS):
        if layout.pipeline_parallel_size > 1 or layout.tensor_parallel_size > 1 or layout.expert_parallel_size > 1:
            return (
                "searches for one step along all parameters, which pipeline stages and tensor- and expert-parallel"
                " ranks don't hold together: use another optimizer, or pipeline_parallel_size=1,"
                " tensor_parallel_size=1 and expert_parallel_size=1."
            )
        if any(p.ndim and p.size(0) % layout.shard_size for p in parameters):
            return (
                "flattens parameters, which torch can't where their first sizes aren't multiples of the"
                f" {layout.shard_size} ranks that they are sharded over: use another optimizer, or another number of"
                " ranks."
            )
    if not parameters:
        return None
    # as of torch 2.13; each raises in its first step, on one rank too
    if isinstance(optimizer, torch.optim.Adafactor) and any(p.ndim > 1 for p in parameters):
        return "can't step on sharded parameters (torch's squares norms in place that are partial): use AdamW or Muon."
    if isinstance(optimizer, torch.optim.Rprop):
        return "can't step on sharded parameters (torch's writes by index): use another optimizer."
    fused = isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))
    if fused and any(group.get("fused") for group in optimizer.param_groups):
        return "can't step on sharded parameters with fused=True: leave it out."
    return None
