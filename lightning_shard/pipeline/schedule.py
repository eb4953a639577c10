"""In which order a stage runs the forwards and backwards of its microbatches.

Pure: an order is a list of actions per stage. ``F(i)`` needs ``F(i)`` of the stage before; ``B(i)`` needs ``F(i)`` of
its own stage and ``B(i)`` of the stage after.

* **GPipe** (arXiv:1811.06965): all forwards, then all backwards; every microbatch's activations live at once.
* **1F1B** (PipeDream-flush, arXiv:2006.09503): a stage starts its backwards as soon as they arrive, so at most
  ``stages - stage`` microbatches live at once. The same bubble: ``(stages - 1) / (microbatches + stages - 1)``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from lightning_shard.errors import ConfigurationError


class Action(NamedTuple):
    kind: Literal["F", "B"]
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


def gpipe(stage: int, stages: int, microbatches: int) -> list[Action]:
    return [Action("F", i) for i in range(microbatches)] + [Action("B", i) for i in range(microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> list[Action]:
    warmup = min(stages - 1 - stage, microbatches)
    actions = [Action("F", i) for i in range(warmup)]
    for i in range(microbatches - warmup):
        actions += [Action("F", warmup + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(microbatches - warmup, microbatches)]


SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {"GPipe": gpipe, "1F1B": one_forward_one_backward}


def order(name: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    """The actions of one stage under a schedule, by its name."""
    return SCHEDULES[name](stage, stages, microbatches)


def check_schedule(name: str, stages: int, microbatches: int) -> None:
    """Refuse what can't run, at setup.

    Raises:
        ConfigurationError: An unknown schedule, or fewer microbatches than stages.
    """
    if name not in SCHEDULES:
        raise ConfigurationError(f"schedule={name!r} isn't one of {sorted(SCHEDULES)}.")
    if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
        raise ConfigurationError(f"microbatches ({microbatches!r}) must be an integer of at least 1.")
    if microbatches < stages:
        raise ConfigurationError(
            f"microbatches ({microbatches}) must be at least pipeline_parallel_size ({stages}), or stages would only"
            f" wait: use {2 * stages} or more."
        )
