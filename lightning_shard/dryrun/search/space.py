"""The search space: axis sizes, and the settings to try."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lightning_shard.dryrun.memory.peak import Held
from lightning_shard.layout import Layout
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.plugin.steps.schedule_choice import SIMPLEST_FIRST


@dataclass(frozen=True)
class Space:
    """The search space.

    Attributes:
        devices: The number of devices; each layout uses all of them.
        global_batch: Samples per step, over all data ranks.
        device_memory: Bytes of a device's memory that are available to tensors.
        schedules: Names of pipeline schedules, each with its usual number of stages per rank.
        activation_checkpointing: The settings to try.
        most_samples: The largest microbatch.
        held: The other settings.
    """

    devices: int
    global_batch: int
    device_memory: int
    schedules: Sequence[str] = SIMPLEST_FIRST
    activation_checkpointing: Sequence[Recomputing] = (None, "selective", True)
    most_samples: int = 8
    held: Held = field(default_factory=Held)


def layouts(devices: int, most_stages: int) -> Iterator[Layout]:
    """All combinations of axis sizes that multiply to ``devices``."""
    for stages in divisors(devices):
        if stages > most_stages:
            break
        for tensor in divisors(devices // stages):
            data = devices // stages // tensor
            for replicas in divisors(data):
                for experts in divisors(data // replicas):
                    yield Layout(stages, data, replicas, tensor, 0, experts)


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
