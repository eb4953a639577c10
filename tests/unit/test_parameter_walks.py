"""Code that goes over a stage's parameters as if they were all: what is said of an optimizer's groups."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from typing import NoReturn

import pytest
import torch
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.plugin.steps.checks.parameter_walks import (
    OF_RANK,
    PartialStates,
    Walks,
    missing_parameter,
    note_missing_parameter,
)


def test_who_goes_over_an_optimizers_groups_is_told_once_and_not_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walks, "norms_are_whole", True)
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer = torch.optim.AdamW(parameters)
    held = optimizer.param_groups[0]["params"]
    walks = Walks({})
    with warnings.catch_warnings(), walks.warning_of_groups([optimizer]):
        warnings.simplefilter("error")
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(
            UserWarning, match=r"optimizer's groups.*only its own stage's: per-parameter operations are correct"
        ):
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
        next(module.parameters())
        with pytest.raises(UserWarning, match=r"clip_grad_norm_ \(torch.* iterates over the parameters of"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
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
    for key, notes, refused in (("weight", 1, False), ("net.weight", 1, True), ("bias", 0, False), ("eight", 0, False)):
        error = KeyError(key)
        for _ in range(2):
            note_missing_parameter(error, module)
        assert len(getattr(error, "__notes__", ())) == notes
        refusal = missing_parameter(KeyError(key), module)
        assert (refusal is not None and f"another one holds {key}" in str(refusal)) == refused


def part_of(module: nn.Module) -> Walks:
    vars(module)["named_parameters"] = module.named_parameters
    walks = Walks({"net": module})
    walks.guard()
    return walks


def test_before_training_parameters_shows_those_of_other_stages_without_values() -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(4, 5))
    names = [name for name, _ in net.named_parameters()]
    for path, elsewhere in (("0", ("weight", "bias")), ("1", ("bias",))):
        part = net.get_submodule(path)
        for key in elsewhere:
            hollow = Hollow.of(part._parameters.pop(key), torch.device("cpu"), f"{path}.{key}", 1, fail)  # type: ignore[arg-type]
            vars(part)[key] = hollow
    incomplete = {"": net, "0": net[0], "1": net[1]}
    for module in incomplete.values():
        vars(module)["named_parameters"] = module.named_parameters
    in_step = [False]
    walks = Walks(incomplete, names, lambda: in_step[0])
    walks.guard(shows_all=True)
    assert sum(p.numel() for p in net.parameters() if p.requires_grad) == 9 + 16 + 25
    assert [tuple(p.shape) for p in net.parameters()] == [(3, 2), (3,), (4, 3), (4,), (5, 4), (5,)]  # in order
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert len([*net[0].parameters()]) == 2
    assert len([*net.parameters(recurse=False)]) == 0
    in_step[0] = True
    assert len([*net[2].parameters()]) == 2
    in_step[0] = False
    walks.guard()
    assert sum(p.numel() for p in net[0].parameters()) == 9  # all of it elsewhere: nothing to take for all
    for module in (net, net[1]):
        with pytest.raises(StepError, match=r"iterates over the parameters of .*only its own stage's"):
            sum(p.numel() for p in module.parameters())


def test_what_fails_beside_a_part_is_refused_as_that() -> None:
    whole, part = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)), nn.Linear(2, 4)
    walks = part_of(part)

    def average() -> None:
        for old, new in zip(whole.parameters(), part.parameters()):
            old.data.add_(new.data)

    def average_named() -> None:
        for (_, old), (_, new) in zip(whole.named_parameters(), part.named_parameters()):
            old.data.add_(new.data)

    def average_states() -> None:
        for old, new in zip(whole.state_dict().values(), part.state_dict().values()):
            old.add_(new)

    def average_lists() -> None:
        old, new = list(whole.state_dict().values()), list(part.state_dict().values())
        raise RuntimeError(f"could not broadcast [4, 2] to [2, 3]: aten._foreach_lerp_.Scalar{[old, new] * 100}")

    def elsewhere() -> None:
        torch.ones(2).add_(torch.ones(3))

    averaged = torch.optim.swa_utils.AveragedModel(whole)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for code, what in (
            (average, "average .* the parameters of net"),
            (average_named, "average_named .* the parameters of net"),
            (average_states, "average_states .* the state_dict of net"),
            (average_lists, "average_lists .* the state_dict of net"),
            (lambda: averaged.update_parameters(part), "update_parameters .* the parameters of net"),
        ):
            with pytest.raises(RuntimeError) as caught:
                code()
            refusal = walks.refusal(caught.value)
            assert refusal is not None
            assert re.search(f"{what}.*only its own stage's part, which doesn't match what is whole", str(refusal))
            assert len(str(refusal)) < 1000
    with pytest.raises(RuntimeError) as caught:
        elsewhere()
    assert walks.refusal(caught.value) is None


def test_what_fails_after_a_part_was_gone_over_is_no_stages_problem() -> None:
    whole, part = nn.Linear(2, 4), nn.Linear(2, 4)
    walks = part_of(part)

    def moved() -> None:
        torch.ones(2, device=next(part.parameters()).device).add_(torch.ones(3))

    def logged() -> None:
        for _, parameter in part.named_parameters():
            parameter.detach().norm()
        torch.ones(2).add_(torch.ones(3))

    def left() -> None:
        for _ in part.named_parameters():
            break
        torch.ones(2).add_(torch.ones(3))

    def summed() -> None:
        sum(value.sum() for value in part.state_dict().values())
        torch.ones(2).add_(torch.ones(3))

    def strict() -> None:
        for _ in zip(whole.named_parameters(), list(part.named_parameters())[:1], strict=True):
            pass

    def passed() -> None:
        nn.Linear(3, 3).load_state_dict(part.state_dict())

    def zipped() -> None:
        for _ in zip([1, 2, 3], part.named_parameters(), strict=True):
            pass

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for code in (moved, logged, left, summed, strict):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                code()
            assert walks.refusal(caught.value) is None, code
        for code in (passed, zipped):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                code()
            assert f"{code.__name__} " in str(walks.refusal(caught.value))
        walks.warn()  # where named_parameters() alone is told

        def average() -> None:
            for old, new in zip([torch.ones(3)], part.parameters()):
                old.add_(new)

        with pytest.raises(RuntimeError) as caught:
            average()
        assert walks.refusal(caught.value) is not None


def test_an_average_of_parts_is_none_of_the_whole() -> None:
    module = nn.Linear(2, 2)
    averaged, ours = torch.optim.swa_utils.AveragedModel(module), torch.optim.swa_utils.AveragedModel(module)
    part_of(module)
    with pytest.raises(StepError, match=r"update_parameters .* iterates over the parameters of net"):
        averaged.update_parameters(module)
    vars(ours)["averages_parts"] = True
    ours.update_parameters(module)


def test_who_takes_a_parts_state_is_told_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    walks = part_of(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.ModuleList([module]).state_dict()  # torch's own code asks
        with pytest.raises(UserWarning, match=r"takes the state_dict of net.*a file of it.*lacks the rest"):
            module.state_dict()
        assert len(module.state_dict()) == 2
        walks.release()
        assert "state_dict" not in vars(module)


def test_each_function_is_told_once_and_not_only_the_first() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    part_of(module)

    def save() -> None:
        module.state_dict()

    def average() -> None:
        for _ in module.named_parameters():
            module.state_dict()

    told: list[list[str]] = []
    for code in (save, average, save, average):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            code()
        told.append([str(each.message).partition(" (")[0] for each in seen])
    assert told == [["save"], ["average", "average"], [], []]


def test_a_copy_of_what_is_told_of_has_its_own_state() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    PartialStates({"": module}, OF_RANK, {}).guard()
    others = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    with torch.no_grad():
        module[0].weight.add_(1)
    for other in others:
        with pytest.warns(UserWarning, match="DTensors, of which each rank has a part"):
            assert torch.equal(other.state_dict()["0.weight"], other[0].weight)


def test_a_state_dict_of_the_users_own_is_kept() -> None:
    module = nn.Linear(2, 2)
    vars(module)["state_dict"] = own = lambda: {"mine": 1}
    walks = part_of(module)
    walks.warn()
    with pytest.warns(UserWarning, match="takes the state_dict of net"):
        assert module.state_dict() == {"mine": 1}
    PartialStates({"": module}, OF_RANK, {}).release()  # another Trainer's
    assert vars(module)["state_dict"] is own
    vars(module)["state_dict"] = changed = lambda: {"mine": 2}
    walks.release()
    assert vars(module)["state_dict"] is changed


def test_a_copy_of_a_part_goes_over_its_own_parameters() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    walks = part_of(module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert dict(other.named_parameters())["0.weight"] is other[0].weight
            assert next(other.parameters()) is other[0].weight
            with pytest.raises(StepError, match="iterates over the parameters of net"):
                list(other.parameters())
    walks.release()
    assert dict(module.named_parameters())["0.weight"] is module[0].weight
