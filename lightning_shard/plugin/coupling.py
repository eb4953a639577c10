"""Optimizers that take something over all of their parameters, such as a norm that limits the step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_STEPS = 3
_SCALES = (1.0, 1000.0)


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's steps depend on other parameters, as tried on two small ones.

    Those of torch don't. Of one that can't be made anew by its settings, or that draws random numbers, nothing is
    known: it is taken not to.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return False
    with torch.random.fork_rng(devices=()), torch.enable_grad():
        before = torch.get_rng_state()
        try:
            together, alone = _stepped(optimizer, _SCALES), _stepped(optimizer, _SCALES[:1])
        except Exception:
            return False
        draws = not torch.equal(before, torch.get_rng_state())
    return not draws and not torch.allclose(together, alone, rtol=1e-4, atol=1e-7)


def _stepped(optimizer: torch.optim.Optimizer, scales: Sequence[float]) -> Tensor:
    """The first of some small parameters after a few steps, with gradients of these scales."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(4, 4, generator=generator)) for _ in scales]
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: copy.deepcopy(value) for name, value in optimizer.defaults.items() if name in known}
    group: dict[str, Any] = {
        name: copy.deepcopy(value) for name, value in optimizer.param_groups[0].items() if name in settings
    }
    made = type(optimizer)([{**group, "params": parameters, "lr": 0.1}], **settings)
    generator.manual_seed(1)
    for gradient in torch.randn(_STEPS, 4, 4, generator=generator):
        for parameter, scale in zip(parameters, scales):
            parameter.grad = gradient * scale
        made.step()
    return parameters[0].detach()
