"""Detects parameters that were added to a module or removed after it was laid out: no rank shards or averages new ones.

Also refuses copies made after that, which torch doesn't support: shards and hooks are bound to the original's ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import class_name, is_unit
from lightning_shard.pipeline.dataflow.taint import Hollow

_REMEDY = (
    ": change the module in __init__, configure_model or setup, before it is trained or evaluated the first time, or"
    " build a new one from its weights (strategy.gather_full_parameters(), or load_from_checkpoint of a checkpoint)."
)


class LaidOutParameters:
    """The parameters that a module had when it was laid out.

    Args:
        module: Between steps.
    """

    def __init__(self, module: nn.Module) -> None:
        self._known = {name: _kind(parameter) for name, parameter in module.named_parameters()}

    def check(self, module: nn.Module, gather_over_stages: Callable[[Any], list[Any]], *, is_cut: bool) -> None:
        """Compare with the module's parameters now; a collective call over the pipeline.

        Args:
            gather_over_stages: All-gathers a value over the pipeline.
            is_cut: Whether other stages have stand-ins for what is removed here, and would still call them.

        Raises:
            ConfigurationError: On all ranks, if any has other parameters now.
        """
        reshard(module)
        now = {name: _kind(parameter) for name, parameter in module.named_parameters()}
        came = [name for name, kind in now.items() if self._known.get(name) != kind]
        left = [name for name in self._known if name not in now] if is_cut else []
        of_stages = gather_over_stages((came, left))
        came, left = (list(dict.fromkeys(name for names in of_each for name in names)) for of_each in zip(*of_stages))
        for names, did in (
            (came, "was added to the module, or replaced, after it was sharded, so ranks don't synchronize it"),
            (left, "was removed after the module was split into stages, and other stages still use it"),
        ):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise ConfigurationError(f"The parameter {names[0]!r}{more} {did}{_REMEDY}", breaks=9)


def _kind(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor)


def refuse_copies(module: nn.Module, *, is_cut: bool) -> None:
    """Make ``copy.deepcopy`` of the module, or of a part with parameters, fail by name, equally on all stages."""
    for part in module.modules():
        can_be_cut = is_cut and not hasattr(type(part), "__deepcopy__")
        if is_unit(part) or (can_be_cut and _has_parameters(part)):
            part.__dict__["__deepcopy__"] = partial(_refuse_copy, class_name(part))


def _has_parameters(module: nn.Module) -> bool:
    """Whether a module has parameters, here or on another stage."""
    return any(
        any(value is not None for value in part._parameters.values())
        or any(isinstance(value, Hollow) for value in vars(part).values())
        for part in module.modules()
    )


def _refuse_copy(kind: str, _: Any) -> Any:
    raise StepError(
        f"copy.deepcopy of a {kind} after it was sharded isn't supported: the copy would have no hooks that gather its"
        " shards. Make the copy in __init__, where it is sharded like the original; for an"
        " average of weights use Lightning's EMAWeightAveraging; or keep values, {name: p.detach().clone() for name, p"
        " in module.named_parameters()}.",
        breaks=9,
    )
