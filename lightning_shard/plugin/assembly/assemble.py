"""Turns a LightningModule into this rank's part of it: ``assemble`` shows the order of the steps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.errors import ConfigurationError, LayoutError
from lightning_shard.layout import EXPERT_AXIS, TENSOR_AXIS, Layout
from lightning_shard.parallel.activation_checkpointing import chosen, leave_out_caches, recompute
from lightning_shard.parallel.blocks import Blocks, block_lists, names_of_parameters
from lightning_shard.parallel.clip import count_elsewhere
from lightning_shard.parallel.compiled_blocks import compile_block, compile_forwards, take_out
from lightning_shard.parallel.containers import with_forward
from lightning_shard.parallel.context.attention import Part
from lightning_shard.parallel.context.blocks import ShardedSequences
from lightning_shard.parallel.experts.stacked import apply_expert_parallel, resolve_experts
from lightning_shard.parallel.fsdp.arguments import watch_calls
from lightning_shard.parallel.fsdp.as_tensors import behave_as_tensors
from lightning_shard.parallel.fsdp.part_calls import Lockstep, gather_for_calls, refuse_calls
from lightning_shard.parallel.fsdp.shard import Sharding, apply_fully_sharded, parallelizes_itself, to_device
from lightning_shard.parallel.fsdp.units import leave_gathers_uncounted, remember_units, sharded_units
from lightning_shard.parallel.fsdp.unsharded import unsharded_of
from lightning_shard.parallel.init import Attributes, agree_on_weights, attributes_of, materialize
from lightning_shard.parallel.tensor.check_plan import PlanCheck, holders_around
from lightning_shard.parallel.tensor.plan import apply_tensor_parallel, resolve_plan
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.pipeline.placement import Placement
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.tied import Tie
from lightning_shard.plugin.assembly.parameters import check_parameters, kinds, refuse_copies, refuse_scripted
from lightning_shard.plugin.assembly.placing import OwnPart, blocks_of, cut_to_rank, place_blocks
from lightning_shard.plugin.assembly.probe import trial_runs, two_runs
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.loop import has_whole_steps
from lightning_shard.plugin.steps.metrics import SharedMetrics

_PIPELINE, _EXPERTS, _CONTEXT = "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size"


@dataclass
class Assembly:
    """A LightningModule that was cut and sharded in place.

    Attributes:
        stages: This rank's stages; ``None`` with a single rank in a pipeline.
        placement: The assignment of blocks to stages; ``None`` if no blocks were found (and none are needed).
        saved_elsewhere: State-dict names that this rank holds and another one saves: tied parameters, and what every
            rank holds, such as a frozen module outside of the network.
        ties: Parameters that both this rank and another one of its pipeline hold.
        names: All names of parameters, in the whole module's order, each mapped to the first name of that parameter.
        parameters: Of the module as it was assembled: which are sharded; ``None`` if the module shards itself.
        attributes: What the user had set on parameters. Moving them to another device loses it.
        lockstep: Keeps data ranks in step during evaluation steps; created when it is first needed.
        metrics: Shares the module's metrics, which keep it; created when it is first needed.
    """

    layout: Layout
    settings: Settings
    stages: Stages | None
    schedule: Schedule
    placement: Placement | None
    saved_elsewhere: frozenset[str]
    ties: tuple[Tie, ...]
    names: Mapping[str, str]
    parameters: Mapping[str, bool] | None
    attributes: Attributes = field(default_factory=dict)
    lockstep: Lockstep | None = None
    metrics: SharedMetrics | None = None

    @property
    def places(self) -> dict[str, int]:
        """Each parameter's index in the whole module."""
        return {name: place for place, name in enumerate(dict.fromkeys(self.names.values()))}

    def check_parameters(self, module: nn.Module, groups: Groups) -> None:
        """Check that the module has the parameters that were laid out; a collective call over the pipeline."""
        if self.parameters is not None and self.layout.world_size > 1:
            check_parameters(self.parameters, module, groups.gather_over_stages, is_cut=self.stages is not None)

    def lay_out_again(self, layout: Layout, settings: Settings, schedules: Sequence[Schedule]) -> None:
        """Reuse the module for another Trainer, and switch to that Trainer's schedule."""
        if (self.layout, self.settings) != (layout, settings):
            before, now = _differing((self.layout, self.settings), (layout, settings))
            raise ConfigurationError(
                f"An earlier Trainer has sharded this module with {before}, and it can't be resharded to {now}: build a"
                " new module."
            )
        self.settings = settings
        if self.placement is None:
            self.schedule = schedules[0]
            return
        fitting = [each for each in schedules if each.rank_of == self.schedule.rank_of]
        if not fitting:
            raise ConfigurationError(
                f"An earlier Trainer has split this module for schedule={self.schedule.name!r}, with"
                f" {self.schedule.stages} stages, and it can't be split again for {schedules[0].name!r}, with"
                f" {schedules[0].stages}: build a new module."
            )
        self.schedule = next((each for each in fitting if each.name == self.schedule.name), fitting[0])


def assemble(
    module: nn.Module,
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    seed: int,
    settings: Settings,
    schedules: Sequence[Schedule],
    groups: Groups,
) -> Assembly:
    """Cut ``module``, on any device or on meta, to this rank's stages and shard it, in place.

    Args:
        seed: Seeds the initial weights of modules on meta.

    Raises:
        ConfigurationError: The module can't be laid out so. Raised before anything is changed where that can be known.
    """
    behave_as_tensors()
    whole_steps = has_whole_steps(module)
    names = _names(module)
    if parallelizes_itself(module):
        return _as_it_shards_itself(module, layout, settings, schedules[0], device, seed, names)

    refuse_scripted(module)
    compilers = take_out(module)
    blocks = blocks_of(module, settings, layout.pipeline_parallel_size)
    listed = list(dict.fromkeys(name for names in block_lists(module).values() for name in names))
    experts = resolve_experts(module, settings.expert_parallel_plan, layout.expert_parallel_size)
    styles, beside = _styles(module, {*listed, *(blocks.names if blocks else ())}, settings, layout, experts)
    placement, schedule = None, schedules[0]
    if blocks:
        blocks, placement, schedule = place_blocks(module, blocks, layout, settings, schedules, groups, device)
    recomputed = _recomputed(module, blocks, settings)
    sequences = _sequences(module, blocks, layout, groups, device)
    agree_on_weights(module)
    held_blocks = _held_blocks(blocks, placement, schedule, layout) if blocks and placement else set()
    plan_check = PlanCheck(
        module,
        held_blocks | beside,
        {} if settings.compile_blocks else styles,
        partial(trial_runs, device),
        is_own=settings.tensor_parallel_plan is None,
    )
    if not experts and sequences is None:  # compiled code can't send tokens to experts or parts of sequences to ranks
        # before the cut, which replaces some calls by stand-ins
        within = held_blocks if layout.pipeline_parallel_size > 1 else None
        compile_forwards(module, compilers, {*listed, *(blocks.names if blocks else ())}, within=within)
    _wrap_blocks(module, held_blocks, recomputed, settings, sequences, device)
    plan_check.compare(module)

    named = names_of_parameters(module)
    part = OwnPart()
    if layout.pipeline_parallel_size > 1 and blocks and placement:
        part = cut_to_rank(module, blocks, placement, schedule, layout.pipeline_rank, device)
        held = {name for name, part in module.named_modules() if _is_held(part)}
        styles = {name: style for name, style in styles.items() if name in held}
        experts = [name for name in experts if all(map(_is_held, module.get_submodule(name).modules()))]
    units = listed
    if blocks and (part.stages is not None or settings.pipeline_blocks is not None):
        # without stages, what isn't in a list stays in the root's unit: the step may read its parameters
        own = held_blocks if part.stages is not None else _within(listed, held_blocks)
        units = _units(module, own, blocks.names, listed)
    if layout.tensor_parallel_size > 1:
        apply_tensor_parallel(module, mesh[TENSOR_AXIS], styles)
    data_mesh = mesh[layout.data_axes if len(layout.data_axes) > 1 else layout.data_axes[0]]
    stacks: list[nn.Module] = []
    sharded: set[nn.Parameter] = set()  # of experts in lists
    if expert_mesh is not None:
        again = partial(two_runs, device)
        stacks, sharded = apply_expert_parallel(module, expert_mesh[EXPERT_AXIS], experts, data_mesh, again)
    reshards = part.stages is None if settings.reshard_after_forward is None else settings.reshard_after_forward
    sharding = Sharding(not reshards, settings.gathered_dtype, settings.cpu_offload)
    apply_fully_sharded(
        module,
        _present(
            module,
            [
                name
                for name in _apart(units, named, part.ties_of_stages)
                if not any(name.startswith(f"{dealt}.") for dealt in experts)
            ],
        ),
        data_mesh,
        sharding,
        whole_steps=whole_steps,
        experts=stacks,
        expert_mesh=None if expert_mesh is None else expert_mesh[layout.expert_data_axes],
        sharded=sharded,
    )
    materialize(module, listed, torch.device("cpu") if settings.cpu_offload else device, seed)
    to_device(module, device, sharding)
    _watch(module, layout, part, units, whole_steps=whole_steps)
    return Assembly(
        layout,
        settings,
        part.stages,
        schedule,
        placement,
        part.saved_elsewhere,
        part.ties,
        names,
        kinds(module),
        attributes_of(module),
    )


def _names(module: nn.Module) -> dict[str, str]:
    """Parameters' ``names`` of an :class:`Assembly`."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}


def _present(module: nn.Module, names: Iterable[str]) -> list[nn.Module]:
    """The modules of these names, but for those that are set aside."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return [modules[name] for name in names if name in modules]


def _differing(before: Iterable[Any], now: Iterable[Any]) -> tuple[str, str]:
    """Texts of the fields that differ between dataclasses, with the values of each."""
    differ = [
        (field.name, getattr(old, field.name), getattr(new, field.name))
        for old, new in zip(before, now, strict=True)
        for field in fields(old)
        if getattr(old, field.name) != getattr(new, field.name)
    ]
    return (
        ", ".join(f"{name}={old!r}" for name, old, _ in differ),
        ", ".join(f"{name}={new!r}" for name, _, new in differ),
    )


def _watch(module: nn.Module, layout: Layout, part: OwnPart, units: Iterable[str], *, whole_steps: bool) -> None:
    """Install what preserves or refuses users' accesses to a sharded module, in steps and between them."""
    remember_units(module)
    watch_calls(sharded_units(module), module)
    whole = unsharded_of(module)
    if whole is not None:
        whole.in_microbatches = part.stages is not None
    if part.stages is None:
        gather_for_calls(module, _present(module, units), whole_steps=whole_steps)
    else:
        refuse_calls(module, _present(module, units), part.beside)
        leave_gathers_uncounted(module)
        for tie in part.ties:
            if layout.pipeline_rank != tie.holders[-1]:  # norms count a parameter of several ranks on the last one
                count_elsewhere(module.get_parameter(tie.names[0]))
        part.stages.join(module)
    refuse_copies(module, part.stages)


def _as_it_shards_itself(
    module: nn.Module,
    layout: Layout,
    settings: Settings,
    schedule: Schedule,
    device: torch.device,
    seed: int,
    names: Mapping[str, str],
) -> Assembly:
    """Assemble a module that shards itself in ``configure_model``, as for Lightning's ModelParallelStrategy."""
    if any(isinstance(value, Hollow) for part in module.modules() for value in vars(part).values()):
        raise LayoutError(
            f"{type(module).__name__} contains a module that an earlier run has split into pipeline stages, so it no"
            " longer holds all of its parameters: build a new one, and load the weights from a checkpoint"
            " (load_from_checkpoint, or ckpt_path)."
        )
    sizes = {name: size for name, size in layout.sizes.items() if name in (_PIPELINE, _EXPERTS, _CONTEXT) and size > 1}
    if sizes:
        name, size = next(iter(sizes.items()))
        raise LayoutError(
            f"{type(module).__name__}.configure_model shards the module itself, so {name} must be 1 (it is {size}): set"
            " it to 1, or leave the sharding to the strategy."
        )
    if settings.of_blocks:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_model shards the module itself, so the strategy can't apply"
            f" {settings.of_blocks}: apply them in configure_model, and leave these arguments out."
        )
    materialize(module, (), device, seed)
    module.to(device)
    return Assembly(layout, settings, None, schedule, None, frozenset(), (), names, None)


def _styles(
    module: nn.Module, blocks: Collection[str], settings: Settings, layout: Layout, experts: Collection[str]
) -> tuple[dict[str, ParallelStyle], set[str]]:
    """The style of every module that tensor ranks split, by name; and modules beside the blocks that hold such ones."""
    if layout.tensor_parallel_size == 1:
        return {}, set()
    styles = resolve_plan(module, settings.tensor_parallel_plan, layout.tensor_parallel_size, without=experts)
    if settings.tensor_parallel_plan is None:
        return styles, set()
    calls_root, has_stages = not isinstance(module, pl.LightningModule), layout.pipeline_parallel_size > 1
    return styles, holders_around(module, blocks, styles, has_stages=has_stages, calls_root=calls_root)


def _recomputed(module: nn.Module, blocks: Blocks | None, settings: Settings) -> set[str]:
    """The names of the blocks that are recomputed in a backward: the same on every layout."""
    if blocks is None and (settings.activation_checkpointing or settings.compile_blocks):
        raise ConfigurationError(
            f"{type(module).__name__} has no list of repeated blocks, to which {settings.of_blocks} apply: name modules"
            " by pipeline_blocks, or leave these arguments out."
        )
    names = blocks.names if blocks else ()
    return {names[place] for place in chosen(len(names), settings.activation_checkpointing)}


def _sequences(
    module: nn.Module, blocks: Blocks | None, layout: Layout, groups: Groups, device: torch.device
) -> ShardedSequences | None:
    """The object that distributes blocks' sequences over ranks; ``None`` without context parallelism."""
    if layout.context_parallel_size == 1:
        return None
    if blocks is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no list of repeated blocks, and"
            f" context_parallel_size={layout.context_parallel_size} splits the sequences within blocks: name modules by"
            " pipeline_blocks, or use context_parallel_size=1."
        )
    return ShardedSequences(Part.of(groups.context), partial(trial_runs, device))


def _wrap_blocks(
    module: nn.Module,
    names: Collection[str],
    recomputed: Collection[str],
    settings: Settings,
    sequences: ShardedSequences | None,
    device: torch.device,
) -> None:
    """Wrap forwards in blocks to recompute, compile and split sequences; hooks around the forwards stay outside."""
    generators = partial(randomness.remember, device)
    for name in names:
        for called in with_forward(module.get_submodule(name)):
            plain = sequences.attend(called) if sequences is not None else called.forward
            if name in recomputed:
                selective = settings.activation_checkpointing == "selective"
                recompute(called, generators, selective=selective, is_compiled=bool(settings.compile_blocks))
            if settings.compile_blocks:
                compile_block(called, "inductor" if settings.compile_blocks is True else settings.compile_blocks)
            if name in recomputed or settings.compile_blocks:
                leave_out_caches(called)
            if sequences is not None:
                sequences.deal(called, plain)


def _held_blocks(blocks: Blocks, placement: Placement, schedule: Schedule, layout: Layout) -> set[str]:
    own = range(1) if layout.pipeline_parallel_size == 1 else schedule.stages_of(layout.pipeline_rank)
    return {blocks.names[place] for stage in own for place in placement.stages[stage].blocks}


def _within(listed: Iterable[str], names: Iterable[str]) -> set[str]:
    prefixes = tuple(f"{name}." for name in listed)
    return {name for name in names if f"{name}.".startswith(prefixes)}


def _units(module: nn.Module, own: Collection[str], blocks: Sequence[str], listed: Sequence[str]) -> list[str]:
    """The modules that become FSDP units on this rank: its blocks, and those of other lists; inner ones first."""
    owned = [name for name in blocks if name in own]
    beside = [name for name in listed if not any(f"{block}.".startswith(f"{name}.") for block in blocks)]
    held = [
        name for name in dict.fromkeys([*owned, *beside]) if any(True for _ in module.get_submodule(name).parameters())
    ]
    return sorted(held, key=lambda name: -name.count("."))


def _apart(units: Sequence[str], parameters: Sequence[tuple[str, ...]], ties: Iterable[Tie]) -> list[str]:
    """The units that share no parameter with others; shared parameters belong to the root's unit."""
    tied = {name for tie in ties for name in tie.names}
    shared = [names for names in parameters if len(names) > 1 or names[0] in tied]

    def is_apart(unit: str) -> bool:
        uses = [{name.startswith(f"{unit}.") for name in names} for names in shared]
        return not any(True in use and (False in use or names[0] in tied) for use, names in zip(uses, shared))

    return [unit for unit in units if is_apart(unit)]


def _is_held(module: nn.Module) -> bool:
    """Whether a module holds its own parameters, or never had any (a container is held where its parts are)."""
    return not any(isinstance(value, Hollow) for value in vars(module).values())
