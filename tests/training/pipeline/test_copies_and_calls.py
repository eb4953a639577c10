"""What each pipeline stage would do for itself: change its copy of a frozen network, call a collective on the world."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.alike import OwnCalls
from lightning_shard.plugin.steps.checks.buffers import CopiesOfStages


def stage(index: int) -> nn.Module:
    """A student's part, and a whole teacher."""
    torch.manual_seed(0)
    student = nn.ModuleDict({str(index): nn.Linear(2, 2)})
    return nn.ModuleDict({"student": student, "teacher": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})


def on_two_stages(changes: Any) -> list[BaseException | None]:
    """Errors of both, of a check after each of two changes."""
    values: list[Any] = [None, None]
    meeting = threading.Barrier(2, timeout=30)

    roots = [stage(index) for index in range(2)]  # one after the other: they share torch's generator

    def run(index: int) -> None:
        def gather(own: Any) -> list[Any]:
            values[index] = own
            meeting.wait()
            seen = list(values)
            meeting.wait()
            return seen

        root = roots[index]
        teacher: Any = root["teacher"]
        teacher.requires_grad_(False)
        copies = CopiesOfStages(root, (), gather, None, torch.device("cpu"))
        copies.join(is_early=True)
        for _ in range(2):
            changes(index, root)
            copies.join(is_early=False)

    with ThreadPoolExecutor(2) as pool:
        return [future.exception() for future in [pool.submit(run, index) for index in range(2)]]


def test_copies_of_a_teacher_that_part_are_refused_on_all_stages() -> None:
    def late(index: int, root: Any) -> None:  # after steps that may have used it
        root["teacher"][index].weight.lerp_(root["student"][str(index)].weight.detach() + 1, 0.5)

    def by_position(index: int, root: Any) -> None:
        root["teacher"][0].weight.lerp_(root["student"][str(index)].weight.detach() + 1 + index, 0.5)

    def alike(index: int, root: Any) -> None:
        root["teacher"][0].weight.mul_(0.5)
        with torch.no_grad():
            root["student"][str(index)].weight.add_(index)

    assert on_two_stages(alike) == [None, None]
    for changes in (late, by_position):
        for error in on_two_stages(changes):
            assert isinstance(error, StepError)
            assert "teacher.0.weight is frozen" in str(error) or "teacher.1.weight is frozen" in str(error)


@dataclass
class Stages:
    in_step: bool


@pytest.mark.parametrize("in_step", [True, False])
def test_a_steps_own_collective_calls_over_the_world_are_refused(in_step: bool) -> None:
    own, calls = dist.all_reduce, OwnCalls(cast(Any, Stages(in_step)))
    with calls.watched():
        assert not calls.made
        for call in (lambda: dist.all_reduce(torch.ones(1)), dist.barrier):
            with pytest.raises(StepError, match=r"calls torch\.distributed\.(all_reduce|barrier) over all ranks"):
                call()
    assert dist.all_reduce is own
    assert calls.made == in_step  # what was logged is reduced when the step has ended
