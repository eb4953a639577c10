"""Finds the state that the module's own optimizers keep, by running them on parameters of a few elements.

``configure_optimizers`` is called on a module without memory. Then two small parameters replace each kind of parameter
(number of dims, dtype, group), with different sizes of their dims to identify them, and the optimizer takes two steps
on the first ones, then on the others. A size of a state tensor that is the same for both parameters is a constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.dryrun.counting.counts import Ledger, ParameterCount
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.errors import ConfigurationError

_SIZES = (3, 5, 7, 11, 13, 17), (4, 6, 8, 12, 14, 18)
"""Sizes of the dims of both small parameters; all different."""
_Two = tuple[nn.Parameter, nn.Parameter]


@dataclass(frozen=True)
class StateTensor:
    """One tensor that an optimizer keeps for a parameter."""

    key: str  # in the optimizer's state; of nested ones joined by ``.``
    dims: tuple[int, ...]  # the parameter's dims that it has; others were reduced
    dtype: torch.dtype
    is_whole: bool  # whether it has the parameter's elements, so that it is sharded as the parameter is
    times: int = 1  # how many elements it has for each of these

    def numel(self, parameter: ParameterCount, shard: int) -> int:
        """Its number of elements, for a parameter's shard of ``shard`` elements."""
        return self.times * (shard if self.is_whole else math.prod(parameter.local_shape[dim] for dim in self.dims))


@dataclass(frozen=True)
class OptimizerState:
    """What the optimizers keep for each parameter."""

    names: tuple[str, ...] = ()  # the optimizers' class names
    tensors: Mapping[str, tuple[StateTensor, ...]] = field(default_factory=dict)
    """By parameter name; a parameter without an optimizer has none."""
    stepping: float = 0.0  # temporary bytes of a step, per byte of the parameters that it works on at a time
    at_once: bool = False  # whether a step works on all parameters at a time (``foreach``); else on one

    def bytes(self, parameter: ParameterCount, shard: int) -> int:
        return sum(t.numel(parameter, shard) * t.dtype.itemsize for t in self.tensors.get(parameter.name, ()))

    def steps_with(self, shards: Sequence[int]) -> int:
        """Temporary bytes of a step, for shards of so many bytes."""
        return round(self.stepping * (sum(shards) if self.at_once else max(shards, default=0)))


def ask(model: Model) -> OptimizerState:
    """The state that the module's optimizers keep.

    Raises:
        ConfigurationError: They, or ``configure_optimizers``, can't be run on parameters of a few elements.
    """
    try:
        return _ask(model)
    except Exception as error:  # from the user's code, or an optimizer
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigurationError(
            f"The optimizer's state isn't known ({reason}), and so not what fits: plan with one that steps on any small"
            " parameters."
        ) from error


def _ask(model: Model) -> OptimizerState:
    module = model.copy()
    with model.fake_trainer(module):
        optimizers: list[torch.optim.Optimizer] = tree.leaves(module.configure_optimizers(), torch.optim.Optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tensors: dict[str, tuple[StateTensor, ...]] = {}
    stepping, at_once = 0.0, False
    for optimizer in optimizers:
        together = any(_takes_all_at_once(group, model.device_type) for group in optimizer.param_groups)
        small = _on_small_ones(optimizer, names, together)
        stepping = max(stepping, _step(optimizer, together))
        others = dict(small.values())
        for group in optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
        _step(optimizer, together)
        at_once = at_once or together
        for name, two in small.items():
            tensors[name] = tuple(_kept(optimizer, two))
    return OptimizerState(tuple(type(optimizer).__name__ for optimizer in optimizers), tensors, stepping, at_once)


def _takes_all_at_once(group: dict[str, Any], device_type: str) -> bool:
    """Whether a step works on all parameters together (``foreach``), which is torch's default on GPUs."""
    if "foreach" not in group or group.get("fused"):
        return False
    return bool(group["foreach"]) or (group["foreach"] is None and device_type != "cpu")


def _on_small_ones(optimizer: torch.optim.Optimizer, names: Mapping[int, str], at_once: bool) -> dict[str, _Two]:
    """Give an optimizer a small parameter for each kind in each group; returns these by name, each with another one.

    With ``at_once`` its steps work on all together on the CPU too, with other temporary tensors.
    """
    small: dict[str, _Two] = {}
    optimizer.state.clear()
    for group in optimizer.param_groups:
        of_kind: dict[Any, _Two] = {}
        for parameter in group["params"]:
            kind = parameter.ndim, parameter.dtype
            if kind not in of_kind:
                one, other = (torch.ones(sizes[: parameter.ndim], dtype=parameter.dtype) for sizes in _SIZES)
                of_kind[kind] = nn.Parameter(one), nn.Parameter(other)
            if id(parameter) in names:
                small[names[id(parameter)]] = of_kind[kind]
        group["params"] = [parameter for parameter, _ in of_kind.values()]
        fixed = {"capturable": False} if group.get("fused") else {"capturable": False, "foreach": at_once}
        group.update({key: value for key, value in fixed.items() if key in group})
    return small


def _step(optimizer: torch.optim.Optimizer, at_once: bool) -> float:
    """Take two steps; returns the second one's temporary bytes, per byte of the largest parameter, or group of them."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        ledger = Ledger()
        with ledger:
            ledger.begin("step")
            optimizer.step()
    groups = [group["params"] for group in optimizer.param_groups] if at_once else [[each] for each in parameters]
    largest = max((sum(each.nbytes for each in group) for group in groups), default=1)
    return ledger.growth["step"] / max(largest, 1)


def _kept(optimizer: torch.optim.Optimizer, two: _Two) -> Iterator[StateTensor]:
    """What an optimizer keeps for both small parameters of a kind; a ValueError if that can't be told."""
    own, others = (_tensors_in(optimizer.state.get(parameter, {})) for parameter in two)
    for key in {**own, **others}:
        if key not in own or key not in others:
            raise ValueError(f"it keeps {key!r} for some parameters only")
        yield _described(key, own[key], others[key], two)


def _tensors_in(state: Any) -> dict[str, Tensor]:
    return {".".join(path): leaf for path, leaf in tree.walk(state) if isinstance(leaf, Tensor)}


def _described(key: str, value: Tensor, of_other: Tensor, two: _Two) -> StateTensor:
    parameter, other = two
    every = tuple(range(parameter.ndim))
    if value.shape == parameter.shape or (value.shape, of_other.shape) == ((parameter.numel(),), (other.numel(),)):
        return StateTensor(key, every, value.dtype, True)
    dims: list[int] = []
    times = 1
    places = {sizes: dim for dim, sizes in enumerate(zip(parameter.shape, other.shape))}
    for sizes in zip(value.shape, of_other.shape, strict=True):
        if sizes in places:
            dims.append(places[sizes])
        elif sizes[0] == sizes[1]:
            times *= sizes[0]
        else:
            raise ValueError(f"it keeps {key!r} of {sizes[0]} elements for a parameter of {tuple(parameter.shape)}")
    return StateTensor(key, tuple(dims), value.dtype, tuple(sorted(dims)) == every, times)
