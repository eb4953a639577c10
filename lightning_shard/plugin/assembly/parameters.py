"""The parameters of a module that is laid out, in what users' code kept, is shown, and changes of them.

Parameters, and their ids, are replaced in what code has kept of them before, such as ``self.head = {id(p) for p in …}``
in ``__init__``: in the state of modules and callbacks, as ``state/walk.py`` walks it.

While ``configure_optimizers`` runs, each stage shows all parameters of the module, so that groups are those of one
process. One of another stage is a hollow tensor (``taint.Hollow``: right shape and dtype, no values), which is removed
from the optimizers afterwards.

Parameters that were added or removed after that, copies of sharded modules, and scripted modules are refused. All
parameters are gathered, unsharded, on rank 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.jit import ScriptModule

from lightning_shard.errors import ConfigurationError, PlacementError, StepError
from lightning_shard.layout import Layout
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.fsdp.units import class_name, is_unit
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.plugin.groups import Groups
from lightning_shard.sharding import full_tensor
from lightning_shard.state.walk import CONTAINERS, below, entries, hold_same, put_entries, reachable

_LARGEST = 2**17
"""A container of more entries isn't one of parameters."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def replace_kept(module: nn.Module, names: Mapping[int, str], others: Iterable[object] = ()) -> None:
    """Replace them wherever a module that was laid out, and other objects, have kept them; containers in place.

    Args:
        names: Those of the parameters before, by id. Nothing else can have had that id.
    """
    now = _named(module)
    found = {key: now[name] for key, name in names.items() if name in now and key != id(now[name])}
    if not found:
        return
    walks = (reachable(module), *(below("", other) for other in others))
    for holder in {id(each): each for _, each in chain(*walks)}.values():
        _replace_in(holder, found)


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by all of their names, other stages' too."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules():
        inner = {f"{path}.{name}" if path else name: each for name, each in vars(part).items()}
        named |= {name: each for name, each in inner.items() if isinstance(each, Hollow)}
    return named


def _replace_in(holder: Any, found: Mapping[int, Tensor]) -> None:
    if isinstance(holder, Tensor) or (isinstance(holder, CONTAINERS) and len(holder) > _LARGEST):
        return
    is_module, is_dict, held = isinstance(holder, nn.Module), isinstance(holder, dict), entries(holder)
    replaced = {_replaced(key, found) if is_dict else key: _replaced(value, found) for key, value in held.items()}
    if is_module:  # where a hollow one would be taken for the module's own parameter
        replaced = {k: held[k] if k in _OF_MODULES or isinstance(v, Hollow) else v for k, v in replaced.items()}
    if not hold_same(held, replaced):
        put_entries(holder, replaced)


def _replaced(value: Any, found: Mapping[int, Tensor]) -> Any:
    """The value, or what takes its place; a tuple or frozen set with other entries."""
    if type(value) is int:
        return id(found[value]) if value in found else value
    if isinstance(value, nn.Parameter):
        return found.get(id(value), value)
    if not isinstance(value, (tuple, frozenset)) or len(value) > _LARGEST:
        return value
    entries = [*value]
    replaced = [_replaced(entry, found) for entry in entries]
    if all(one is other for one, other in zip(entries, replaced)):
        return value
    return tuple.__new__(type(value), replaced) if isinstance(value, tuple) else type(value)(replaced)


@contextmanager
def all_parameters(
    module: nn.Module, names: Mapping[str, str], gather_over_stages: Callable[[Any], list[Any]]
) -> Iterator[None]:
    """Inside, ``module`` has all parameters of the whole module, in its order; a collective call over the pipeline.

    Args:
        names: All names in the whole module's order, each mapped to the first name of that parameter.
    """
    own = {name: parameter.requires_grad for name, parameter in module.named_parameters(remove_duplicate=False)}
    trains = {name: trains for of_stage in gather_over_stages(own) for name, trains in of_stage.items()}
    order = {name: place for place, name in enumerate(names)}
    placed: dict[str, Hollow] = {}
    hollow: list[tuple[nn.Module, str, Hollow]] = []
    for path, part in module.named_modules():
        start = f"{path}." if path else ""
        for key, value in [item for item in vars(part).items() if isinstance(item[1], Hollow)]:
            first = names[f"{start}{key}"]
            hollow.append((part, key, vars(part).pop(key)))
            one: Any = placed.setdefault(first, value)  # tied parameters are one object
            _be_parameter(one, True, trains.get(first, False))
            part._parameters[key] = one
            in_order = sorted(part._parameters.items(), key=lambda item: order.get(f"{start}{item[0]}", -1))
            part._parameters.clear()
            part._parameters.update(in_order)
    try:
        yield
    finally:
        for part, key, value in hollow:
            part._parameters.pop(key, None)
            _be_parameter(value, False, False)
            vars(part)[key] = value


def what_trains(module: nn.Module, gather_over_stages: Callable[[Any], list[Any]]) -> list[dict[str, bool]]:
    """Which parameters train, by name, for each stage; a collective call over the pipeline."""
    trains = gather_over_stages({name: p.requires_grad for name, p in module.named_parameters()})
    every = {name: does for stage in trains for name, does in stage.items()}
    held = (value for part in module.modules() for value in vars(part).values())
    for hollow in (value for value in held if isinstance(value, Hollow)):
        hollow.trains = every.get(hollow.fqn, hollow.trains)
    return trains


def refuse_frozen(trains: Iterable[Mapping[str, bool]]) -> None:
    """Refuse stages that have nothing to train."""
    if not any(any(stage.values()) for stage in trains):
        raise PlacementError(
            "No parameter requires gradients, so the pipeline stages have nothing to train: unfreeze some, or use"
            " pipeline_parallel_size=1."
        )


def leave_out_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Remove other stages' parameters from each group, and state that the optimizer has created for them."""
    for group in optimizer.param_groups:
        kept = [not isinstance(parameter, Hollow) for parameter in group["params"]]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [value for value, is_kept in zip(group[key], kept, strict=True) if is_kept]
    for parameter in [key for key in optimizer.state if isinstance(key, Hollow)]:
        del optimizer.state[parameter]


def _be_parameter(hollow: Any, is_one: bool, trains: bool) -> None:
    """Turn a hollow tensor into a parameter, or back. What is computed from it stays unknown, even if kept."""
    hollow._is_param = is_one  # isinstance(…, nn.Parameter) asks for this
    with torch._C.DisableTorchFunctionSubclass():
        hollow.requires_grad_(trains)


_REMEDY = (
    ": change the module in __init__, configure_model or setup, before it is trained or evaluated the first time, or"
    " build a new one from its weights (strategy.gather_full_parameters(), or load_from_checkpoint of a checkpoint)."
)


def kinds(module: nn.Module) -> dict[str, bool]:
    """Whether parameters are sharded, by name, between steps."""
    reshard(module)
    return {name: isinstance(parameter, DTensor) for name, parameter in module.named_parameters()}


def check_parameters(
    known: Mapping[str, bool], module: nn.Module, gather_over_stages: Callable[[Any], list[Any]], *, is_cut: bool
) -> None:
    """Compare a module's parameters with those that were laid out; a collective call over the pipeline.

    Args:
        known: The :func:`kinds` of these.
        is_cut: Whether other stages have stand-ins for what is removed here, and would still call them.

    Raises:
        ConfigurationError: On all ranks, if any has other parameters now.
    """
    now = kinds(module)
    came = [name for name, kind in now.items() if known.get(name) != kind]
    left = [name for name in known if name not in now] if is_cut else []
    of_stages = gather_over_stages((came, left))
    came, left = (list(dict.fromkeys(name for names in of_each for name in names)) for of_each in zip(*of_stages))
    for names, did in (
        (came, "was added to the module, or replaced, after it was sharded, so ranks don't synchronize it"),
        (left, "was removed after the module was split into stages, and other stages still use it"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ConfigurationError(f"The parameter {names[0]!r}{more} {did}{_REMEDY}", breaks=9)


def refuse_scripted(module: nn.Module) -> None:
    """Refuse parts that were made by ``torch.jit``: many methods of such modules fail, those of hooks too."""
    for name, part in module.named_modules():
        if isinstance(part, ScriptModule):
            raise ConfigurationError(
                f"{name} was made by torch.jit, which torch has deprecated, and such modules can't be sharded, cut or"
                " followed: give the plain module, with torch.compile or compile_blocks=True for speed."
            )


def refuse_copies(module: nn.Module, stages: Stages | None) -> None:
    """Make ``copy.deepcopy`` of a sharded unit, or of a part of stages that has parameters on any, fail by name."""
    elsewhere = {each for stage in stages or () for each in stage.elsewhere}
    for part in module.modules():
        has_parameters = any(True for _ in part.parameters()) or any(each in elsewhere for each in part.modules())
        if is_unit(part) or (stages is not None and has_parameters):
            part.__dict__["__deepcopy__"] = partial(_refuse_copy, class_name(part))


def _refuse_copy(kind: str, _: Any) -> Any:
    raise StepError(
        f"copy.deepcopy of a {kind} after it was sharded isn't supported: the copy would have no hooks that gather its"
        " shards. Make the copy in __init__, where it is sharded like the original; for an"
        " average of weights use Lightning's EMAWeightAveraging; or keep values, {name: p.detach().clone() for name, p"
        " in module.named_parameters()}.",
        breaks=9,
    )


def gather_parameters(
    module: nn.Module, layout: Layout, groups: Groups | None, device: torch.device
) -> dict[str, Tensor]:
    """Return full parameters by name on rank 0's CPU, and an empty dict on other ranks. Collective over all ranks.

    They are copies, which later steps don't change.

    While it runs, the first data and tensor rank of each stage holds its stage's full parameters on its CPU.
    """
    gathered: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        full = full_tensor(parameter)
        if layout.rank in layout.pipelines()[0]:
            gathered[name] = full.to("cpu", copy=True)  # on one data rank it is the parameter's memory
    if groups is None or layout.pipeline_parallel_size == 1 or layout.rank not in layout.pipelines()[0]:
        return gathered if layout.rank == 0 else {}
    described = {name: (tuple(t.shape), t.dtype) for name, t in gathered.items()}
    stages = groups.gather_over_stages(described)
    for stage, names in enumerate(stages):
        for name, (shape, dtype) in names.items():
            of_rank = layout.pipelines()[0][stage]
            if layout.rank == of_rank and of_rank:
                dist.send(gathered[name].to(device).contiguous(), group=groups.pipeline, group_dst=0)
            elif layout.rank == 0 and of_rank:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, group=groups.pipeline, group_src=layout.pipeline_parallel_size - 1 - stage)
                gathered[name] = received.cpu()
    return gathered if layout.rank == 0 else {}
