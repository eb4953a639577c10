"""Shows all parameters of a module on each stage while ``configure_optimizers`` runs.

Then parameter groups, and settings that depend on counting (such as a learning rate by layer index), are the same on
all stages, and as in one process. A parameter of another stage is shown as a hollow tensor (``taint.Hollow``: right
shape and dtype, no values). Afterwards, hollow ones are removed from the optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_shard.errors import PlacementError
from lightning_shard.pipeline.dataflow.taint import Hollow


@contextmanager
def all_parameters(
    module: nn.Module, names: Mapping[str, str], gather_over_stages: Callable[[Any], list[Any]]
) -> Iterator[None]:
    """Inside, ``module`` has all parameters of the whole module, in its order; a collective call over the pipeline.

    Args:
        names: All names in the whole module's order, each mapped to the first name of that parameter.
        gather_over_stages: All-gathers a value over the pipeline.
    """
    own = {name: parameter.requires_grad for name, parameter in module.named_parameters(remove_duplicate=False)}
    trains = {name: trains for of_stage in gather_over_stages(own) for name, trains in of_stage.items()}
    order = {name: place for place, name in enumerate(names)}
    placed: dict[str, Hollow] = {}
    hollow: list[tuple[nn.Module, str, Hollow]] = []
    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        for key, value in [item for item in vars(part).items() if isinstance(item[1], Hollow)]:
            first = names[f"{start}{key}"]
            hollow.append((part, key, vars(part).pop(key)))
            one: Any = placed.setdefault(first, value)  # tied parameters are one object
            _be_parameter(one, True, trains.get(first, False))
            part._parameters[key] = one
            in_order = sorted(part._parameters.items(), key=lambda item: order.get(f"{start}{item[0]}", -1))
            part._parameters.clear()
            part._parameters.update(in_order)
    try:
        yield
    finally:
        for part, key, value in hollow:
            part._parameters.pop(key, None)
            _be_parameter(value, False, False)
            vars(part)[key] = value


def what_trains(module: nn.Module, gather_over_stages: Callable[[Any], list[Any]]) -> list[dict[str, bool]]:
    """Which parameters train, by name, for each stage; a collective call over the pipeline."""
    trains = gather_over_stages({name: p.requires_grad for name, p in module.named_parameters()})
    every = {name: does for stage in trains for name, does in stage.items()}
    held = (value for part in module.modules() for value in vars(part).values())
    for hollow in (value for value in held if isinstance(value, Hollow)):
        hollow.trains = every.get(hollow.fqn, hollow.trains)
    return trains


def refuse_frozen(trains: Iterable[Mapping[str, bool]]) -> None:
    """Check the stages' parameters that train.

    Raises:
        PlacementError: There are none.
    """
    if not any(any(stage.values()) for stage in trains):
        raise PlacementError(
            "No parameter requires gradients, so the pipeline stages have nothing to train: unfreeze some, or use"
            " pipeline_parallel_size=1."
        )


def leave_out_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Remove other stages' parameters from each group, and state that the optimizer has created for them."""
    for group in optimizer.param_groups:
        kept = [not isinstance(parameter, Hollow) for parameter in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [value for value, is_kept in zip(group[key], kept, strict=True) if is_kept]
    for parameter in [key for key in optimizer.state if isinstance(key, Hollow)]:
        del optimizer.state[parameter]


def _be_parameter(hollow: Any, is_one: bool, trains: bool) -> None:
    """Turn a hollow tensor into a parameter, or back. What is computed from it stays unknown, even if kept."""
    hollow._is_param = is_one  # isinstance(…, nn.Parameter) asks for this
    with torch._C.DisableTorchFunctionSubclass():
        hollow.requires_grad_(trains)
