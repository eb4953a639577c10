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
from lightning_shard.layout import TENSOR_AXIS, Layout
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks, tied_parameters
from lightning_shard.parallel.clip import count_elsewhere
from lightning_shard.parallel.data import apply_fully_sharded, parallelizes_itself
from lightning_shard.parallel.init import agree_on_weights, materialize
from lightning_shard.parallel.tensor import Plan, apply_tensor_parallel, resolve_plan
from lightning_shard.pipeline.cost import measure
from lightning_shard.pipeline.placement import Placement, place
from lightning_shard.pipeline.stage import RECORDS, Stage, cut, not_recorded
from lightning_shard.pipeline.taint import Hollow
from lightning_shard.pipeline.ties import Tie, find_ties

_EXAMPLE_TOKENS = 16


@dataclass(frozen=True)
class Settings:
    """What the user chose, beside the layout."""

    placement: Literal["auto", "even"] | Sequence[int]
    pipeline_blocks: str | None
    tensor_parallel_plan: Plan | None


@dataclass
class Assembly:
    """A LightningModule that was cut and sharded in place.

    Attributes:
        layout: The layout it was assembled for.
        settings: What else the user chose then.
        stage: This rank's stage; ``None`` with a single one.
        placement: Blocks to stages; ``None`` where no blocks were found (and none are needed).
        shared_names: State-dict names that this stage holds and the first one saves: tied parameters, and what every
            stage holds, such as a frozen module outside the network.
        ties: The parameters that this stage and another one hold.
        is_tied_over_stages: Whether any two stages hold such a parameter.
        places: Each parameter's place in the whole module.
    """

    layout: Layout
    settings: Settings
    stage: Stage | None
    placement: Placement | None
    shared_names: frozenset[str]
    ties: tuple[Tie, ...]
    is_tied_over_stages: bool
    places: Mapping[str, int]


def assemble(
    module: pl.LightningModule, layout: Layout, mesh: DeviceMesh, device: torch.device, seed: int, settings: Settings
) -> Assembly:
    """Cut ``module`` to this rank's stage and shard it, in place.

    Args:
        module: On any device, or on meta.
        mesh: The world's mesh, made by ``layout``.
        device: Where this rank computes.
        seed: Seeds the weights of what is on meta.

    Raises:
        ConfigurationError: The module can't be laid out so; before anything is changed where that can be known.
    """
    places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
    if parallelizes_itself(module):
        if layout.pipeline_parallel_size > 1:
            raise LayoutError(
                f"{type(module).__name__}.configure_model parallelizes the module itself, which fits one pipeline"
                f" stage: use pipeline_parallel_size=1 (it is {layout.pipeline_parallel_size}), or leave the sharding"
                " to the strategy."
            )
        materialize(module, (), device, seed)
        module.to(device)
        return Assembly(layout, settings, None, None, frozenset(), (), False, places)

    blocks = _blocks(module, layout, settings)
    units = [name for names in block_lists(module).values() for name in names]
    styles: dict[str, ParallelStyle] = {}
    if layout.tensor_parallel_size > 1:
        styles = resolve_plan(module, settings.tensor_parallel_plan, layout.tensor_parallel_size)
    placement = _place(module, blocks, layout, settings, device) if blocks else None
    agree_on_weights(module)

    stage = None
    shared: frozenset[str] = frozenset()
    all_ties: list[Tie] = []
    ties: tuple[Tie, ...] = ()
    if layout.pipeline_parallel_size > 1:
        assert blocks is not None
        assert placement is not None
        shared = frozenset(n for n in module.state_dict(keep_vars=True) if not n.startswith(_prefix(blocks.network)))
        _refuse_collectors(module, blocks, placement)
        all_ties = _ties(module, blocks, placement, layout)
        ties = tuple(tie for tie in all_ties if layout.pipeline_rank in tie.stages)
        shared |= {name for tie in ties for name in tie.names}
        stage = _cut(module, blocks, placement, layout, ties, device)
        held = {name for name, part in module.named_modules() if _is_held(part)}
        units = [*stage.owned, *(n for n in units if not n.startswith(_prefix(blocks.network)))]
        styles = {name: style for name, style in styles.items() if name in held}
    if layout.tensor_parallel_size > 1:
        apply_tensor_parallel(module, mesh[TENSOR_AXIS], styles)
    apply_fully_sharded(
        module,
        [module.get_submodule(name) for name in units],
        mesh[layout.data_axes if len(layout.data_axes) > 1 else layout.data_axes[0]],
        keep_gathered=stage is not None,
        whole_steps=module.automatic_optimization,
    )
    materialize(module, units, device, seed)
    module.to(device)
    for tie in ties:
        if layout.pipeline_rank != tie.stages[0]:
            count_elsewhere(module.get_parameter(tie.names[0]))
    return Assembly(layout, settings, stage, placement, shared, ties, bool(all_ties), places)


def _prefix(network: str) -> str:
    return f"{network}." if network else ""


def _blocks(module: pl.LightningModule, layout: Layout, settings: Settings) -> Blocks | None:
    """The blocks; ``None`` where a single stage can do without them."""
    if layout.pipeline_parallel_size == 1 and settings.pipeline_blocks is None:
        return find_blocks(module) if block_lists(module) else None
    return find_blocks(module, settings.pipeline_blocks)


def _place(
    module: pl.LightningModule, blocks: Blocks, layout: Layout, settings: Settings, device: torch.device
) -> Placement:
    policy = settings.placement if layout.pipeline_parallel_size > 1 else "even"
    cost = measure(
        blocks.modules(module),
        {name: _part(module, name) for name in blocks.before},
        {name: _part(module, name) for name in blocks.after},
        run=_leaving_no_trace(module, _example(module, blocks)) if policy == "auto" else None,
    )
    if layout.pipeline_parallel_size > 1:
        module.example_input_array = None  # Lightning's summary would call the module with it, outside any step
    return place(cost, layout.pipeline_parallel_size, policy, devices=_devices(layout, device))


def _devices(layout: Layout, device: torch.device) -> list[str]:
    """A name for each stage's devices: ranks, since only each process knows its own device's number."""
    size = layout.stage_size
    spans = [range(first, first + size) for first in range(0, layout.world_size, size)]
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


def _leaving_no_trace(module: nn.Module, call: Callable[[], Any] | None) -> Callable[[], Any] | None:
    """The call, on copies of the buffers, and after it every module's attributes as they were.

    A cache made in the call would hold fake tensors. The copies are made here, where tensors are real.
    """
    if call is None:
        return None
    copies = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}

    def run() -> None:
        before = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
        for part, _, buffers in before:
            part._buffers.update({key: copies[id(b)] for key, b in buffers.items() if b is not None})
        try:
            call()
        finally:
            for part, attributes, buffers in before:
                vars(part).clear()
                vars(part).update(attributes)
                part._buffers.clear()
                part._buffers.update(buffers)

    return run


def _part(module: nn.Module, name: str) -> nn.Module | nn.Parameter:
    parent, _, key = name.rpartition(".")
    part = getattr(module.get_submodule(parent), key)
    assert isinstance(part, (nn.Module, nn.Parameter))
    return part


def _refuse_collectors(module: pl.LightningModule, blocks: Blocks, placement: Placement) -> None:
    """What collects values from inside of blocks would find those of its own stage, and give fewer without an error."""
    for part in module.get_submodule(blocks.network).modules():
        if asked := [flag for flag in RECORDS if getattr(getattr(part, "config", None), flag, False) is True]:
            raise PlacementError(not_recorded(f"config.{flag}" for flag in asked))
    for name, block in list(zip(blocks.names, blocks.modules(module)))[: placement.stages[-1].blocks.start]:
        for inner, part in block.named_modules():
            if inner and part._forward_hooks:
                raise PlacementError(
                    f"{name}.{inner} has a forward hook, which runs on the stage that holds {name} only: put the hook"
                    f" on {name}, have it return what is needed as a part of the hidden state, or use"
                    " pipeline_parallel_size=1."
                )


def _ties(module: pl.LightningModule, blocks: Blocks, placement: Placement, layout: Layout) -> list[Tie]:
    last = layout.pipeline_parallel_size - 1

    def block_of(name: str) -> int | None:
        return next((i for i, block in enumerate(blocks.names) if name.startswith(f"{block}.")), None)

    def stage_of(name: str) -> int:
        block = block_of(name)
        if block is not None:
            return placement.stage_of(block)
        return last if any(name == part or name.startswith(f"{part}.") for part in blocks.after) else 0

    ties = find_ties(tied_parameters(module), stage_of, lambda name: block_of(name) is not None)
    for name, part in module.named_modules(remove_duplicate=False):
        buffers = part._buffers.keys() - part._non_persistent_buffers_set
        of_both = {tie.names for tie in ties for n in tie.names if n.rpartition(".")[0] == name}
        if buffers and any(_is_one_module(module, names) for names in of_both):
            raise PlacementError(
                f"{name} runs before the blocks and after them, and has buffers ({', '.join(sorted(buffers))}), which"
                " the first and the last stage would keep in two ways: use two modules that share their weights, or"
                " pipeline_parallel_size=1."
            )
    return ties


def _is_one_module(root: nn.Module, names: Sequence[str]) -> bool:
    return len({id(root.get_submodule(name.rpartition(".")[0])) for name in names}) < len(names)


def _cut(
    module: pl.LightningModule,
    blocks: Blocks,
    placement: Placement,
    layout: Layout,
    ties: Sequence[Tie],
    device: torch.device,
) -> Stage:
    named = module.named_parameters(remove_duplicate=False)  # one may have a name inside too
    outside = [name for name, p in named if p.requires_grad and not name.startswith(_prefix(blocks.network))]
    if outside:
        raise PlacementError(
            f"{type(module).__name__} trains parameters outside the network {blocks.network!r} that is cut into stages"
            f" ({', '.join(outside[:4])}{', …' if len(outside) > 4 else ''}): move them into the network, freeze them,"
            " or use pipeline_parallel_size=1."
        )
    index = layout.pipeline_rank
    owned = placement.stages[index].blocks
    return cut(
        module,
        blocks.names,
        range(owned.start, owned.stop),
        network=blocks.network,
        index=index,
        count=layout.pipeline_parallel_size,
        before=blocks.before,
        after=blocks.after,
        kept={name for tie in ties for name in tie.names},
        device=device,
    )


def _is_held(module: nn.Module) -> bool:
    """Whether a module still has parameters of its own, or never had (a container is held where its parts are)."""
    return not any(isinstance(value, Hollow) for value in vars(module).values())
