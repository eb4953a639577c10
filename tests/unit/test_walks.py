"""Code that goes over a stage's parameters as if they were all: what is said of an optimizer's groups."""

from __future__ import annotations

import warnings
from typing import NoReturn

import pytest
import torch
from torch import nn

from lightning_shard.pipeline.taint import Hollow
from lightning_shard.plugin.steps.walks import Walks, note_missing_parameter


def test_who_goes_over_an_optimizers_groups_is_told_once_and_not_torch_itself() -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW(parameters)
    held = optimizer.param_groups[0]["params"]
    walks = Walks({})
    with warnings.catch_warnings(), walks.showing_gradients([optimizer]):
        warnings.simplefilter("error")
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(UserWarning, match=r"optimizer's groups.*its stage's: work on each by itself is right"):
            sum(p.numel() for group in optimizer.param_groups for p in group["params"])
        assert [*optimizer.param_groups[0]["params"]] == parameters
        optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    assert optimizer.param_groups[0]["params"] is held
    assert type(held) is list
    assert len(held) == 3


def test_after_a_run_who_goes_over_a_stages_parameters_is_told_until_the_next_is_set_up() -> None:
    module = nn.Linear(2, 2)
    vars(module)["named_parameters"] = module.named_parameters
    walks = Walks({"": module})
    walks.warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        next(module.parameters())
        with pytest.raises(UserWarning, match=r"the parameters of the LightningModule\. .*gather_full_parameters"):
            sum(p.numel() for p in module.parameters())
        Walks({"": module}).release()
        assert len([*module.parameters()]) == 2


def fail(*_: object) -> NoReturn:
    raise AssertionError


def test_who_looks_up_another_stages_parameter_is_told_where_it_is() -> None:
    module = nn.Module()
    module.net = nn.Linear(2, 2)
    hollow = Hollow.of(module.net.weight, torch.device("cpu"), "net.weight", 1, fail)
    del module.net._parameters["weight"]
    vars(module.net)["weight"] = hollow
    for key, notes in (("weight", 1), ("net.weight", 1), ("bias", 0), ("eight", 0)):
        error = KeyError(key)
        for _ in range(2):
            note_missing_parameter(error, module)
        assert len(getattr(error, "__notes__", ())) == notes
