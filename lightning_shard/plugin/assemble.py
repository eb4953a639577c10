"""A LightningModule to this rank's part of it: the one function that shows the order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.errors import ConfigurationError, LayoutError, PlacementError
from lightning_shard.layout import EXPERT_AXIS, TENSOR_AXIS, Layout
from lightning_shard.parallel.between import gather_for_calls
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks, names_of_parameters
from lightning_shard.parallel.clip import count_elsewhere
from lightning_shard.parallel.compiled import compile_block
from lightning_shard.parallel.context import DealtSequences
from lightning_shard.parallel.data import Sharding, apply_fully_sharded, parallelizes_itself, to_device, with_forward
from lightning_shard.parallel.dtensors import behave_as_tensors
from lightning_shard.parallel.expert import ExpertPlan, apply_expert_parallel, resolve_experts
from lightning_shard.parallel.expert_lists import RunsAgain
from lightning_shard.parallel.given import keep_what_is_given
from lightning_shard.parallel.init import agree_on_weights, materialize
from lightning_shard.parallel.lockstep import Lockstep
from lightning_shard.parallel.recompute import Recomputing, chosen, leave_out_caches, recompute
from lightning_shard.parallel.sequence import Part
from lightning_shard.parallel.tensor import Plan, apply_tensor_parallel, resolve_plan
from lightning_shard.parallel.units import keep_what_is_set, sharded_units
from lightning_shard.parallel.whole import whole_of
from lightning_shard.pipeline.cost import ModelCost, measure, watch
from lightning_shard.pipeline.cut import cut
from lightning_shard.pipeline.placement import Placement, place
from lightning_shard.pipeline.schedule import Schedule
from lightning_shard.pipeline.stages import Stages
from lightning_shard.pipeline.taint import Hollow
from lightning_shard.pipeline.ties import Tie, find_ties, over_ranks
from lightning_shard.plugin.example import calls_on_example, example_of, leaving_no_trace, part_of
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.memory import Memory
from lightning_shard.plugin.steps.schedules import agree, choose, that_fit

_PIPELINE, _EXPERTS, _CONTEXT = "pipeline_parallel_size", "expert_parallel_size", "context_parallel_size"
_LIBRARIES = ("torch.", "transformers.")


@dataclass(frozen=True)
class Settings:
    """What the user chose, beside the layout.

    Attributes:
        gathered_dtype: That of the Trainer's mixed precision.
    """

    placement: Literal["auto", "even"] | Sequence[int]
    pipeline_blocks: str | Sequence[str] | None
    tensor_parallel_plan: Plan | None
    expert_parallel_plan: ExpertPlan | None = None
    activation_checkpointing: Recomputing = None
    cpu_offload: bool = False
    compile_blocks: bool | str = False
    reshard_after_forward: bool | None = None
    gathered_dtype: torch.dtype | None = None

    @property
    def of_blocks(self) -> dict[str, Any]:
        """The settings that say how blocks are run and sharded, by name, where they were chosen."""
        names = ("activation_checkpointing", "cpu_offload", "compile_blocks", "reshard_after_forward")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}


@dataclass
class Assembly:
    """A LightningModule that was cut and sharded in place.

    Attributes:
        layout: The layout it was assembled for.
        settings: What else the user chose then.
        stages: This rank's stages; ``None`` with a single rank in a pipeline.
        schedule: The order that they run in.
        placement: Blocks to stages; ``None`` where no blocks were found (and none are needed).
        saved_elsewhere: State-dict names that this rank holds and another one saves: tied parameters, and what
            every rank holds, such as a frozen module outside the network.
        ties: The parameters that this rank and another one of its pipeline hold.
        is_tied_over_stages: Whether any ranks hold such a parameter.
        places: Each parameter's place in the whole module.
        lockstep: Of evaluation steps over data ranks; set when it is first needed.
    """

    layout: Layout
    settings: Settings
    stages: Stages | None
    schedule: Schedule
    placement: Placement | None
    saved_elsewhere: frozenset[str]
    ties: tuple[Tie, ...]
    is_tied_over_stages: bool
    places: Mapping[str, int]
    lockstep: Lockstep | None = None


def assemble(
    module: pl.LightningModule,
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    seed: int,
    settings: Settings,
    schedules: Sequence[Schedule],
    groups: Groups,
) -> Assembly:
    """Cut ``module`` to this rank's stages and shard it, in place.

    Args:
        module: On any device, or on meta.
        mesh: The world's mesh, made by ``layout``.
        expert_mesh: The experts' mesh, with several expert-parallel ranks.
        device: Where this rank computes.
        seed: Seeds the weights of what is on meta.
        schedules: Among which the settings leave the choice.
        groups: This rank's.

    Raises:
        ConfigurationError: The module can't be laid out so; before anything is changed where that can be known.
    """
    behave_as_tensors()
    places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    if parallelizes_itself(module):
        return _as_it_shards_itself(module, layout, settings, schedules[0], device, seed, places)

    blocks = blocks_of(module, settings, layout.pipeline_parallel_size)
    listed = list(dict.fromkeys(name for names in block_lists(module).values() for name in names))
    experts = resolve_experts(module, settings.expert_parallel_plan, layout.expert_parallel_size)
    styles: dict[str, ParallelStyle] = {}
    if layout.tensor_parallel_size > 1:
        styles = resolve_plan(module, settings.tensor_parallel_plan, layout.tensor_parallel_size, without=experts)
    placement, schedule = None, schedules[0]
    if blocks:
        blocks, placement, schedule = _place(module, blocks, layout, settings, schedules, groups, device)
    recomputed = _recomputed(module, blocks, settings)
    sequences = _sequences(module, blocks, layout, groups, device)
    agree_on_weights(module)
    if blocks and placement:
        own = range(1) if layout.pipeline_parallel_size == 1 else schedule.stages_of(layout.pipeline_rank)
        names = {blocks.names[place] for stage in own for place in placement.stages[stage].blocks}
        # before the cut, which stands in for some calls
        _wrap_blocks(module, names, recomputed, settings, sequences, device)

    named = names_of_parameters(module)
    units, part = listed, _OwnPart()
    if layout.pipeline_parallel_size > 1:
        assert blocks is not None
        assert placement is not None
        part = _cut_to_rank(module, blocks, placement, schedule, layout.pipeline_rank, device)
        assert part.stages is not None
        held = {name for name, part in module.named_modules() if _is_held(part)}
        units = _units(module, part.stages, listed)
        styles = {name: style for name, style in styles.items() if name in held}
        experts = [name for name in experts if all(map(_is_held, module.get_submodule(name).modules()))]
    if layout.tensor_parallel_size > 1:
        apply_tensor_parallel(module, mesh[TENSOR_AXIS], styles)
    data_mesh = mesh[layout.data_axes if len(layout.data_axes) > 1 else layout.data_axes[0]]
    stacks, sharded = _deal(module, experts, expert_mesh, data_mesh, device)
    reshards = part.stages is None if settings.reshard_after_forward is None else settings.reshard_after_forward
    sharding = Sharding(not reshards, settings.gathered_dtype, settings.cpu_offload)
    apply_fully_sharded(
        module,
        [
            module.get_submodule(name)
            for name in _apart(units, named, part.ties_of_stages)
            if not any(name.startswith(f"{dealt}.") for dealt in experts)
        ],
        data_mesh,
        sharding,
        whole_steps=module.automatic_optimization,
        experts=stacks,
        expert_mesh=None if expert_mesh is None else expert_mesh[layout.expert_data_axes],
        sharded=sharded,
    )
    materialize(module, listed, torch.device("cpu") if settings.cpu_offload else device, seed)
    to_device(module, device, sharding)
    keep_what_is_set(module)
    keep_what_is_given(sharded_units(module))
    whole = whole_of(module)
    if whole is not None:
        whole.refuses_changes = part.stages is not None
    if part.stages is None:
        gather_for_calls(module, [module.get_submodule(name) for name in units])
    else:
        _join(module, part.stages, layout.pipeline_rank, part.ties)
    return Assembly(
        layout,
        settings,
        part.stages,
        schedule,
        placement,
        part.saved_elsewhere,
        part.ties,
        part.is_tied_over_ranks,
        places,
    )


@dataclass(frozen=True)
class _OwnPart:
    """What a cut left on this rank; see :class:`Assembly`.

    Attributes:
        ties_of_stages: The parameters that several stages hold, be they on one rank.
    """

    stages: Stages | None = None
    saved_elsewhere: frozenset[str] = frozenset()
    ties: tuple[Tie, ...] = ()
    is_tied_over_ranks: bool = False
    ties_of_stages: Sequence[Tie] = ()


def _cut_to_rank(
    module: pl.LightningModule,
    blocks: Blocks,
    placement: Placement,
    schedule: Schedule,
    rank: int,
    device: torch.device,
) -> _OwnPart:
    """Keep the stages of one rank of a pipeline."""
    elsewhere = set() if rank == len(schedule.rows) - 1 else _names_on_every_stage(module, blocks)
    _refuse_pre_hooks(module, blocks, placement)
    holders = Holders(blocks, placement)
    of_stages = find_ties(names_of_parameters(module), holders.of)
    of_ranks = over_ranks(of_stages, schedule.rank_of)
    _refuse_buffers_of_several_stages(module, holders)
    ties = tuple(tie for tie in of_ranks if rank in tie.holders)
    elsewhere |= {name for tie in ties if rank != tie.holders[-1] for name in tie.names}
    stages = cut_to(module, holders, schedule.stages_of(rank), of_stages, device)
    return _OwnPart(stages, frozenset(elsewhere), ties, bool(of_ranks), of_stages)


def _join(module: nn.Module, stages: Stages, rank: int, ties: Iterable[Tie]) -> None:
    """What stages do to a module that is sharded: norms count a parameter of several ranks on the last of these."""
    for tie in ties:
        if rank != tie.holders[-1]:
            count_elsewhere(module.get_parameter(tie.names[0]))
    stages.join(module)


def _as_it_shards_itself(
    module: pl.LightningModule,
    layout: Layout,
    settings: Settings,
    schedule: Schedule,
    device: torch.device,
    seed: int,
    places: Mapping[str, int],
) -> Assembly:
    """A module of Lightning's own kind leaves nothing to do that cuts it, or says how its blocks run."""
    sizes = {name: size for name, size in layout.sizes.items() if name in (_PIPELINE, _EXPERTS, _CONTEXT) and size > 1}
    if sizes:
        name, size = next(iter(sizes.items()))
        raise LayoutError(
            f"{type(module).__name__}.configure_model parallelizes the module itself, which fits {name}=1 (it is"
            f" {size}): use that, or leave the sharding to the strategy."
        )
    if settings.of_blocks:
        raise ConfigurationError(
            f"{type(module).__name__}.configure_model parallelizes the module itself, and not"
            f" {settings.of_blocks}: do that there, and leave these out."
        )
    materialize(module, (), device, seed)
    module.to(device)
    return Assembly(layout, settings, None, schedule, None, frozenset(), (), False, places)


def blocks_of(module: pl.LightningModule, settings: Settings, stages: int) -> Blocks | None:
    """The blocks; ``None`` where a single stage can do without them."""
    if stages == 1 and settings.pipeline_blocks is None:
        return find_blocks(module) if block_lists(module) else None
    return find_blocks(module, settings.pipeline_blocks, partial(calls_on_example, module))


def _deal(
    module: nn.Module,
    experts: Sequence[str],
    expert_mesh: DeviceMesh | None,
    data_mesh: DeviceMesh,
    device: torch.device,
) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """Experts to ranks; the modules of stacked ones, and the parameters of those in lists."""
    if expert_mesh is None:
        return [], set()
    again = partial(_to_run_again, device)
    return apply_expert_parallel(module, expert_mesh[EXPERT_AXIS], experts, data_mesh, again)


class _Traces(NamedTuple):
    """What runs of a module's code leave behind."""

    changed: Callable[[], list[str]]
    put_back: Callable[[], None]


@contextmanager
def looking_at(device: torch.device, module: nn.Module) -> Iterator[_Traces]:
    """Gives what puts back all that a run of the module's code changes: its state, and the generators."""
    memory, put_generators_back = Memory(module), randomness.remember(device)

    def put_back() -> None:
        memory.put_back()
        put_generators_back()

    try:
        yield _Traces(memory.changed, put_back)
    finally:
        memory.forget()


@contextmanager
def _to_run_again(device: torch.device, module: nn.Module) -> Iterator[RunsAgain]:
    memory, put_generators_back = Memory(module), randomness.remember(device)

    @contextmanager
    def from_the_beginning() -> Iterator[None]:
        with randomness.preserved(device):
            put_generators_back()
            yield

    try:
        yield memory.put_back, from_the_beginning
    finally:
        memory.forget()


def _recomputed(module: pl.LightningModule, blocks: Blocks | None, settings: Settings) -> set[str]:
    """The names of the blocks that run again in a backward: the same ones on every layout.

    Raises:
        ConfigurationError: A setting needs blocks, and there are none.
    """
    if blocks is None and (settings.activation_checkpointing or settings.compile_blocks):
        raise ConfigurationError(
            f"{type(module).__name__} has no list of repeated blocks that {settings.of_blocks} could be about: name"
            " modules by pipeline_blocks, or leave it out."
        )
    names = blocks.names if blocks else ()
    return {names[place] for place in chosen(len(names), settings.activation_checkpointing)}


def _sequences(
    module: pl.LightningModule, blocks: Blocks | None, layout: Layout, groups: Groups, device: torch.device
) -> DealtSequences | None:
    """What deals blocks' sequences to ranks, where they are.

    Raises:
        ConfigurationError: There are no blocks.
    """
    if layout.context_parallel_size == 1:
        return None
    if blocks is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no list of repeated blocks, whose sequences"
            f" context_parallel_size={layout.context_parallel_size} could deal to ranks: name modules by"
            " pipeline_blocks, or use context_parallel_size=1."
        )
    sequences = DealtSequences(Part.of(groups.context), partial(looking_at, device))
    sequences.generate_whole(module)
    return sequences


def _wrap_blocks(
    module: nn.Module,
    names: Collection[str],
    recomputed: Collection[str],
    settings: Settings,
    sequences: DealtSequences | None,
    device: torch.device,
) -> None:
    """Recompute, compile and deal what is called in blocks: their forward, without the hooks around it."""
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


def _place(
    module: pl.LightningModule,
    blocks: Blocks,
    layout: Layout,
    settings: Settings,
    schedules: Sequence[Schedule],
    groups: Groups,
    device: torch.device,
) -> tuple[Blocks, Placement, Schedule]:
    """The blocks in the order in which they were seen to run, where there is an example; stages, and their order."""
    ranks, devices = layout.stages(), devices_of(layout, device.type)
    blocks, cost = costs_of(module, blocks, runs=layout.pipeline_parallel_size > 1)
    cost = as_run(cost, settings.activation_checkpointing, compiled=bool(settings.compile_blocks))
    if layout.pipeline_parallel_size == 1:
        return blocks, place(cost, 1, "even", devices=devices, ranks=ranks), schedules[0]
    module.example_input_array = None  # Lightning's summary would call the module with it, outside any step

    def placed(schedule: Schedule) -> Placement:
        holders = [schedule.rank_of[stage] for stage in range(schedule.stages)]
        return place(
            cost,
            schedule.stages,
            settings.placement,
            devices=[devices[rank] for rank in holders],
            ranks=[ranks[rank] for rank in holders],
        )

    fitting = that_fit(schedules, len(blocks), settings.placement)
    choice = choose(fitting, placed, settings.of_blocks, has_data_ranks=layout.data_parallel_size > 1)
    schedule = agree(fitting, choice, groups)
    return blocks, placed(schedule), schedule


def costs_of(module: pl.LightningModule, blocks: Blocks, *, runs: bool) -> tuple[Blocks, ModelCost]:
    """What blocks and parts cost, and the blocks in the order in which they run.

    Args:
        runs: Whether to see it in a run of the network, where there is an example; else it is estimated.
    """
    run = example_of(module, blocks) if runs else None
    seen = None
    if run is not None:
        watched = {name: part_of(module, name) for name in (*blocks.names, *(name for name, _ in blocks.parts))}
        with leaving_no_trace(module):
            seen = watch(watched, run, module.get_submodule(blocks.network))
    if seen is not None:
        blocks = blocks.ordered(seen.calls)
    cost = measure(
        zip(blocks.names, blocks.modules(module)),
        {name: (place, part_of(module, name)) for name, place in blocks.parts},
        seen,
        _on_every_stage(module, blocks),
    )
    return blocks, cost


def as_run(cost: ModelCost, activation_checkpointing: Recomputing, *, compiled: bool = False) -> ModelCost:
    """The costs of blocks that settings recompute, or compile."""
    recomputed = chosen(len(cost.blocks), activation_checkpointing)
    return cost.as_run(recomputed, keeps_products=activation_checkpointing == "selective", compiled=compiled)


def devices_of(layout: Layout, kind: str) -> list[str]:
    """A name for each stage's devices: ranks, since only each process knows its own device's number."""
    spans = layout.stages()
    return [f"{kind} {span[0]}" + (f"–{span[-1]}" if len(span) > 1 else "") for span in spans]


def _refuse_pre_hooks(module: pl.LightningModule, blocks: Blocks, placement: Placement) -> None:
    """Forward hooks inside of blocks are run on other stages too; pre-hooks, which may change arguments, aren't."""
    for name in blocks.names[: placement.stages[-1].blocks.start]:
        for inner, part in module.get_submodule(name).named_modules():
            hooks = part._forward_pre_hooks.values()
            of_users = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_LIBRARIES)]
            if inner and of_users:
                raise PlacementError(
                    f"{name}.{inner} has a forward pre-hook, which runs on the stage that holds {name} only: use a"
                    " forward hook, which is given the arguments too, or pipeline_parallel_size=1."
                )


class Holders:
    """Which stage holds what."""

    def __init__(self, blocks: Blocks, placement: Placement) -> None:
        self.blocks = blocks
        self.placement = placement
        self.of_block = [placement.stage_of(index) for index in range(len(blocks))]
        self.of_part = {name: self._at(place) for name, place in blocks.parts}

    def _at(self, place: int) -> int:
        return self.of_block[min(place, len(self.of_block) - 1)]

    def of(self, name: str) -> set[int]:
        """The stages that use a parameter; none where it's in no block or part, and every stage has it."""
        uses = [*zip(self.blocks.names, self.of_block), *self.of_part.items()]
        return {stage for used, stage in uses if name == used or name.startswith(f"{used}.")}


def _on_every_stage(module: nn.Module, blocks: Blocks) -> dict[str, nn.Module]:
    """The modules with parameters that aren't cut, by name: frozen ones beside the network."""
    cut = {name.partition(".")[0] for name in (blocks.network, *blocks.names, *dict(blocks.parts))}
    beside = {name: child for name, child in module.named_children() if name not in cut}
    return {name: child for name, child in beside.items() if any(True for _ in child.parameters())}


def _names_on_every_stage(module: nn.Module, blocks: Blocks) -> set[str]:
    """State-dict names of what isn't cut: what stands beside the network, and isn't trained."""
    cut_away = (*blocks.names, *(name for name, _ in blocks.parts))
    prefix = f"{blocks.network}." if blocks.network else ""
    return {
        name
        for name in module.state_dict(keep_vars=True)
        if not name.startswith(prefix) and not any(name == part or name.startswith(f"{part}.") for part in cut_away)
    }


def _units(module: nn.Module, stages: Stages, listed: Sequence[str]) -> list[str]:
    """What this rank shards as a unit each: its blocks, and those of lists around them; inner ones first."""
    owned = [stage.blocks[index] for stage in stages for index in stage.owned]
    beside = [name for name in listed if name not in stages[0].blocks]
    held = [
        name for name in dict.fromkeys([*owned, *beside]) if any(True for _ in module.get_submodule(name).parameters())
    ]
    return sorted(held, key=lambda name: -name.count("."))


def _apart(units: Sequence[str], parameters: Sequence[tuple[str, ...]], ties: Iterable[Tie]) -> list[str]:
    """The units whose parameters are theirs alone: those that others use too belong to the root's unit."""
    tied = {name for tie in ties for name in tie.names}
    shared = [names for names in parameters if len(names) > 1 or names[0] in tied]

    def is_apart(unit: str) -> bool:
        uses = [{name.startswith(f"{unit}.") for name in names} for names in shared]
        return not any(True in use and (False in use or names[0] in tied) for use, names in zip(uses, shared))

    return [unit for unit in units if is_apart(unit)]


def _refuse_buffers_of_several_stages(module: pl.LightningModule, holders: Holders) -> None:
    places: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        places.setdefault(id(part), []).append(name)
    for names in places.values():
        stages = {stage for name in names for stage in holders.of(f"{name}.")}
        part = module.get_submodule(names[0])
        buffers = [*(part._buffers.keys() - part._non_persistent_buffers_set)]
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            buffers.append("extra state")
        if len(stages) > 1 and buffers:
            raise PlacementError(
                f"{names[0]} runs in several places, on stages {sorted(stages)}, and has buffers"
                f" ({', '.join(sorted(buffers))}), which they would keep in their own ways: register what never"
                " changes with persistent=False, use a module for each place, which share their weights, or"
                " pipeline_parallel_size=1."
            )


def cut_to(
    module: nn.Module, holders: Holders, own: Sequence[int], ties: Sequence[Tie], device: torch.device
) -> Stages:
    """Cut to the stages of these numbers."""
    placed = holders.placement.stages
    return cut(
        module,
        holders.blocks.names,
        {stage: range(placed[stage].blocks.start, placed[stage].blocks.stop) for stage in own},
        network=holders.blocks.network,
        count=len(placed),
        parts=holders.of_part,
        holder_of=holders.of_block,
        kept={stage: {name for tie in ties if stage in tie.holders for name in tie.names} for stage in own},
        device=device,
    )


def _is_held(module: nn.Module) -> bool:
    """Whether a module still has parameters of its own, or never had (a container is held where its parts are)."""
    return not any(isinstance(value, Hollow) for value in vars(module).values())
