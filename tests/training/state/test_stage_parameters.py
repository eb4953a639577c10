"""Hooks that go over a stage's parameters as if they were all: what is shown, refused and warned of."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NoReturn

import pytest
import torch
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.plugin.steps.checks.stage_parameters import StageParameters, guard_of, seen_as_parts


class Guarded:
    """Modules, by name, of which this stage has a part, and a hook that runs."""

    def __init__(self, names: list[str] | None = None, **modules: nn.Module) -> None:
        for module in modules.values():
            vars(module)["named_parameters"] = module.named_parameters
        self.guard = StageParameters({name.strip("_"): each for name, each in modules.items()}, names or ())
        self.guard.guard()

    @contextmanager
    def hook(self, name: str = "Net.on_train_batch_end") -> Iterator[None]:
        with self.guard.hook(name, nullcontext()):
            yield


def total(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def fail(*_: object) -> NoReturn:
    raise AssertionError


def test_before_training_parameters_shows_those_of_other_stages_without_values() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    names = [name for name, _ in net.named_parameters()]
    for path, elsewhere in (("0", ("weight", "bias")), ("1", ("bias",))):
        part = net.get_submodule(path)
        for key in elsewhere:
            hollow = Hollow.of(part._parameters.pop(key), torch.device("cpu"), f"{path}.{key}", 1, fail)  # type: ignore[arg-type]
            vars(part)[key] = hollow
    guarded = Guarded(names, **{"_": net, "0": net[0], "1": net[1]})
    guarded.guard.guard(shows_all=True)
    with guarded.hook():
        assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 9 + 16 + 25
        assert [tuple(p.shape) for p in net.parameters()] == [(3, 2), (3,), (4, 3), (4,), (5, 4), (5,)]  # in order
        assert all(isinstance(p, nn.Parameter) for p in net.parameters())
        assert len([*net[0].parameters()]) == 2
        assert len([*net.parameters(recurse=False)]) == 0
        with guarded.guard.aside():
            assert len([*net.parameters()]) == 3  # what the hook calls of Lightning's
    assert len([*net.parameters()]) == 3
    guarded.guard.guard()
    with guarded.hook():
        assert total(net[0]) == 9  # all of it elsewhere: nothing to take for all
    for module in (net, net[1]):
        with pytest.raises(StepError, match=r"Net.on_train_batch_end iterates over .*only its own"), guarded.hook():
            total(module)


def test_clipping_and_what_treats_each_parameter_by_itself_is_no_sum_over_a_part() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    guarded = Guarded(net=module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with guarded.hook():
            assert next(module.parameters()).device.type == "cpu"
            module.requires_grad_(False).zero_grad()
            [*module.parameters()]
            guarded.guard.take_whole()  # as torch's and Lightning's functions do
            with seen_as_parts(module):
                total(module)


def test_each_hook_that_takes_a_part_is_told_once_and_its_errors_have_it_in_a_note() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    guarded = Guarded(net=module)

    def save() -> None:
        module.state_dict()

    def average() -> None:
        dict(module.named_parameters())

    told: list[list[str]] = []
    for code in (save, average, save, average):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with guarded.hook(code.__name__):
                code()
        told.append([str(each.message).partition(". ")[0] for each in seen])
    assert told == [
        ["save iterates over state_dict() of net"],
        ["average iterates over named_parameters() of net"],
        [],
        [],
    ]

    def average_whole() -> None:
        for old, new in zip([torch.ones(2, 2), torch.ones(3)], [*module.parameters()]):
            old.add_(new)

    def look_up() -> None:
        dict(module.named_parameters())["1.weight"]

    for code, what in ((average_whole, "parameters()"), (look_up, "named_parameters()")):
        with pytest.raises((RuntimeError, KeyError)) as caught, guarded.hook():
            code()
        assert f"iterates over {what} of net. With pipeline stages" in caught.value.__notes__[0]


def test_after_a_run_all_code_is_told_until_the_next_is_set_up() -> None:
    module = nn.Linear(2, 2)
    guarded = Guarded(_=module)
    guarded.guard.guard(is_after_run=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(module.parameters())
        with pytest.raises(UserWarning, match=r"parameters\(\) of the LightningModule\. .*gather_full_parameters"):
            total(module)
        with pytest.raises(UserWarning, match=r"state_dict\(\) of the LightningModule\. .*trainer.save_checkpoint"):
            module.state_dict()
        assert guard_of(module) is guarded.guard
        StageParameters({"": module}).release()  # another Trainer's
        assert guard_of(module) is None
        assert len([*module.parameters()]) == 2
