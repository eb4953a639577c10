"""Cut a model to one stage, in place.

The stage keeps its range of blocks, and of what runs around blocks the parts whose place is in that range. Names of
parameters never change. Everything else stays the object that it is, so that the user's own code runs unmodified, but
its parameters are :class:`Hollow`: right shape and dtype, no memory, and what is computed from them is unknown
(``taint.py``). The forward of other stages' blocks is stood in for (``standin.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.parts import ForeignPart, runs_elsewhere
from lightning_shard.pipeline.stage import Stage
from lightning_shard.pipeline.standin import StandIn
from lightning_shard.pipeline.taint import Hollow


def cut(
    root: nn.Module,
    blocks: Sequence[str],
    owned: range,
    *,
    network: str,
    index: int,
    count: int,
    parts: Mapping[str, int],
    holder_of: Sequence[int],
    kept: Collection[str],
    device: torch.device,
) -> Stage:
    """Keep stage ``index`` of ``count`` of ``root``, in place.

    Args:
        root: The LightningModule.
        blocks: Names of all blocks, in the order in which they run, and as often.
        owned: Which of them this stage runs.
        network: The name of the module that a step calls; ``""`` where it is ``root`` itself.
        parts: Names of the modules and parameters around the blocks, and the stage that holds each.
        holder_of: The stage that runs each block.
        kept: Names of tied parameters that this stage holds, wherever they are used.
        device: Where stand-ins live.
    """
    stage = Stage(index, count, blocks, owned, [*parts], network, device)
    for part, holder in parts.items():
        if holder != index:
            stage.foreign_buffers.update(_hollow(root, part, holder, stage, kept))
    for name, places in stage.places.items():
        block = root.get_submodule(name)
        if not any(place in owned for place in places):
            _hollow(root, name, holder_of[places[0]], stage, kept)
            block.__dict__["forward"] = StandIn(stage, name, block)
        elif not all(place in owned for place in places):
            block.__dict__["forward"] = StandIn(stage, name, block, block.forward)
    for part in parts:
        _let_run_elsewhere(root, part, stage)
    stage.incomplete = _incomplete(root)
    for name, module in stage.incomplete.items():
        module.__dict__["named_parameters"] = partial(_whole_only, stage, name, module.named_parameters)
    return stage


def _let_run_elsewhere(root: nn.Module, name: str, stage: Stage) -> None:
    parent, _, key = name.rpartition(".")
    part = getattr(root.get_submodule(parent), key)
    if isinstance(part, nn.Module) and runs_elsewhere(part, stage, name):
        part.__dict__["forward"] = ForeignPart(stage, name, part, part.forward)


def _incomplete(root: nn.Module) -> dict[str, nn.Module]:
    lacking = {module for module in root.modules() if any(isinstance(value, Hollow) for value in vars(module).values())}
    return {name: module for name, module in root.named_modules() if not lacking.isdisjoint(module.modules())}


def _hollow(root: nn.Module, name: str, holder: int, stage: Stage, kept: Collection[str] = ()) -> list[str]:
    """Take a foreign part's parameters out of the model, leaving hollow tensors in their places.

    Returns:
        The names of its persistent buffers: they stay, and are no state of this stage.
    """
    parent, _, key = name.rpartition(".")
    owner = root.get_submodule(parent)
    if key in owner._parameters:
        if name not in kept:
            _hollow_parameter(owner, key, name, holder, stage)
        return []
    buffers = []
    for inner, module in owner.get_submodule(key).named_modules():
        path = f"{name}.{inner}" if inner else name
        stage.elsewhere.add(module)
        for parameter in [k for k, p in module._parameters.items() if p is not None and f"{path}.{k}" not in kept]:
            _hollow_parameter(module, parameter, f"{path}.{parameter}", holder, stage)
        for buffer in [k for k, b in module._buffers.items() if b is not None]:
            if buffer not in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(buffer)
                buffers.append(f"{path}.{buffer}")
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            module.register_state_dict_post_hook(_without_extra_state)
    return buffers


def _without_extra_state(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state.pop(f"{prefix}_extra_state", None)


def _hollow_parameter(module: nn.Module, key: str, name: str, holder: int, stage: Stage) -> None:
    parameter = module._parameters.pop(key)
    assert parameter is not None
    hollow = Hollow.of(parameter, stage.device, name, holder, stage.on_missing)
    # Into __dict__: nn.Module.__setattr__ would take a tensor for an attempt to replace the parameter.
    module.__dict__[key] = stage.hollow[name] = hollow


def _whole_only(
    stage: Stage, name: str, whole: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[Any]:
    """A module's ``named_parameters``: within a step its first, which tells dtype and device, then it raises."""
    own = whole(prefix, recurse, remove_duplicate)
    start = f"{name}." if name else ""
    below = {fqn.removeprefix(start): hollow for fqn, hollow in stage.hollow.items() if fqn.startswith(start)}
    elsewhere = [(f"{prefix}.{k}".lstrip("."), hollow) for k, hollow in below.items() if recurse or "." not in k]
    if not stage.in_step or not elsewhere:
        yield from own
        return
    yield next(own, elsewhere[0])
    raise StepError(
        f"The step goes over all parameters of {name or 'the LightningModule'}, and with several pipeline stages no"
        " process has all: use the optimizer's weight_decay for a penalty, or pipeline_parallel_size=1."
    )
