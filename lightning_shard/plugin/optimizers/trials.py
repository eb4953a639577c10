"""Steps an optimizer like a given one on a small parameter or two, to find out how it would step the real ones.

A group's settings may choose other code (``use_muon=True``), so groups of each kind are tried.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_shard.checkpoint.optimizers.named import NAMES_OF_NOTHING_ELSE
from lightning_shard.torch_private import calls_replaced

T = TypeVar("T")
Make = Callable[[list[nn.Parameter]], Any]
"""Makes an optimizer like a given one that steps these parameters as one of its groups."""
_STEPS = 3
SMALL = (5, 4)
_OF_RATES = {"lr", "initial_lr"}
"""Settings of groups that choose no other code."""


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def kinds_of_groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The indices of groups, by kind; those of a kind have the same settings, but for their learning rates."""
    kinds: dict[str, list[int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: group[key] for key in sorted(group) if key not in NAMES_OF_NOTHING_ELSE | _OF_RATES}
        kinds.setdefault(repr(settings), []).append(index)
    return [*kinds.values()]


def tried(optimizer: torch.optim.Optimizer, group: int, trial: Callable[[Make], T]) -> T | None:
    """What a trial returns that is given a function to make optimizers like this one, of the group of this index.

    An optimizer that can't be created again from its settings, such as one around another optimizer, is copied. If that
    fails too, or if random numbers are drawn, nothing is known, and the result is ``None``.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    for make in (_anew, _as_a_copy):
        with torch.random.fork_rng(devices), torch.enable_grad():
            before = _generators(devices)
            try:
                result = trial(partial(make, optimizer, group))
            except Exception:
                continue
            return result if all(map(torch.equal, before, _generators(devices))) else None
    return None


def _generators(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def initial(shape: Sequence[int] = SMALL) -> Tensor:
    """The first of the small parameters before it is stepped."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def stepped(
    make: Make,
    scales: Sequence[float] = (1.0,),
    place: Callable[[Tensor], Tensor] = Tensor.clone,
    shape: Sequence[int] = SMALL,
) -> Tensor:
    """The first of some small parameters after a few steps, with gradients of these scales.

    Args:
        place: What is made of each parameter's values and gradient before they are used, such as a DTensor.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(place(torch.randn(shape, generator=generator))) for _ in scales]
    made = make(parameters)
    generator.manual_seed(1)
    for whole in torch.randn(_STEPS, *shape, generator=generator):
        gradient = place(whole)

        def closure(gradient: Tensor = gradient) -> Tensor:
            # gradients depend on the parameters' values, which reveals optimizers that perturb them by a common norm
            for parameter, scale in zip(parameters, scales):
                parameter.grad = (gradient + parameter.detach().square()) * scale
            return torch.zeros(())

        closure()
        made.step(*([closure] if "closure" in inspect.signature(made.step).parameters else []))
    return parameters[0].detach()


def _anew(optimizer: torch.optim.Optimizer, group: int, parameters: list[nn.Parameter]) -> Any:
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: copy.deepcopy(value) for name, value in optimizer.defaults.items() if name in known}
    held = optimizer.param_groups[group].items()
    own = {name: copy.deepcopy(value) for name, value in held if name not in NAMES_OF_NOTHING_ELSE | _OF_RATES}
    return type(optimizer)([{**own, "params": parameters, "lr": 0.1}], **settings)


def _as_a_copy(optimizer: torch.optim.Optimizer, group: int, parameters: list[nn.Parameter]) -> Any:
    """A copy of an optimizer and of those inside it; their groups of this index get these parameters, others none."""
    inside = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    memo: dict[int, Any] = {}
    for each in (optimizer, *inside):
        memo[id(each)] = type(each).__new__(type(each))
        memo[id(each.state)] = defaultdict(dict)
        memo.update((id(held["params"]), parameters if i == group else []) for i, held in enumerate(each.param_groups))
    for each in (optimizer, *inside):
        # a scheduler replaces `step` by a function that steps the original optimizer
        held = {name: value for name, value in vars(each).items() if not inspect.isroutine(value)}
        with _WithoutTensors():
            memo[id(each)].__dict__.update(copy.deepcopy(held, memo))
        for made in memo[id(each)].param_groups:
            made["lr"] = 0.1
    return memo[id(optimizer)]


class _WithoutTensors(TorchFunctionMode):
    """Refuses copies of tensors inside: they may be as large as the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            raise TypeError("a copy of a tensor")
        return func(*args, **(kwargs or {}))


_SCALES = (1.0, 1000.0)
_OF_RANKS = "torch.distributed.optim."
"""Whose ``ZeroRedundancyOptimizer`` can't be tried, since it holds all parameters in attributes, too."""


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's updates depend on others, tested on two small ones; ``False`` where nothing is known."""
    if is_of_torch(optimizer):
        return False

    def differs(make: Make) -> bool:
        beside_another, alone = (stepped(make, scales) for scales in (_SCALES, _SCALES[:1]))
        return not torch.allclose(beside_another, alone, rtol=1e-4, atol=1e-7, equal_nan=True)

    return any(tried(optimizer, group, differs) for group, *_ in kinds_of_groups(optimizer))


def collective_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The first collective that its step calls, if it calls one: as where ranks take turns in computing updates."""
    if is_of_torch(optimizer):
        return None
    if type(optimizer).__module__.startswith(_OF_RANKS):
        return "broadcast"
    called: list[str] = []

    def ends_trial(name: str, _: Callable[..., Any]) -> Callable[..., NoReturn]:
        def end(*_: Any, **__: Any) -> NoReturn:
            called.append(name)
            raise _Called

        return end

    with calls_replaced(by=ends_trial):
        for group, *_ in kinds_of_groups(optimizer):
            tried(optimizer, group, stepped)
    return called[0] if called else None


class _Called(Exception):
    """Ends a trial before a collective: ranks need not make it together."""
