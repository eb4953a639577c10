"""Counts one microbatch of a module's step: lays the module out, and runs the step on fake tensors.

Equal blocks (same class, settings and parameters' shapes) that are called on inputs of the same shapes are run only
twice. If both runs cost the same, further blocks are replaced by stand-ins that return tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.dryrun.counting.counts import (
    AROUND,
    EXPERT,
    LOSS,
    TENSOR,
    Counts,
    ParameterCount,
    PartCount,
    TwoParts,
)
from lightning_shard.dryrun.counting.fake import (
    DealtEvenly,
    WholeEvenly,
    fake_ranks,
    fake_tensors,
    make_fake,
    stacks_named,
)
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.counting.watched import Outcome, Watched, Way, accumulators
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.containers import with_forward
from lightning_shard.parallel.experts.module_lists import is_list
from lightning_shard.parallel.experts.stacked import distribute_stack, resolve_experts
from lightning_shard.parallel.fsdp.autocast import cast_units, not_cast
from lightning_shard.parallel.tensor.plan import apply_tensor_parallel, resolve_plan
from lightning_shard.sharding import parameter_like

WAYS: tuple[Way, ...] = ("plain", "recomputed", "selective")


@dataclass
class _LaidOut:
    """A module that is cut to one rank, in a process with a fake process group."""

    module: pl.LightningModule
    sizes: tuple[int, int]  # of the tensor and the expert axis
    experts: Sequence[str]  # the names of modules whose experts are sharded over ranks
    parameters: Mapping[str, tuple[ParameterCount, ...]]  # by the name of the block or part that holds them
    whole: Sequence[WholeEvenly]  # stacks of experts that aren't sharded
    batch: Any = None  # the microbatch to count
    stands_in: bool = True  # False if the code needs more of equal blocks than their stand-ins return
    accumulators: Sequence[tuple[Tensor, Node]] = ()  # AccumulateGrad nodes; empty unless backwards are split


def count_each(model: Model, tensor: int, expert: int, samples: Sequence[int]) -> list[Counts]:
    """Count a microbatch of each size, with the module cut only once.

    Args:
        model: The module and its batch.
        tensor, expert: Sizes of these axes.
        samples: The microbatches' sizes.

    Raises:
        ConfigurationError: The module can't be cut that way, or its step can't be run on fake tensors.
    """
    batches = [_first(model.batch, number) for number in samples]
    with _laid_out(model, tensor, expert) as laid, fake_tensors():
        make_fake(laid.module)
        found = []
        for number, laid.batch in zip(samples, batches):
            found.append(_count(model, laid, number))
    return found


def _count(model: Model, laid: _LaidOut, samples: int) -> Counts:
    blocks = model.blocks.names if model.blocks else ()
    outcomes = {way: _tried(laid, model, way) for way in (WAYS if blocks else WAYS[:1])}
    batch, parameters = laid.batch, laid.parameters
    around = [name for name, _ in model.blocks.parts] if model.blocks else []

    def part(name: str, place: int | None = None) -> PartCount:
        key = name if place is None else place
        plain, *others = (outcome.cost(key) for outcome in outcomes.values())
        output = outcomes["plain"].outputs.get(key, 0)
        return PartCount(name, parameters.get(name, ()), output, plain, *(others or [plain, plain]))

    integers = [t.numel() for t in tree.tensors(batch) if not t.is_floating_point() and t.ndim > 1]
    return Counts(
        blocks=tuple(part(name, place) for place, name in enumerate(blocks)),
        parts=tuple((place, part(name)) for name, place in (model.blocks.parts if model.blocks else ())),
        everywhere=(part(AROUND), *(part(name) for name in parameters if name not in {*blocks, *around, AROUND, LOSS})),
        loss=part(LOSS),
        samples=samples,
        tokens=max(integers, default=samples),
        batch_bytes=sum(t.nbytes for t in tree.tensors(batch)),
        buffer_bytes=sum(t.nbytes for t in model.module.buffers()),
        saved_buffer_bytes=sum(t.nbytes for t in _saved_buffers(model.module)),
        tensor_parallel_size=laid.sizes[0],
        expert_parallel_size=laid.sizes[1],
        assumed=_assumptions(model, laid, outcomes.values()),
    )


def count_two_parts(model: Model, counts: Counts) -> Counts:
    """Add the counts of split backwards; a recomputed block leaves nothing for the second part.

    Raises:
        ConfigurationError: The step can't be run on fake tensors in two parts.
    """
    if counts.in_two_parts:
        return counts
    batch = _first(model.batch, counts.samples)
    with _laid_out(model, counts.tensor_parallel_size, counts.expert_parallel_size) as laid, fake_tensors():
        make_fake(laid.module)
        laid.batch, laid.accumulators = batch, accumulators(laid.module)
        outcome = _tried(laid, model, "plain")

    def with_parts(part: PartCount, place: int | None = None) -> PartCount:
        key = part.name if place is None else place
        like = outcome.like(key)
        names = [p.name for p in laid.parameters.get(like if isinstance(like, str) else counts.blocks[like].name, ())]
        late = tuple(number for number, name in enumerate(names) if name in outcome.late.get(like, ()))
        parts = replace(outcome.cost(key).parts or TwoParts(), late=late)
        return replace(part, plain=replace(part.plain, parts=parts))

    return replace(
        counts,
        blocks=tuple(with_parts(block, place) for place, block in enumerate(counts.blocks)),
        parts=tuple((place, with_parts(part)) for place, part in counts.parts),
        everywhere=tuple(map(with_parts, counts.everywhere)),
        loss=with_parts(counts.loss),
        in_two_parts=True,
    )


def _saved_buffers(module: nn.Module) -> Iterable[Tensor]:
    parts = module.modules()
    held = ((part, key, buffer) for part in parts for key, buffer in part._buffers.items() if buffer is not None)
    return {id(b): b for part, key, b in held if key not in part._non_persistent_buffers_set}.values()


@contextmanager
def _laid_out(model: Model, tensor: int, expert: int) -> Iterator[_LaidOut]:
    """Context: this process is a fake rank with its part of the module."""
    settings = model.settings
    experts = resolve_experts(model.module, settings.expert_parallel_plan, expert)
    styles = resolve_plan(model.module, settings.tensor_parallel_plan, tensor, without=experts) if tensor > 1 else {}
    with fake_ranks(max(tensor, expert)):
        module = model.copy()
        plan = settings.expert_parallel_plan if expert == 1 else None
        parameters = _lay_out(module, model, tensor, expert, styles, experts)
        whole = [*map(WholeEvenly, stacks_named(module, plan))]
        yield _LaidOut(module, (tensor, expert), experts, parameters, whole)


def _first(batch: Any, samples: int) -> Any:
    return tree.split(batch, tree.batch_size(batch) // samples)[0]


def _assumptions(model: Model, laid: _LaidOut, outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    found = []
    if any(experts.is_asked for experts in laid.whole):
        found.append("as many tokens choose each expert")
    if laid.experts:
        found.append("tokens are spread evenly over the expert-parallel ranks")
    if model.device_type != "cpu":
        found.append("attention and dropout are fused kernels, as torch has on GPUs")
    if any(outcome.takes_unpacked for outcome in outcomes):
        found.append("a row that comes without a mask and positions is one sequence, so attention needs no mask")
    return tuple(found)


# -- parameters on one rank of a layout


def _lay_out(
    module: pl.LightningModule,
    model: Model,
    tensor: int,
    expert: int,
    styles: Mapping[str, Any],
    experts: Sequence[str],
) -> dict[str, tuple[ParameterCount, ...]]:
    """Cut the module's tensors over both axes, in place; returns the parameters by block or part."""
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    blocks = list(dict.fromkeys(model.blocks.names)) if model.blocks else []
    gathered: dict[int, torch.dtype] = {}
    if model.settings.gathered_dtype is not None:
        for unit in cast_units(module, [u for name in blocks for u in with_forward(module.get_submodule(name))]):
            left = not_cast(unit)
            of_unit = (p for p in unit.parameters() if p.is_floating_point() and p not in left)
            gathered.update((id(p), model.settings.gathered_dtype) for p in of_unit)
    names = {id(p): name for name, p in module.named_parameters()}
    dealt = tuple(f"{name}." for name in experts)  # experts keep their dtype
    in_half = {names[key]: dtype for key, dtype in gathered.items() if not names[key].startswith(dealt)}
    for name in experts:
        if is_list(module.get_submodule(name)):
            raise ConfigurationError(
                f"expert_parallel_size ({expert}): {name} is a list of modules, and a plan knows experts of stacked"
                " parameters only: plan with expert_parallel_size=1."
            )
    if tensor > 1:
        apply_tensor_parallel(module, init_device_mesh("cpu", (tensor,), mesh_dim_names=(TENSOR,)), styles)
    if expert > 1:
        mesh = init_device_mesh("cpu", (expert,), mesh_dim_names=(EXPERT,))
        for name in experts:
            distribute_stack(module, name, mesh, DealtEvenly)

    def counted(name: str, parameter: Tensor) -> ParameterCount:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        of = shapes[name], tuple(local.shape), parameter.dtype, parameter.requires_grad
        return ParameterCount(name, *of, name.startswith(dealt), in_half.get(name))

    first_names = {id(p): name for name, p in module.named_parameters()}
    holders = [*blocks, *(name for name, _ in model.blocks.parts)] if model.blocks else []
    found: dict[str, dict[str, ParameterCount]] = {holder: {} for holder in holders}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holder = next((h for h in holders if name == h or name.startswith(f"{h}.")), None)
        if holder is None:
            holder = name.partition(".")[0] if model.blocks and not name.startswith(model.blocks.network) else AROUND
        first = first_names[id(parameter)]
        found.setdefault(holder, {})[first] = counted(first, parameter)
    for name, dtype in in_half.items():
        owner, _, key = name.rpartition(".")
        whole = module.get_parameter(name)
        module.get_submodule(owner)._parameters[key] = parameter_like(whole.detach().to(dtype), whole)
    return {holder: tuple(held.values()) for holder, held in found.items()}


# -- a run


def _tried(laid: _LaidOut, model: Model, way: Way) -> Outcome:
    """Run and count; with all blocks, if it fails with stand-ins, or equal blocks cost unequally.

    On DTensors the first call of an operation runs another one to find the result's shape, so a first run isn't
    counted.

    Raises:
        ConfigurationError: It fails with all blocks, too.
    """
    parameters = [*laid.module.parameters()]
    runs = 1 + any(isinstance(parameter, DTensor) for parameter in parameters)
    for stands_in in (laid.stands_in, False):
        try:
            for _ in range(runs):
                for parameter in parameters:
                    parameter.grad = None
                watched = Watched(laid.module, model, laid.sizes, stands_in=stands_in)
                outcome = watched.run(laid.batch, way, laid.accumulators)
        except Exception as error:  # from the user's code, or from torch
            if stands_in:
                laid.stands_in = False
                continue
            sizes = "".join(f" with {axis}_parallel_size={n}" for axis, n in zip((TENSOR, EXPERT), laid.sizes) if n > 1)
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigurationError(
                f"The step{sizes} can't be run on tensors without values ({reason}), so memory and time aren't known:"
                " plan a module whose training_step needs no values, nor optimizes by itself."
            ) from error
        if not watched.differ(outcome):  # never without stand-ins
            break
    return outcome
