"""What configure_optimizers sees on a stage: all parameters, in the whole module's order, tied ones once."""

from __future__ import annotations

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.parallel.blocks import names_of_parameters
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.plugin.assembly.all_parameters import all_parameters, leave_out_elsewhere


def fail(*_: object) -> NoReturn:
    raise AssertionError


def whole() -> nn.ModuleDict:
    module = nn.ModuleDict({"embed": nn.Embedding(3, 2), "norm": nn.LayerNorm(2), "head": nn.Linear(2, 3)})
    module["head"].weight = module["embed"].weight
    module["norm"].bias.requires_grad_(False)
    return module


def hollow_out(module: nn.Module, name: str) -> None:
    owner, _, key = name.rpartition(".")
    part = module.get_submodule(owner)
    parameter: Any = part._parameters.pop(key)
    vars(part)[key] = Hollow.of(parameter, torch.device("cpu"), name, 1, fail)


@pytest.mark.parametrize(
    "elsewhere",
    [["norm.weight"], ["norm.weight", "norm.bias"], ["embed.weight", "head.weight", "norm.bias"]],
)
def test_groups_are_those_of_the_whole_module(elsewhere: list[str]) -> None:
    module, stage = whole(), whole()
    first = {name: names[0] for names in names_of_parameters(module) for name in names}
    names = {name: first[name] for name, _ in module.named_parameters(remove_duplicate=False)}
    for name in elsewhere:
        hollow_out(stage, name)
    before = dict(stage.named_parameters())
    of_other = {name: p.requires_grad for name, p in module.named_parameters(remove_duplicate=False)}
    with all_parameters(stage, names, lambda own: [own, of_other]):
        seen = dict(stage.named_parameters())
        expected = dict(module.named_parameters())
        assert [*seen] == [*expected]
        for name, parameter in seen.items():
            like: Tensor = expected[name]
            assert isinstance(parameter, nn.Parameter)
            assert (parameter.shape, parameter.dtype, parameter.requires_grad) == (
                like.shape,
                like.dtype,
                like.requires_grad,
            )
        assert stage["head"].weight is stage["embed"].weight
        optimizer = torch.optim.Adagrad([*stage.named_parameters()], lr=0.1)
    assert dict(stage.named_parameters()) == before
    assert all(isinstance(stage.get_submodule(n.split(".")[0]).__dict__[n.split(".")[1]], Hollow) for n in elsewhere)
    leave_out_elsewhere(optimizer)
    [group] = optimizer.param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in before.values()]
    assert group["param_names"] == [*before]
    assert {id(key) for key in optimizer.state} == {id(parameter) for parameter in before.values()}
