"""``lightning_shard.plan``: estimates memory, time and checkpoint size of a layout, without devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import lightning.pytorch as pl

from lightning_shard.arguments import check_count
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.memory.peak import Held
from lightning_shard.dryrun.planned import Plan, Run
from lightning_shard.dryrun.planner import Planner, remedies
from lightning_shard.dryrun.timing.devices import Device
from lightning_shard.dryrun.timing.devices import device as device_of
from lightning_shard.dryrun.timing.rates import Rates, dtype_of
from lightning_shard.errors import LayoutError
from lightning_shard.layout import Layout, check_sizes
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.parallel.experts.stacked import ExpertPlan
from lightning_shard.parallel.tensor.plan import Plan as TensorPlan
from lightning_shard.plugin import trainer_private
from lightning_shard.plugin.settings import Settings, check_switches
from lightning_shard.plugin.steps.schedule_choice import candidates

_SIZES = tuple(field.name for field in fields(Layout) if field.name.startswith("data_") or "_size" in field.name)


def plan(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batch: Any,
    *,
    layout: Layout | Mapping[str, int],
    microbatches: int | None = None,
    schedule: str = "1F1B",
    placement: Literal["auto", "even"] | Sequence[int] = "auto",
    pipeline_blocks: str | Sequence[str] | None = None,
    tensor_parallel_plan: TensorPlan | None = None,
    expert_parallel_plan: ExpertPlan | None = None,
    activation_checkpointing: Recomputing = None,
    cpu_offload: bool = False,
    reduce_each_microbatch: bool = False,
    reshard_after_forward: bool | None = None,
    precision: str = "32-true",
    accumulate_grad_batches: int = 1,
    asynchronous_saving: bool = False,
    device_memory: int | None = None,
    device_type: str = "cuda",
    device: str | Mapping[str, Any] | Device | None = None,
) -> Plan:
    """Estimate a layout: memory of each stage's devices, checkpoint size and, for a device profile, time per step.

    Uses no device, and no memory for the model.

    Args:
        module: A LightningModule, which isn't modified; or a function that builds one, which is called on meta.
        batch: What one data-parallel rank reads for a step. Only shapes count, so it may be on meta, too.
        layout: A :class:`~lightning_shard.layout.Layout`, or axis sizes by the names of the strategy's arguments.
        precision: The Trainer's.
        accumulate_grad_batches: The Trainer's.
        asynchronous_saving: Whether checkpoints are copied to host memory and written by a thread.
        device_memory: Bytes of each device, to determine whether the layout fits, and what would make it fit.
        device_type: ``"cuda"``: with the fused kernels of GPUs; or ``"cpu"``.
        device: A device profile to estimate the time of a step: its name, such as ``"h100"``; the path of a YAML file;
            or a mapping. Its memory is the default of ``device_memory``.

    The other arguments are those of :class:`~lightning_shard.HybridShardStrategy`.

    Raises:
        ConfigurationError: A run would refuse the settings, too; or the module can't be built without memory.
    """
    accumulate_grad_batches = check_count("accumulate_grad_batches", accumulate_grad_batches)
    if device_memory is not None:
        device_memory = check_count("device_memory", device_memory)
    check_switches(reduce_each_microbatch=reduce_each_microbatch, asynchronous_saving=asynchronous_saving)
    precision = trainer_private.named_precision(precision)
    chosen = _layout_of(layout)
    settings = Settings(
        placement,
        pipeline_blocks,
        tensor_parallel_plan,
        expert_parallel_plan,
        activation_checkpointing=activation_checkpointing,
        cpu_offload=cpu_offload,
        reshard_after_forward=reshard_after_forward,
    )
    stages = chosen.pipeline_parallel_size
    model = Model.of(module, batch, settings, stages=stages, precision=precision, device_type=device_type)
    held = Held(
        activation_checkpointing,
        cpu_offload and device_type != "cpu",  # on the CPU, host memory is device memory
        reduce_each_microbatch,
        reshard_after_forward,
        accumulate_grad_batches,
        sends_stay=device_type == "cpu",
    )
    number = candidates(schedule, stages, microbatches, placement)[0].microbatches if stages > 1 else 1
    run = Run(schedule, number, placement, held, asynchronous_saving)
    rates = None if device is None else Rates(device_of(device), dtype_of(precision))
    if rates is not None and device_memory is None:
        device_memory = rates.device.memory
    planner = Planner(model, rates)
    made = planner.plan(chosen, run, device_memory)
    return replace(made, remedies=tuple(remedies(planner, made))) if made.fits is False else made


def _layout_of(given: Layout | Mapping[str, int]) -> Layout:
    """The layout to plan for; axes that aren't given have size 1."""
    if not isinstance(given, Layout):
        given = _of_sizes(given)
    if given.context_parallel_size != 1:
        raise LayoutError(
            f"context_parallel_size ({given.context_parallel_size!r}): plan() doesn't support it yet: plan with 1; the"
            " activations of its blocks are then those of all context ranks together."
        )
    return given


def _of_sizes(given: Any) -> Layout:
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"layout={given!r} must be a Layout, or the sizes of its axes by name, such as"
            ' {"pipeline_parallel_size": 4, "data_parallel_size": 2}.'
        )
    if unknown := [name for name in given if name not in _SIZES]:
        raise LayoutError(f"layout has {unknown[0]!r}, which is none of {', '.join(_SIZES)}: leave it out.")
    sizes: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), **given}
    if sizes["data_parallel_size"] == "auto":
        raise LayoutError('data_parallel_size ("auto"): how many ranks are left isn\'t known to a plan: give a number.')
    check_sizes(**sizes)
    world = sizes["data_parallel_size"] * sizes["pipeline_parallel_size"] * sizes["tensor_parallel_size"]
    return Layout.resolve(world * sizes["context_parallel_size"], **sizes)
