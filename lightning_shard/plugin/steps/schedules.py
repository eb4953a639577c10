"""Which schedule a pipeline runs: the one that the user chose, or the fastest by simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.errors import ConfigurationError, PlacementError
from lightning_shard.pipeline.orders import SCHEDULES, build
from lightning_shard.pipeline.placement import Placement, Policy
from lightning_shard.pipeline.schedule import Schedule, to_csv
from lightning_shard.pipeline.simulate import Costs, fastest, simulate
from lightning_shard.plugin.groups import Groups

RUN = ("1F1B", "Eager1F1B", "GPipe", "Interleaved1F1B")
"""Of the schedules that have names, those that ``PipelinedStep`` runs."""
ONE_EACH = ("1F1B", "Eager1F1B", "GPipe")
"""Those with one stage on each rank, among which ``"auto"`` chooses."""


def candidates(setting: str, ranks: int, microbatches: int | None, placement: Policy = "auto") -> list[Schedule]:
    """The schedules among which a setting leaves the choice: one, but for ``"auto"``.

    Args:
        placement: Where it holds a number for each stage, these say how many stages a rank has.

    Raises:
        ConfigurationError: There is no such schedule, it isn't for these numbers, or it can't be run yet.
    """
    if setting == "auto":
        return [build(name, ranks, microbatches) for name in ONE_EACH]
    choices = f'{", ".join(map(repr, RUN))}, "auto", or the path of a .csv file'
    if setting in SCHEDULES and setting not in RUN:
        raise ConfigurationError(
            f"schedule={setting!r} can't be run in this version (it needs backwards in two parts): use one of"
            f" {choices}."
        )
    if setting not in SCHEDULES and not setting.endswith(".csv"):
        raise ConfigurationError(f"schedule={setting!r} isn't one of {choices}.")
    schedule = build(setting, ranks, microbatches, _stages_per_rank(setting, ranks, placement))
    if schedule.splits_backwards:
        raise ConfigurationError(
            f"schedule={setting!r} has backwards in two parts (I and W), which can't be run in this version: give it"
            " whole backwards (B)."
        )
    return [schedule]


def _stages_per_rank(name: str, ranks: int, placement: Policy) -> int | None:
    """As counts say it; ``None`` where they don't, or don't fit."""
    if isinstance(placement, str) or name not in SCHEDULES or SCHEDULES[name].stages == (1, 1):
        return None
    stages, rest = divmod(len(placement), ranks)
    return None if rest or not stages else stages


def that_fit(schedules: Sequence[Schedule], blocks: int, placement: Policy) -> list[Schedule]:
    """Those with a block, or as many as were chosen, for each stage.

    Raises:
        PlacementError: There are too few blocks for several stages on each rank.
    """
    fit = [s for s in schedules if s.stages <= blocks and (isinstance(placement, str) or len(placement) == s.stages)]
    if fit:
        return fit
    schedule, ranks = schedules[0], len(schedules[0].rows)
    if schedule.stages > max(blocks, ranks):
        raise PlacementError(
            f"schedule={schedule.name!r} has {schedule.stages} stages on {ranks} ranks, and the network has {blocks}"
            ' blocks, of which each stage needs one: use schedule="1F1B", which has one stage on each rank, or fewer'
            " pipeline ranks."
        )
    return [schedule]


def choose(schedules: Sequence[Schedule], placed: Callable[[Schedule], Placement], groups: Groups) -> Schedule:
    """The fastest on its stages; a collective call over the pipeline where it is read from a file.

    Args:
        placed: The stages of a schedule.

    Raises:
        ConfigurationError: The ranks have read different files.
    """
    if len(schedules) == 1:
        _check_same(schedules[0], groups)
        return schedules[0]
    timelines = [
        simulate(schedule, Costs.of_forwards([float(stage.cost) for stage in placed(schedule).stages]))
        for schedule in schedules
    ]
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
