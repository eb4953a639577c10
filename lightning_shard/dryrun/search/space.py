"""What there is to search: sizes of axes, and what else is tried."""

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
    """What is searched.

    Attributes:
        devices: How many there are; each layout uses all of them.
        global_batch: Samples of a step, of all data ranks together.
        device_memory: Bytes that tensors can have of a device's memory.
        schedules: Of pipelines, by name, with as many stages on each rank as is usual.
        activation_checkpointing: Ways to try.
        most_samples: Of a microbatch.
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
    """All sizes of the axes that multiply to so many devices."""
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
