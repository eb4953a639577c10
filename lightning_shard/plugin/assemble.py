"""A LightningModule to this rank's part of it: the one function that shows the order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.errors import LayoutError, PlacementError
from lightning_shard.layout import EXPERT_AXIS, TENSOR_AXIS, Layout
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks, tied_parameters
from lightning_shard.parallel.clip import count_elsewhere
from lightning_shard.parallel.data import apply_fully_sharded, parallelizes_itself
from lightning_shard.parallel.expert import ExpertPlan, apply_expert_parallel, resolve_experts
from lightning_shard.parallel.init import agree_on_weights, materialize
from lightning_shard.parallel.tensor import Plan, apply_tensor_parallel, resolve_plan
from lightning_shard.pipeline.cost import Part, measure, watch
from lightning_shard.pipeline.cut import cut
from lightning_shard.pipeline.placement import Placement, place
from lightning_shard.pipeline.stage import Stage
from lightning_shard.pipeline.taint import Hollow
from lightning_shard.pipeline.ties import Tie, find_ties
from lightning_shard.plugin.steps.memory import Memory

_PIPELINE, _EXPERTS = "pipeline_parallel_size", "expert_parallel_size"
_EXAMPLE_TOKENS = 16
_LIBRARIES = ("torch.", "transformers.")


@dataclass(frozen=True)
class Settings:
    """What the user chose, beside the layout."""

    placement: Literal["auto", "even"] | Sequence[int]
    pipeline_blocks: str | Sequence[str] | None
    tensor_parallel_plan: Plan | None
    expert_parallel_plan: ExpertPlan | None


@dataclass
class Assembly:
    """A LightningModule that was cut and sharded in place.

    Attributes:
        layout: The layout it was assembled for.
        settings: What else the user chose then.
        stage: This rank's stage; ``None`` with a single one.
        placement: Blocks to stages; ``None`` where no blocks were found (and none are needed).
        saved_elsewhere: State-dict names that this stage holds and another one saves: tied parameters, and what
            every stage holds, such as a frozen module outside the network.
        ties: The parameters that this stage and another one hold.
        is_tied_over_stages: Whether any stages hold such a parameter.
        places: Each parameter's place in the whole module.
    """

    layout: Layout
    settings: Settings
    stage: Stage | None
    placement: Placement | None
    saved_elsewhere: frozenset[str]
    ties: tuple[Tie, ...]
    is_tied_over_stages: bool
    places: Mapping[str, int]


def assemble(
    module: pl.LightningModule,
    layout: Layout,
    mesh: DeviceMesh,
    expert_mesh: DeviceMesh | None,
    device: torch.device,
    seed: int,
    settings: Settings,
) -> Assembly:
    """Cut ``module`` to this rank's stage and shard it, in place.

    Args:
        module: On any device, or on meta.
        mesh: The world's mesh, made by ``layout``.
        expert_mesh: The experts' mesh, with several expert-parallel ranks.
        device: Where this rank computes.
        seed: Seeds the weights of what is on meta.

    Raises:
        ConfigurationError: The module can't be laid out so; before anything is changed where that can be known.
    """
    places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    if parallelizes_itself(module):
        _refuse_cutting_anew(module, layout)
        materialize(module, (), device, seed)
        module.to(device)
        return Assembly(layout, settings, None, None, frozenset(), (), False, places)

    blocks = _blocks(module, layout, settings)
    listed = [name for names in block_lists(module).values() for name in names]
    experts = resolve_experts(module, settings.expert_parallel_plan, layout.expert_parallel_size)
    styles: dict[str, ParallelStyle] = {}
    if layout.tensor_parallel_size > 1:
        styles = resolve_plan(module, settings.tensor_parallel_plan, layout.tensor_parallel_size, without=experts)
    placement = None
    if blocks:
        blocks, placement = _place(module, blocks, layout, settings, device)
    agree_on_weights(module)

    stage = None
    units = listed
    saved_elsewhere: set[str] = set()
    all_ties: list[Tie] = []
    ties: tuple[Tie, ...] = ()
    if layout.pipeline_parallel_size > 1:
        assert blocks is not None
        assert placement is not None
        is_last = layout.pipeline_rank == layout.pipeline_parallel_size - 1
        saved_elsewhere = set() if is_last else _on_every_stage(module, blocks)
        _refuse_pre_hooks(module, blocks, placement)
        holders = Holders(blocks, placement)
        all_ties = _ties(module, holders)
        ties = tuple(tie for tie in all_ties if layout.pipeline_rank in tie.stages)
        saved_elsewhere |= {name for tie in ties if layout.pipeline_rank != tie.stages[-1] for name in tie.names}
        stage = _cut(module, holders, layout, ties, device)
        held = {name for name, part in module.named_modules() if _is_held(part)}
        units = _units(module, stage, listed)
        styles = {name: style for name, style in styles.items() if name in held}
        experts = [name for name in experts if name in held]
    if layout.tensor_parallel_size > 1:
        apply_tensor_parallel(module, mesh[TENSOR_AXIS], styles)
    if expert_mesh is not None:
        apply_expert_parallel(module, expert_mesh[EXPERT_AXIS], experts)
    apply_fully_sharded(
        module,
        [module.get_submodule(name) for name in units],
        mesh[layout.data_axes],
        keep_gathered=stage is not None,
        whole_steps=module.automatic_optimization,
        experts=[module.get_submodule(name) for name in experts],
        expert_mesh=None if expert_mesh is None else expert_mesh[layout.expert_data_axes],
    )
    materialize(module, listed, device, seed)
    module.to(device)
    for tie in ties:
        if layout.pipeline_rank != tie.stages[-1]:
            count_elsewhere(module.get_parameter(tie.names[0]))
    if stage is not None:
        stage.join(module)
    return Assembly(layout, settings, stage, placement, frozenset(saved_elsewhere), ties, bool(all_ties), places)


def _refuse_cutting_anew(module: pl.LightningModule, layout: Layout) -> None:
    """What a module that shards itself leaves to do: nothing that cuts it."""
    sizes = {name: size for name, size in layout.sizes.items() if name in (_PIPELINE, _EXPERTS) and size > 1}
    if sizes:
        name, size = next(iter(sizes.items()))
        raise LayoutError(
            f"{type(module).__name__}.configure_model parallelizes the module itself, which fits {name}=1 (it is"
            f" {size}): use that, or leave the sharding to the strategy."
        )


def _blocks(module: pl.LightningModule, layout: Layout, settings: Settings) -> Blocks | None:
    """The blocks; ``None`` where a single stage can do without them."""
    if layout.pipeline_parallel_size == 1 and settings.pipeline_blocks is None:
        return find_blocks(module) if block_lists(module) else None
    return find_blocks(module, settings.pipeline_blocks)


def _place(
    module: pl.LightningModule, blocks: Blocks, layout: Layout, settings: Settings, device: torch.device
) -> tuple[Blocks, Placement]:
    """The blocks in the order in which they were seen to run, where there is an example, and each one's stage."""
    policy = settings.placement if layout.pipeline_parallel_size > 1 else "even"
    run = _example(module, blocks) if policy == "auto" else None
    seen = None
    if run is not None:
        memory = Memory(module)  # a cache made in the run would hold fake tensors
        seen = watch({name: _part(module, name) for name in (*blocks.names, *(name for name, _ in blocks.parts))}, run)
        memory.put_back()
        memory.forget()
    if seen is not None:
        blocks = blocks.ordered(seen.starts)
    cost = measure(
        {name: module.get_submodule(name) for name in blocks.names},
        {name: (place, _part(module, name)) for name, place in blocks.parts},
        seen,
    )
    if layout.pipeline_parallel_size > 1:
        module.example_input_array = None  # Lightning's summary would call the module with it, outside any step
    return blocks, place(cost, layout.pipeline_parallel_size, policy, devices=_devices(layout, device))


def _devices(layout: Layout, device: torch.device) -> list[str]:
    """A name for each stage's devices: ranks, since only each process knows its own device's number."""
    size = layout.stage_size
    spans = [range(first, first + size) for first in range(0, layout.world_size, size)][::-1]
    return [f"{device.type} {span[0]}" + (f"–{span[-1]}" if size > 1 else "") for span in spans]


def _example(module: pl.LightningModule, blocks: Blocks) -> Callable[[], Any] | None:
    """A call of the network to count operations in: on the module's or model's own example, or on token numbers."""
    network = module.get_submodule(blocks.network)
    example = module.example_input_array
    if example is not None:
        inputs = example if isinstance(example, (tuple, dict)) else (example,)
        return lambda: module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    if isinstance(getattr(type(network), "dummy_inputs", None), property):  # transformers
        return lambda: network(**network.dummy_inputs)  # type: ignore[arg-type]
    if any(isinstance(_part(module, name), nn.Embedding) for name in blocks.before):
        return lambda: network(torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.long))
    return None


def _part(module: nn.Module, name: str) -> Part:
    parent, _, key = name.rpartition(".")
    part = getattr(module.get_submodule(parent), key)
    assert isinstance(part, (nn.Module, nn.Parameter))
    return part


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

    def block_of(self, name: str) -> int | None:
        """The place of the block that a parameter is in."""
        return next((i for i, block in enumerate(self.blocks.names) if name.startswith(f"{block}.")), None)

    def of(self, name: str) -> int | None:
        """The stage that holds a parameter; ``None`` where every stage does."""
        block = self.block_of(name)
        if block is not None:
            return self.of_block[block]
        return next((s for part, s in self.of_part.items() if name == part or name.startswith(f"{part}.")), None)


def _on_every_stage(module: nn.Module, blocks: Blocks) -> set[str]:
    """State-dict names of what isn't cut: what stands beside the network, and isn't trained."""
    cut_away = (*blocks.names, *(name for name, _ in blocks.parts))
    prefix = f"{blocks.network}." if blocks.network else ""
    return {
        name
        for name in module.state_dict(keep_vars=True)
        if not name.startswith(prefix) and not any(name == part or name.startswith(f"{part}.") for part in cut_away)
    }


def _units(module: nn.Module, stage: Stage, listed: Sequence[str]) -> list[str]:
    """What this stage shards as a unit each: its blocks, and those of lists around them; inner ones first."""
    owned = [stage.blocks[index] for index in stage.owned]
    beside = [name for name in listed if name not in stage.blocks]
    held = [
        name for name in dict.fromkeys([*owned, *beside]) if any(True for _ in module.get_submodule(name).parameters())
    ]
    return sorted(held, key=lambda name: -name.count("."))


def _ties(module: pl.LightningModule, holders: Holders) -> list[Tie]:
    ties = find_ties(
        tied_parameters(module), lambda name: holders.of(name) or 0, lambda name: holders.block_of(name) is not None
    )
    for name, part in module.named_modules(remove_duplicate=False):
        buffers = part._buffers.keys() - part._non_persistent_buffers_set
        of_both = {tie.names for tie in ties for n in tie.names if n.rpartition(".")[0] == name}
        if buffers and any(_is_one_module(module, names) for names in of_both):
            raise PlacementError(
                f"{name} runs in several places around the blocks, and has buffers ({', '.join(sorted(buffers))}),"
                " which several stages would keep in their own ways: use two modules that share their weights, or"
                " pipeline_parallel_size=1."
            )
    return ties


def _is_one_module(root: nn.Module, names: Sequence[str]) -> bool:
    return len({id(root.get_submodule(name.rpartition(".")[0])) for name in names}) < len(names)


def _cut(
    module: pl.LightningModule, holders: Holders, layout: Layout, ties: Sequence[Tie], device: torch.device
) -> Stage:
    index = layout.pipeline_rank
    owned = holders.placement.stages[index].blocks
    return cut(
        module,
        holders.blocks.names,
        range(owned.start, owned.stop),
        network=holders.blocks.network,
        index=index,
        count=layout.pipeline_parallel_size,
        parts=holders.of_part,
        holder_of=holders.of_block,
        kept={name for tie in ties for name in tie.names},
        device=device,
    )


def _is_held(module: nn.Module) -> bool:
    """Whether a module still has parameters of its own, or never had (a container is held where its parts are)."""
    return not any(isinstance(value, Hollow) for value in vars(module).values())
