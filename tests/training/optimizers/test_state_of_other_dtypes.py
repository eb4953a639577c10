"""An optimizer's state that is loaded for parameters of another dtype is what torch's own ``load_state_dict`` makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shard import checkpoint


class KeepsItsOwn(torch.optim.SGD):
    """As optimizers with master weights do."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError


MAKE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.1, amsgrad=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 0.1),
    "its own": lambda parameters: KeepsItsOwn(parameters, 0.1, momentum=0.9),
}


def made(dtype: torch.dtype, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Linear(4, 4).to(dtype)
    return module, MAKE[optimizer](module.parameters())


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 4, dtype=next(module.parameters()).dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_it_is_converted_as_torch_does(optimizer: str, dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path) -> None:
    module, saved = made(dtypes[0], optimizer)
    step(module, saved)
    checkpoint.save(module, tmp_path / "c", optimizer=saved)
    found, loaded = made(dtypes[1], optimizer)
    checkpoint.load(tmp_path / "c", into=found, optimizer=loaded, cast=True)
    if optimizer == "its own":
        assert {state["momentum_buffer"].dtype for state in loaded.state.values()} == {dtypes[0]}
        return
    expected, plain = made(dtypes[1], optimizer)
    expected.load_state_dict(module.state_dict())
    plain.load_state_dict(saved.state_dict())
    for (name, parameter), other in zip(expected.named_parameters(), found.parameters()):
        for key, value in plain.state[parameter].items():
            held = loaded.state[other][key]
            assert (type(held), getattr(held, "dtype", None)) == (type(value), getattr(value, "dtype", None)), (
                name,
                key,
            )
            assert bool(torch.as_tensor(held == value).all()), (name, key)
    step(found, loaded)
