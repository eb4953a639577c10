"""Searches all layouts of a number of devices for the fastest ones that fit, in the order of lower bounds.

A candidate is a combination of pipeline, tensor, replica and expert sizes, microbatch size, schedule, and activation
checkpointing. Each has a lower bound of its step time that is cheap to compute. Candidates are simulated in the order
of their bounds, until the remaining bounds exceed the times of the best ones found. So the result is optimal under the
model, although few candidates are simulated.

Every candidate has the same global batch per step. With one stage, its microbatches are batches with accumulated
gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl

from lightning_shard import lightning_private, tree
from lightning_shard.arguments import check_count
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.optimizer import OptimizerState, ask
from lightning_shard.dryrun.memory.peak import Held, usable
from lightning_shard.dryrun.search.found import Choice, Found, Why
from lightning_shard.dryrun.search.workshop import Space, Workshop
from lightning_shard.dryrun.timing.devices import Device, Rates, dtype_of
from lightning_shard.dryrun.timing.devices import device as device_of
from lightning_shard.errors import PlacementError
from lightning_shard.parallel.experts.stacked import ExpertPlan
from lightning_shard.parallel.tensor.plan import Plan as TensorPlan
from lightning_shard.plugin.settings import Settings, check_switches


def search_module(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    devices: int,
    device: str | Mapping[str, Any] | Device,
    global_batch: int,
    device_memory: int | None = None,
    most: int = 10,
    precision: str = "32-true",
    device_type: str = "cuda",
    pipeline_blocks: str | Sequence[str] | None = None,
    tensor_parallel_plan: TensorPlan | None = None,
    expert_parallel_plan: ExpertPlan | None = None,
    reduce_each_microbatch: bool = False,
    reshard_after_forward: bool | None = None,
) -> Found:
    """Find the fastest layouts of a module; the other arguments are those of ``lightning_shard.plan``.

    Args:
        batch: The batch to count with: only shapes count, and its size limits a microbatch's.
        devices: The number of devices.
        device: A device profile: its name, the path of a YAML file, or a mapping.
        global_batch: Samples per step, over all data ranks.
        device_memory: Bytes of each device; default: the profile's.
        most: How many layouts to list.

    Raises:
        ConfigurationError: A run would refuse the settings, too; or layouts can't be compared.
    """
    devices, global_batch = check_count("devices", devices), check_count("global_batch", global_batch)
    check_count("most", most)
    if device_memory is not None:
        device_memory = check_count("device_memory", device_memory)
    check_switches(reduce_each_microbatch=reduce_each_microbatch)
    precision = lightning_private.named_precision(precision)
    profile = device_of(device)
    blocks_and_plans = pipeline_blocks, tensor_parallel_plan, expert_parallel_plan
    settings = Settings("auto", *blocks_and_plans, reshard_after_forward=reshard_after_forward)
    make = partial(Model.of, module, batch, settings, precision=precision, device_type=device_type)
    try:
        model = make(stages=2)
    except PlacementError:
        model = make(stages=1)  # no blocks to cut between: one stage
    optimizer = ask(model)
    samples = tree.batch_size(batch)
    space = Space(
        devices,
        global_batch,
        usable(profile.memory if device_memory is None else device_memory),
        most_samples=max(n for n in (1, 2, 4, 8) if samples % n == 0),
        held=Held(None, False, reduce_each_microbatch, reshard_after_forward, sends_stay=device_type == "cpu"),
    )
    return search(model, optimizer, space, Rates(profile, dtype_of(precision)), most=most)


def search(model: Model, optimizer: OptimizerState, space: Space, rates: Rates, *, most: int = 10) -> Found:
    """Find the fastest layouts that fit, and list ``most`` of them.

    Raises:
        ConfigurationError: The step can't be counted.
    """
    workshop = Workshop(model, optimizer, space, rates)
    dropped: Counter[str] = Counter()
    candidates = list(workshop.bounded(dropped))
    considered = len(candidates) + dropped.total()
    candidates.sort(key=lambda candidate: (candidate.bound, candidate.layout.tensor_parallel_size, candidate.samples))
    best: list[Choice] = []
    simulated = 0
    for number, candidate in enumerate(candidates):
        if len(best) >= most and candidate.bound > _seconds(best[most - 1]):
            dropped[Why.SLOWER] += len(candidates) - number
            break
        peak = workshop.peak(candidate)
        if peak is None or peak > space.device_memory:
            dropped[Why.CANT_BE_CUT if peak is None else Why.DOESNT_FIT] += 1
            continue
        simulated += 1
        best.append(replace(candidate, step=workshop.timing(candidate).simulated(workshop.flops), peak_bytes=peak))
        best.sort(key=_seconds)
        if len(best) > most:
            best.pop()
            dropped[Why.SLOWER] += 1
    return Found(
        tuple(best),
        dict(dropped),
        considered,
        simulated,
        space.devices,
        workshop.rates.device.name,
        space.global_batch,
        space.device_memory,
        workshop.assumed,
    )


def _seconds(choice: Choice) -> float:
    assert choice.step is not None
    return choice.step.step
