"""Detects optimizers whose update of one parameter depends on others, such as on a norm over all of them."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_STEPS = 3
_SCALES = (1.0, 1000.0)
_Make = Callable[[torch.optim.Optimizer, list[torch.nn.Parameter]], Any]


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's updates depend on other parameters, tested on two small ones.

    torch's own optimizers don't. An optimizer that can't be created again from its settings, such as one around another
    optimizer, is tested as a copy. If that fails too, or if it draws random numbers, nothing is known: the answer is
    ``False``.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    for make in (_anew, _as_a_copy):
        with torch.random.fork_rng(devices=()), torch.enable_grad():
            before = torch.get_rng_state()
            try:
                together, alone = (_stepped(optimizer, make, scales) for scales in (_SCALES, _SCALES[:1]))
            except Exception:
                continue
            draws = not torch.equal(before, torch.get_rng_state())
            return not draws and not torch.allclose(together, alone, rtol=1e-4, atol=1e-7, equal_nan=True)
    return False


def _stepped(optimizer: torch.optim.Optimizer, make: _Make, scales: Sequence[float]) -> Tensor:
    """The first of some small parameters after a few steps, with gradients of these scales."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in scales]
    made = make(optimizer, parameters)
    generator.manual_seed(1)
    for gradient in torch.randn(_STEPS, 4, 4, generator=generator):

        def closure(gradient: Tensor = gradient) -> Tensor:
            # gradients depend on the parameters' values, which reveals optimizers that perturb them by a common norm
            for parameter, scale in zip(parameters, scales):
                parameter.grad = (gradient + parameter.detach().square()) * scale
            return torch.zeros(())

        closure()
        made.step(*([closure] if "closure" in inspect.signature(made.step).parameters else []))
    return parameters[0].detach()


def _anew(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Any:
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: copy.deepcopy(value) for name, value in optimizer.defaults.items() if name in known}
    group: dict[str, Any] = {
        name: copy.deepcopy(value) for name, value in optimizer.param_groups[0].items() if name in settings
    }
    return type(optimizer)([{**group, "params": parameters, "lr": 0.1}], **settings)


def _as_a_copy(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter]) -> Any:
    """A copy of an optimizer and of those inside it; their first groups get these parameters, other groups none.

    Raises:
        TypeError: It holds other tensors.
    """
    inside = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    memo: dict[int, Any] = {}
    for each in (optimizer, *inside):
        memo[id(each)] = type(each).__new__(type(each))
        memo[id(each.state)] = defaultdict(dict)
        memo.update((id(group["params"]), [] if i else parameters) for i, group in enumerate(each.param_groups))
    for each in (optimizer, *inside):
        # a scheduler replaces `step` by a function that steps the original optimizer
        held = {name: value for name, value in vars(each).items() if not inspect.isroutine(value)}
        with _WithoutTensors():
            memo[id(each)].__dict__.update(copy.deepcopy(held, memo))
        for group in memo[id(each)].param_groups:
            group["lr"] = 0.1
    return memo[id(optimizer)]


class _WithoutTensors(TorchFunctionMode):
    """Refuses copies of tensors inside: they may be as large as the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            raise TypeError("a copy of a tensor")
        return func(*args, **(kwargs or {}))
