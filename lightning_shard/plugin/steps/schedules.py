"""Which schedule a pipeline runs: the one that the user chose, or the fastest by simulation."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.orders import SCHEDULES, build
from lightning_shard.pipeline.placement import Placement
from lightning_shard.pipeline.schedule import Schedule, to_csv
from lightning_shard.pipeline.simulate import Costs, fastest, simulate
from lightning_shard.plugin.groups import Groups

RUN = ("1F1B", "Eager1F1B", "GPipe")
"""Of the schedules that have names, those that ``PipelinedStep`` runs."""


def candidates(setting: str, ranks: int, microbatches: int | None) -> list[Schedule]:
    """The schedules among which a setting leaves the choice: one, but for ``"auto"``.

    Raises:
        ConfigurationError: There is no such schedule, it isn't for these numbers, or it can't be run yet.
    """
    if setting == "auto":
        return [build(name, ranks, microbatches) for name in RUN]
    choices = f'{", ".join(map(repr, RUN))}, "auto", or the path of a .csv file'
    if setting in SCHEDULES and setting not in RUN:
        raise ConfigurationError(
            f"schedule={setting!r} can't be run in this version (it needs several stages on a rank, or backwards in two"
            f" parts): use one of {choices}."
        )
    if setting not in SCHEDULES and not setting.endswith(".csv"):
        raise ConfigurationError(f"schedule={setting!r} isn't one of {choices}.")
    schedule = build(setting, ranks, microbatches)
    if schedule.stages > ranks or schedule.splits_backwards:
        what = "backwards in two parts (I and W)" if schedule.stages == ranks else "several stages on a rank"
        raise ConfigurationError(
            f"schedule={setting!r} has {what}, which can't be run in this version: give each rank one stage, and whole"
            " backwards (B)."
        )
    return [schedule]


def choose(schedules: Sequence[Schedule], placement: Placement, groups: Groups) -> Schedule:
    """The fastest on these stages; a collective call over the pipeline where it is read from a file.

    Raises:
        ConfigurationError: The ranks have read different files.
    """
    if len(schedules) == 1:
        _check_same(schedules[0], groups)
        return schedules[0]
    costs = Costs.of_forwards([float(stage.cost) for stage in placement.stages])
    timelines = [simulate(schedule, costs) for schedule in schedules]
    chosen = fastest(timelines)
    shares = "; ".join(map(str, timelines))
    rank_zero_info(
        f'schedule="auto" chose {chosen.schedule.name}, by a simulation of the stages\' costs that takes no time for'
        f" transfers ({shares})"
    )
    return chosen.schedule


def _check_same(schedule: Schedule, groups: Groups) -> None:
    if schedule.name in SCHEDULES:
        return
    if len(set(groups.gather_over_stages(to_csv(schedule)))) > 1:
        raise ConfigurationError(
            f"schedule={schedule.name!r} is another file on other ranks, and they would wait for each other: give all"
            " of them the same one."
        )
