"""What a rank asks of its links in a steady step, in which order, and on which process groups.

An accelerator works on what it was asked for while the host goes on, so that what is asked early costs nothing. The
order of asking can be seen on the CPU.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from itertools import takewhile
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule

from lightning_shard.layout import Layout
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.schedules.schedule import Action
from lightning_shard.plugin.groups import Groups
from lightning_shard.testing import run_ranks
from tests.parity import layout, train

Event = tuple[Any, ...]
STEADY = 2
TALKS = ("send_object_list", "recv_object_list", "all_gather_object", "broadcast_object_list")


class Notes(L.Callback):
    """Notes calls of a whole fit; of the last step, apart, in the order of its actions.

    Attributes:
        step: Of the last step.
        values: The groups that hidden states and gradients travel on.
        talks: Those that objects travel on, which aren't all ranks' own.
    """

    def __init__(self) -> None:
        self.step: list[Event] = []
        self.values: set[str] = set()
        self.talks: set[str] = set()

    def begins(self, action: Action) -> None:
        self.step.append((action.kind, action.stage, action.microbatch))

    def computes(self) -> None:
        self.step.append(("computes",))

    def ends(self) -> None: ...

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEADY:
            self.step.clear()
            trainer.strategy.watch_actions(self)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy.watch_actions(None)

    def noting(self) -> ExitStack:
        stack = ExitStack()
        expect, unshard = Channel._expect, FSDPModule.unshard

        def expecting(channel: Channel, slots: Any, what: str, source: int) -> Any:
            self.step.append(("expects", what, channel.stage))
            return expect(channel, slots, what, source)

        def gathering(unit: Any, async_op: bool = False) -> Any:
            self.step.append(("gathers", async_op))
            return unshard(unit, async_op)

        stack.enter_context(mock.patch.object(Channel, "_expect", expecting))
        stack.enter_context(mock.patch.object(FSDPModule, "unshard", gathering))
        for name in ("isend", "irecv"):
            stack.enter_context(mock.patch.object(dist, name, self._on(getattr(dist, name), self.values)))
        for name in TALKS:
            stack.enter_context(mock.patch.object(dist, name, self._on(getattr(dist, name), self.talks)))
        return stack

    @staticmethod
    def _on(call: Any, groups: set[str]) -> Any:
        def noted(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            groups.add((group or dist.group.WORLD).group_name)
            return call(*args, group=group, **kwargs)

        return noted


def steady_steps(schedules: list[str]) -> dict[str, tuple[list[Event], set[str], set[str]]]:
    """With a cast, stages have units of FSDP2 where there is one data rank, too."""
    ran = {}
    for schedule in schedules:
        notes = Notes()
        with notes.noting():
            options: Any = {"trainer": {"precision": "bf16-mixed", "limit_val_batches": 0}, "schedule": schedule}
            train("gpt", layout(pipeline=2), steps=STEADY + 1, callbacks=[notes], **options)
        ran[schedule] = notes.step, notes.values, notes.talks
    return ran


@pytest.mark.parametrize(
    "schedules",
    [["1F1B"], pytest.param(["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"], marks=pytest.mark.long)],
    ids=["1F1B", "others"],
)
def test_gathers_begin_first_and_receives_are_posted_one_action_ahead(schedules: list[str]) -> None:
    for ran in run_ranks(steady_steps, 2, schedules, elastic=True):
        for schedule, (events, values, talks) in ran.items():
            kinds = [event[0] for event in events]
            assert ("gathers", True) in events
            assert kinds.index("expects") > max(i for i, event in enumerate(events) if event == ("gathers", True))
            actions = [event for event in events if event[0] in "FBIW"]
            stages = 2 if schedule == "1F1B" else 4
            ahead = [_expected(action, stages) for action in actions]
            awaited: list[Event] = []
            for number, action in enumerate(actions):
                posted = [each for each in ahead[: number + 2] if each is not None]
                begun = events.index(action)
                asked = takewhile(lambda event: event[0] == "expects", events[begun + 1 :])
                awaited = [*(event for event in events[:begun] if event[0] == "expects"), *asked]
                assert awaited == posted, (schedule, action)
            assert awaited
            assert values
            assert talks
            assert not values & talks


def _expected(action: Event, stages: int) -> Event | None:
    """What an action receives."""
    kind, stage, _ = action
    if kind == "F":
        return ("expects", "value", stage) if stage else None
    return ("expects", "gradient", stage) if kind in "BI" and stage < stages - 1 else None


# -- groups are an axis's, and not a rank's


def made(sizes: list[dict[str, int]]) -> list[tuple[int, int]]:
    """How many groups each layout makes beside its mesh, and of how many this rank is one then."""
    counts = []
    for each in sizes:
        resolved = Layout.resolve(dist.get_world_size(), dist.get_rank(), **each)
        before = len(distributed_c10d._world.pg_map)
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
            Groups.make(resolved, resolved.mesh("cpu"), timedelta(seconds=60), both_ways=True)
        counts.append((new_group.call_count, len(distributed_c10d._world.pg_map) - before))
    return counts


def test_a_rank_makes_as_many_groups_however_many_ranks_an_axis_has() -> None:
    pairs, fours = layout(pipeline=2), layout(pipeline=4)
    of_two = run_ranks(made, 2, [pairs, layout(data=2)])
    of_four = run_ranks(made, 4, [fours, layout(data=4), layout(pipeline=2, data=2), layout(pipeline=2, tensor=2)])
    stages, data = of_two[0]
    assert stages[0] == 5  # values and gradients, each both ways, and what stages say to each other
    assert data[0] == 0
    of_two_axes = (5, 5 + 3)  # and one for each of the mesh
    assert of_two == [[stages, data]] * 2
    assert of_four == [[stages, data, of_two_axes, of_two_axes]] * 4
