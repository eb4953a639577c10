"""Which schedule a pipeline runs: the one that the user chose, or the fastest by simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_shard.errors import ConfigurationError, PlacementError
from lightning_shard.pipeline.orders import SCHEDULES, build
from lightning_shard.pipeline.placement import Placement, Policy
from lightning_shard.pipeline.schedule import Schedule, to_csv
from lightning_shard.pipeline.simulate import Costs, fastest, simulate
from lightning_shard.pipeline.step import PipelinedStep
from lightning_shard.plugin.groups import Groups

ONE_EACH = ("1F1B", "Eager1F1B", "GPipe")
"""Those with one stage on each rank, among which ``"auto"`` chooses."""


def candidates(setting: str, ranks: int, microbatches: int | None, placement: Policy = "auto") -> list[Schedule]:
    """The schedules among which a setting leaves the choice: one, but for ``"auto"``.

    Args:
        placement: Where it holds a number for each stage, these say how many stages a rank has.

    Raises:
        ConfigurationError: There is no such schedule, or it isn't for these numbers.
    """
    if setting == "auto":
        return [build(name, ranks, microbatches) for name in ONE_EACH]
    if setting not in SCHEDULES and not setting.endswith(".csv"):
        choices = f'{", ".join(map(repr, SCHEDULES))}, "auto", or the path of a .csv file'
        raise ConfigurationError(f"schedule={setting!r} isn't one of {choices}.")
    return [build(setting, ranks, microbatches, _stages_per_rank(setting, ranks, placement))]


def _stages_per_rank(name: str, ranks: int, placement: Policy) -> int | None:
    """As counts say it; ``None`` where they don't, or don't fit."""
    if isinstance(placement, str) or name not in SCHEDULES or SCHEDULES[name].stages == (1, 1):
        return None
    stages, rest = divmod(len(placement), ranks)
    return None if rest or not stages else stages


def that_runs(schedule: Schedule, settings: Mapping[str, Any]) -> Schedule:
    """With whole backwards, where settings leave nothing that a second part could do; says so.

    Args:
        settings: Of blocks, by name.
    """
    keeps_all = {
        "activation_checkpointing": settings.get("activation_checkpointing") in (True, 1, "selective"),
        "compile_blocks": bool(settings.get("compile_blocks")),
        "reshard_after_forward": settings.get("reshard_after_forward") is True,
    }
    against = [name for name, holds in keeps_all.items() if holds]
    if not schedule.splits_backwards or not against:
        return schedule
    rank_zero_info(
        f"schedule={schedule.name!r} runs with whole backwards, in the order of their first parts: with"
        f" {' and '.join(against)} nothing of a block's backward can come later"
    )
    return schedule.with_whole_backwards()


def tell_of_whole_backwards(schedule: Schedule, step: PipelinedStep) -> None:
    """If nothing could come later so far."""
    if not step.has_split_backward:
        rank_zero_info(
            f"schedule={schedule.name!r}: of the stages here, no weight's gradient comes later than the rest of its"
            " backward. Those of matrix products can (nn.Linear), but where the product's input is computed again"
            " (checkpointed), or the weight has hooks or is used in other ways too"
        )


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
