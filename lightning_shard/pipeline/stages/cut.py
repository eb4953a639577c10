"""Cuts a model to the stages of one rank, in place.

A stage keeps its range of blocks, and the parts around the blocks that are placed in that range. All other modules stay
the same objects, so that the user's own code runs unmodified. Their parameters become :class:`Hollow`: they have shape
and dtype but no memory, and what is computed from them is unknown (``taint.py``). Stand-ins replace the forwards of
other stages' blocks (``stand_in.py``). Names of parameters never change.

The replacement is permanent for modules that no stage of this rank holds. For modules that only some of its stages
hold, it applies while another one runs (``rank_stages.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.masks import use_dense_tensors
from lightning_shard.pipeline.dataflow.taint import Hollow, Unknown
from lightning_shard.pipeline.stages.parts import ForeignPart, is_foreign, part_of
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Network, Stage, modules_of
from lightning_shard.pipeline.stages.stand_in import StandIn

_Slot = tuple[nn.Module, str]
"""The location of a parameter: a module, and the parameter's name in it."""


def cut(
    root: nn.Module, network: Network, own: Iterable[int], kept: Mapping[int, Collection[str]], device: torch.device
) -> Stages:
    """Cut ``root`` to some of its network's stages, in place.

    Args:
        root: The LightningModule.
        own: The stages of this rank.
        kept: For each stage, the names of tied parameters that it holds, wherever they are used.
        device: The device of hollow parameters and unknown values.
    """
    stages = Stages(tuple(Stage(index, network, device) for index in sorted(own)))
    first = _first_holders(root, network)
    for stage in stages:
        stage.alone = [name for name, holder in first.items() if holder == stage.index]
    foreign = {stage: _Foreign.of(root, stage, kept[stage.index]) for stage in stages}
    nowhere = set.intersection(*(set(each.parameters) for each in foreign.values()))
    _hollow_out(stages, foreign, nowhere)
    for stage, each in foreign.items():
        stage.elsewhere = each.modules
    held = {module for stage in stages for _, module in modules_of(root, stage)}  # some in others' blocks, too
    _exclude_buffers(root, stages, set.intersection(*(stage.elsewhere for stage in stages)) - held)
    _ignore_in_loads(root, nowhere, stages.foreign_buffers)
    use_dense_tensors(root)
    for name in stages[0].places:
        _replace_block_forward(root.get_submodule(name), name, stages)
    for name in network.parts:
        _replace_foreign_part(root, name, stages)
    stages.incomplete = _incomplete(root, nowhere)
    for name, module in stages.incomplete.items():
        module.__dict__["named_parameters"] = partial(_named_parameters, stages, name, module.named_parameters)
        module.__dict__["get_parameter"] = partial(_parameter, module)
    for stage, view in stages.views.items():
        for name, module in _incomplete(root, foreign[stage].parameters).items():
            module.__dict__["get_parameter"] = partial(_parameter, module)
            if name not in stages.incomplete:
                whole = partial(_named_parameters, stages, name, module.named_parameters)
                view.add(module.__dict__, "named_parameters", whole)
    return stages


def _first_holders(root: nn.Module, network: Network) -> dict[str, int]:
    """By a parameter's names, the first stage that holds it; without those outside of blocks and parts."""
    held = [*network.parts.items(), *zip(network.blocks, network.holders)]
    first: dict[Tensor, int] = {}
    names: list[tuple[str, Tensor]] = []
    for name, parameter in root.named_parameters(remove_duplicate=False):
        for of, stage in held:
            if name == of or name.startswith(f"{of}."):
                first[parameter] = min(first.get(parameter, stage), stage)
                names.append((name, parameter))
    return {name: first[parameter] for name, parameter in names}


@dataclass(frozen=True)
class _Foreign:
    """The parameters and modules that a stage doesn't hold.

    Attributes:
        parameters: By location, the name of each parameter and the stage that holds it.
        modules: All modules of foreign blocks and parts.
    """

    parameters: dict[_Slot, tuple[str, int]]
    modules: set[nn.Module]

    @classmethod
    def of(cls, root: nn.Module, stage: Stage, kept: Collection[str]) -> _Foreign:
        found = cls({}, set())
        for name, holder in stage.network.parts.items():
            if holder != stage.index:
                found._add(root, name, holder, kept)
        for name, places in stage.places.items():
            if not any(place in stage.owned for place in places):
                found._add(root, name, stage.network.holders[places[0]], kept)
        return found

    def _add(self, root: nn.Module, name: str, holder: int, kept: Collection[str]) -> None:
        parent, _, key = name.rpartition(".")
        owner = root.get_submodule(parent)
        if key in owner._parameters:
            if name not in kept:
                self.parameters[owner, key] = name, holder
            return
        for inner, module in owner.get_submodule(key).named_modules():
            path = f"{name}.{inner}" if inner else name
            self.modules.add(module)
            for parameter, value in module._parameters.items():
                if value is not None and f"{path}.{parameter}" not in kept:
                    self.parameters.setdefault((module, parameter), (f"{path}.{parameter}", holder))


def _hollow_out(stages: Stages, foreign: Mapping[Stage, _Foreign], nowhere: Collection[_Slot]) -> None:
    """Replace foreign parameters by hollow ones: those in ``nowhere`` permanently, siblings' in the stage's view."""
    hollow: dict[_Slot, Hollow] = {}
    for stage, each in foreign.items():
        for slot, (name, holder) in each.parameters.items():
            module, key = slot
            if slot not in hollow:
                parameter = module._parameters[key]
                assert parameter is not None
                hollow[slot] = Hollow.of(parameter, stage.device, name, holder, stages.on_missing)
            stage.hollow[name] = hollow[slot]
            if slot not in nowhere:
                stages.views[stage].add(module.__dict__, key, hollow[slot])
    for module, key in nowhere:
        del module._parameters[key]
        # Into __dict__: nn.Module.__setattr__ would take a tensor for an attempt to replace the parameter.
        module.__dict__[key] = hollow[module, key]
    for module in {module for module, _ in nowhere}:
        if type(module)._save_to_state_dict is not nn.Module._save_to_state_dict:
            module.register_state_dict_post_hook(_without_hollow)


def _exclude_buffers(root: nn.Module, stages: Stages, modules: Collection[nn.Module]) -> None:
    """Keep these modules' buffers but leave them out of ``state_dict``: no stage of this rank holds the modules."""
    for path, module in root.named_modules():
        if module not in modules:
            continue
        for buffer in [key for key, value in module._buffers.items() if value is not None]:
            if buffer not in module._non_persistent_buffers_set:
                module._non_persistent_buffers_set.add(buffer)
                stages.foreign_buffers.add(f"{path}.{buffer}")
                for stage in stages:
                    stage.saved_elsewhere.setdefault(module, []).append(buffer)
        kind = type(module)
        saves_more = kind._save_to_state_dict is not nn.Module._save_to_state_dict  # as torch's FakeQuantize
        if saves_more or kind.get_extra_state is not nn.Module.get_extra_state:
            module.register_state_dict_post_hook(_without_own)


def _ignore_in_loads(root: nn.Module, parameters: Collection[_Slot], buffers: Collection[str]) -> None:
    """Have ``load_state_dict`` accept the whole model's state, and ignore entries that no stage of this rank holds."""
    keys: dict[nn.Module, set[str]] = {}
    for name in buffers:
        parent, _, key = name.rpartition(".")
        keys.setdefault(root.get_submodule(parent), set()).add(key)
    for module, key in parameters:
        keys.setdefault(module, set()).add(key)
    for module, own in keys.items():
        module.register_load_state_dict_pre_hook(_leaving_out(own))


def _leaving_out(keys: Collection[str]) -> Callable[..., None]:
    def leave_out(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for key in keys:
            state.pop(f"{prefix}{key}", None)

    return leave_out


def _replace_block_forward(block: nn.Module, name: str, stages: Stages) -> None:
    """Replace a block's forward on the stages that don't run all of its places."""
    forwards: dict[Stage, Callable[..., Any]] = {}
    for stage in stages:
        held = [place in stage.owned for place in stage.places[name]]
        if not all(held):
            forwards[stage] = StandIn(stage, name, block, block.forward if any(held) else None)
    _set_forward(
        block, forwards, stages, for_good=not any(place in s.owned for s in stages for place in s.places[name])
    )


def _replace_foreign_part(root: nn.Module, name: str, stages: Stages) -> None:
    """Replace a part's forward on the stages that hold none of its parameters."""
    part = part_of(root, name)
    if isinstance(part, nn.Module):
        foreign = [stage for stage in stages if is_foreign(part, stage, name)]
        forwards = {stage: ForeignPart(stage, name, part, part.forward) for stage in foreign}
        _set_forward(part, forwards, stages, for_good=len(foreign) == len(stages))


def _set_forward(
    module: nn.Module, forwards: Mapping[Stage, Callable[..., Any]], stages: Stages, *, for_good: bool
) -> None:
    """Replace a module's forward while each of these stages runs; with ``for_good``, permanently by the first one."""
    for stage, view in stages.views.items():
        if stage in forwards:
            view.add(module.__dict__, "forward", forwards[stage])
    if forwards and (for_good or not stages.views):
        module.__dict__["forward"] = next(iter(forwards.values()))


def _incomplete(root: nn.Module, lacking: Collection[_Slot]) -> dict[str, nn.Module]:
    """By name, the modules that lack one of these parameters, themselves or in a submodule."""
    modules = {module for module, _ in lacking}
    return {name: module for name, module in root.named_modules() if not modules.isdisjoint(module.modules())}


def _without_hollow(_: nn.Module, state_dict: dict[str, Any], prefix: str, __: Any) -> None:
    """Hook: remove what a module's own code has read from attributes, and not from its parameters."""
    for name in [name for name, value in state_dict.items() if isinstance(value, Unknown)]:
        if name.startswith(prefix):
            del state_dict[name]


def _without_own(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook: remove what a module saves itself, and not its submodules."""
    own = [name for name in state if name.startswith(prefix)]
    for name in own:
        if name.removeprefix(prefix).partition(".")[0] not in module._modules:
            del state[name]


def _parameter(module: nn.Module, target: str) -> Any:
    """A module's ``get_parameter``: for another stage's parameter, the hollow one, whose messages name its holder."""
    path, _, name = target.rpartition(".")
    held = vars(module.get_submodule(path)).get(name)  # hollow, or during a step the received parameter
    return held if isinstance(held, Tensor) else type(module).get_parameter(module, target)


def _named_parameters(
    stages: Stages, name: str, whole: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[Any]:
    """A module's ``named_parameters``: in a step, yields one parameter (for its dtype and device), then raises."""
    own = whole(prefix, recurse, remove_duplicate)
    stage = stages.current
    start = f"{name}." if name else ""
    hollows = stage.hollow if stage is not None and stage.in_step else {}
    below = {fqn.removeprefix(start): hollow for fqn, hollow in hollows.items() if fqn.startswith(start)}
    elsewhere = [(f"{prefix}.{k}".lstrip("."), hollow) for k, hollow in below.items() if recurse or "." not in k]
    if not elsewhere:
        yield from own
        return
    yield next(own, elsewhere[0])
    sentence = (
        f"The step goes over all parameters of {name or 'the LightningModule'}, and with several pipeline stages no"
        " process has all: use the optimizer's weight_decay for a penalty, on_train_batch_start to freeze"
        " some, or pipeline_parallel_size=1."
    )
    if stage is not None and stage.calls is not None and not stage.passage.active:
        stage.calls.on_missing(sentence)
    raise StepError(sentence, breaks=10)
