"""Chooses the pipeline schedule: the one that the user named, or the fastest in a simulation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.errors import ConfigurationError, PlacementError
from lightning_shard.pipeline.placement import Placement, Policy
from lightning_shard.pipeline.schedules.choice import Choice, best
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.schedule import Schedule, to_csv
from lightning_shard.plugin.groups import Groups

ONE_EACH = ("1F1B", "Eager1F1B", "GPipe")
"""Schedules with one stage on each rank, whose backwards aren't split in two parts."""
SIMPLEST_FIRST = (*ONE_EACH, "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def candidates(
    setting: str | os.PathLike[str], ranks: int, microbatches: int | None, placement: Policy = "auto"
) -> list[Schedule]:
    """The schedules that a setting allows, the simplest first: several for ``"auto"``, else one.

    Args:
        placement: If it holds a count for each stage, the counts determine how many stages a rank has.

    Raises:
        ConfigurationError: No such schedule exists, or it can't be built for these numbers.
        PlacementError: There are more or fewer counts than stages.
    """
    if isinstance(setting, os.PathLike):
        setting = os.fspath(setting)
    if setting == "auto":
        found = [*_all(ranks, microbatches, placement)]
    elif isinstance(setting, str) and (setting in SCHEDULES or setting.endswith(".csv")):
        found = [build(setting, ranks, microbatches, _stages_per_rank(setting, ranks, placement))]
    else:
        choices = f'{", ".join(map(repr, SCHEDULES))}, "auto", or the path of a .csv file'
        raise ConfigurationError(f"schedule={setting!r} isn't one of {choices}.")
    _check_counts(found, ranks, placement)
    return found


def _check_counts(schedules: Sequence[Schedule], ranks: int, placement: Policy) -> None:
    """Check that explicit block counts are as many as the stages of some schedule."""
    if isinstance(placement, str) or any(len(placement) == each.stages for each in schedules):
        return
    if ranks == 1:
        raise PlacementError(
            f"placement ({[*placement]}) has {len(placement)} numbers, and pipeline_parallel_size=1 has one stage: set"
            ' pipeline_parallel_size, or use "auto".'
        )
    stages = sorted({each.stages for each in schedules})
    name = f"schedule={schedules[0].name!r}" if len(schedules) == 1 else 'schedule="auto"'
    raise PlacementError(
        f"placement ({[*placement]}) has {len(placement)} numbers, and {name} with pipeline_parallel_size={ranks} has"
        f' {" or ".join(map(str, stages))} stages: give one for each, or use "auto".'
    )


def _all(ranks: int, microbatches: int | None, placement: Policy) -> Iterator[Schedule]:
    """All named schedules that can be built for these numbers."""
    for name in SIMPLEST_FIRST if ranks > 1 else ONE_EACH[:1]:
        named = SCHEDULES[name]
        counted = _stages_per_rank(name, ranks, placement)
        numbers = dict.fromkeys((named.stages[0], named.usual)) if counted is None else (counted,)
        for stages in numbers:
            try:
                yield build(name, ranks, microbatches, stages)
            except ConfigurationError:
                if name == ONE_EACH[0]:
                    raise  # no schedule can be built for these numbers


def _stages_per_rank(name: str, ranks: int, placement: Policy) -> int | None:
    """Stages per rank according to explicit block counts; ``None`` without counts, or if they don't fit."""
    if isinstance(placement, str) or name not in SCHEDULES or SCHEDULES[name].stages == (1, 1):
        return None
    stages, rest = divmod(len(placement), ranks)
    return None if rest or stages < SCHEDULES[name].stages[0] else stages


def effective_schedule(schedule: Schedule, settings: Mapping[str, Any]) -> Schedule:
    """The schedule with whole backwards, if settings leave nothing for a backward's second part; logs that."""
    against = against_parts(settings)
    if not schedule.splits_backwards or not against:
        return schedule
    rank_zero_info(
        f"schedule={schedule.name!r} runs whole backwards (input and weight gradients together), in the order of their"
        f" first parts: with {' and '.join(against)} no weight gradient of a block can be postponed"
    )
    return schedule.with_whole_backwards()


def against_parts(settings: Mapping[str, Any]) -> list[str]:
    """The settings under which the second part of a backward has nothing to compute."""
    keeps_all = {
        "activation_checkpointing": settings.get("activation_checkpointing") in (True, 1, "selective"),
        "compile_blocks": bool(settings.get("compile_blocks")),
        "reshard_after_forward": settings.get("reshard_after_forward") is True,
    }
    return [name for name, holds in keeps_all.items() if holds]


def evaluation_schedules(schedules: Sequence[Schedule], placement: Policy) -> Sequence[Schedule]:
    """The simplest schedule that block counts allow, for runs without training.

    Others gain nothing there, and can't overlap evaluation batches.
    """
    return [s for s in schedules if isinstance(placement, str) or len(placement) == s.stages][:1] or schedules


def fitting_schedules(schedules: Sequence[Schedule], blocks: int, placement: Policy) -> list[Schedule]:
    """The schedules for which there is a block for each stage, and which match explicit counts."""
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


def choose(
    schedules: Sequence[Schedule],
    placed: Callable[[Schedule], Placement],
    settings: Mapping[str, Any],
    *,
    has_data_ranks: bool,
) -> Choice | None:
    """Choose the best of several schedules, as ``placed`` on their stages; ``None`` if there is only one."""
    if len(schedules) == 1:
        return None
    if against_parts(settings):
        schedules = [schedule for schedule in schedules if not schedule.splits_backwards] or schedules
    return best([(schedule, placed(schedule).stages) for schedule in schedules], has_data_ranks=has_data_ranks)


def agree(schedules: Sequence[Schedule], choice: Choice | None, groups: Groups) -> Schedule:
    """Make all ranks use the same schedule: rank 0's choice is broadcast, and logged. A collective call."""
    if choice is not None:
        number = groups.from_first_rank(schedules.index(choice.schedule))
        rank_zero_info(str(choice))
        return schedules[number]
    schedule = schedules[0]
    if schedule.name not in SCHEDULES and len(set(groups.gather_over_stages(to_csv(schedule)))) > 1:
        raise ConfigurationError(
            f"schedule={schedule.name!r} is a file that differs between ranks, so they would wait for each other"
            " forever: give all ranks the same file."
        )
    return schedule
