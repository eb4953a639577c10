"""Makes optimizers step this rank's sharded parameters, and refuses those that can't be right on the layout.

Optimizers may be created before or after sharding. Those of a stage hold its own parameters. A tied parameter is
stepped on each stage that holds it, so all of its copies must be stepped with equal settings.
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
from lightning_shard.parallel.rank_compare import by_name, unequal
from lightning_shard.plugin.assembly.parameters import leave_out_elsewhere
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.optimizers import whole_tensors
from lightning_shard.plugin.optimizers.trials import collective_of, depends_on_others


def prepare(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    built: Built | None,
    tied: Collection[str],
    layout: Layout,
    groups: Groups,
) -> list[dict[str, int]]:
    """Make optimizers step this rank's parameters, or refuse them; a collective call over the pipeline.

    Args:
        built: The module's parameters before sharding, if it was sharded for this run.

    Returns:
        For each optimizer the positions of all stages' parameters among those that it was made with, by name.

    Raises:
        ConfigurationError: An optimizer holds other parameters, can't be right on the layout, or would step the copies
            of a tied parameter differently.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    given = groups.gather_over_stages([_positions(optimizer, names, built) for optimizer in optimizers])
    if built is not None:
        built.replace(optimizers, parameters)
        built.refuse_gradients(parameters)
    for optimizer in optimizers:
        _leave_out_others(optimizer, names)
    of_tied = by_name(groups.gather_over_stages(_groups_of(optimizers, names, tied)))
    for name, (one, other, *_) in unequal(of_tied).items():  # copies with different settings would diverge
        raise ConfigurationError(
            f"{name} is on two pipeline stages, since it is tied, and configure_optimizers puts it into"
            f" {one or 'no optimizer'} on one and {other or 'none'} on the other: choose groups by parameters' names or"
            " shapes, which are the same on both."
        )
    for optimizer in optimizers:
        refuse(optimizer, layout)
        update_shards(optimizer)
        whole_tensors.allow(optimizer)
    return [{name: place for each in of_stages for name, place in each.items()} for of_stages in zip(*given)]


def _positions(optimizer: torch.optim.Optimizer, names: Mapping[int, str], built: Built | None) -> dict[str, int]:
    """Where this rank's parameters are among all stages', which an optimizer holds when it is made."""
    listed = (parameter for group in optimizer.param_groups for parameter in group["params"])
    named = (names.get(id(each)) or (built.name_of(each) if built is not None else None) for each in listed)
    return {name: place for place, name in enumerate(named) if name is not None}


class Built:
    """A module's parameters before it was sharded, by id; weak references, so they aren't kept alive."""

    def __init__(self, known: dict[int, tuple[weakref.ref[Tensor], str]]) -> None:
        self._known = known

    @classmethod
    def of(cls, module: nn.Module) -> Built:
        refuse_parameter_hooks(module)
        _refuse_parameters(module)
        # torch moves DTensors by swapping their contents, which it refuses where a weak reference exists
        named = ((name, p) for name, p in module.named_parameters() if not isinstance(p, DTensor))
        return cls({id(p): (weakref.ref(p), name) for name, p in named})

    def replace(self, optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, Tensor]) -> None:
        """Replace parameters in optimizers that were created before sharding, as LightningCLI's are.

        Parameters of other stages are removed. An optimizer that has state, or stores its parameters elsewhere too, is
        left as it is.
        """
        for optimizer in optimizers:
            if optimizer.state or hasattr(optimizer, "_params"):  # LBFGS
                continue
            for group in optimizer.param_groups:
                names = [self.name_of(parameter) for parameter in group["params"]]
                group["params"] = [
                    parameter if name is None else parameters[name]
                    for parameter, name in zip(group["params"], names)
                    if name is None or name in parameters
                ]

    def refuse_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        """Make a backward fail if it reaches a parameter from before sharding, whose gradients would train nothing."""
        for reference, name in self._known.values():
            before = reference()
            if before is not None and before is not parameters.get(name) and before.requires_grad:
                before.register_hook(partial(_refuse_gradient, name))

    def name_of(self, parameter: Tensor) -> str | None:
        """Its name, if it is one from before."""
        reference, name = self._known.get(id(parameter), (None, None))
        return name if reference is not None and reference() is parameter else None


def _refuse_gradient(name: str, _: Tensor) -> None:
    raise StepError(
        f"A step computes with parameter {name} from before the module was sharded, such as from a list that was made"
        " in __init__, so its gradient would be lost: take parameters from the module in the step, as by"
        " self.parameters().",
        breaks=9,
    )


def refuse_parameter_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients, and those of W&B's watch, before a module is sharded and before it trains."""
    for part in module.modules():
        if any(name.startswith(("gradients/", "parameters/")) for name in getattr(part, "_wandb_hook_names", ())):
            raise ConfigurationError(
                f"W&B watches the {type(part).__name__} (WandbLogger.watch), by hooks on rank 0, which would see parts"
                " of parameters and no gradients: leave watch out (without stages log=None, for the graph, works). For"
                " norms log lightning.pytorch.utilities.grad_norm in on_before_optimizer_step."
            )
    for name, parameter in module.named_parameters():
        if parameter.ndim and parameter._backward_hooks:
            raise ConfigurationError(
                f"{name} has a hook on its gradient (register_hook), which wouldn't be called: parameters are gathered"
                " anew in each step. Change gradients in on_before_optimizer_step, or on_after_backward."
            )


def _refuse_parameters(module: nn.Module) -> None:
    """Refuse post-accumulate hooks (later ones do run) and classes of parameters, before a module is sharded."""
    for name, parameter in module.named_parameters():
        kind = type(parameter)
        if parameter.ndim and not isinstance(parameter, DTensor) and parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a post-accumulate-gradient hook (register_post_accumulate_grad_hook), and another tensor"
                " takes its place when the module is sharded: register it in on_fit_start or on_train_start."
            )
        if kind not in (nn.Parameter, nn.UninitializedParameter) and nn.Parameter in kind.__mro__:
            raise ConfigurationError(
                f"{name} is a {kind.__name__}, and a sharded nn.Parameter takes its place, so code that asks for this"
                " class, as its optimizer may, would do something else: make it an nn.Parameter, or a buffer if it"
                ' doesn\'t train; or use strategy="auto" on one device.',
                breaks=9,
            )


def refuse_hooks_on_sums(module: nn.Module) -> None:
    """Refuse hooks where gradients accumulate: they would run once per optimizer step, or per microbatch."""
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name} has a post-accumulate-gradient hook (register_post_accumulate_grad_hook): on one process it"
                " runs after each batch, and here it doesn't. Leave accumulate_grad_batches at 1 and"
                " reduce_each_microbatch at False, or remove the hook."
            )


def _leave_out_others(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Remove other stages' parameters from each group; refuse parameters that aren't the module's."""
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
    """Which optimizers step each of this rank's ``tied`` parameters, and with what settings; by name."""
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


def refuse(optimizer: torch.optim.Optimizer, layout: Layout) -> None:
    """Check an optimizer that ``configure_optimizers`` made."""
    reason = _unfit(optimizer, layout)
    if reason is not None:
        raise ConfigurationError(f"{type(optimizer).__name__} {reason}", breaks=11)


def _unfit(optimizer: torch.optim.Optimizer, layout: Layout) -> str | None:
    if layout.world_size > 1 and (collective := collective_of(optimizer)) is not None:
        return (
            f"calls other ranks in its step ({collective}), for parameters that all of them hold whole. Here they hold"
            " parts, or other layers: use the form of it that is for one process, as parameters and its state are"
            " sharded anyway."
        )
    if layout.pipeline_parallel_size > 1 and depends_on_others(optimizer):
        return (
            "updates each parameter depending on others, such as by a norm over all, and with pipeline stages it would"
            " see one stage's only: use an optimizer that steps each parameter by itself (gradient_clip_val clips by"
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
    # in torch 2.13 this raises in the first step, also on a single rank
    fused = isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad))
    if fused and any(group.get("fused") for group in optimizer.param_groups):
        return "can't step on sharded parameters with fused=True: leave it out."
    return None
