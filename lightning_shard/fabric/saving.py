"""What ``fabric.save`` and ``fabric.load`` do with a state: a dict of modules, optimizers and values, by any keys.

Modules' tensors are stored under the modules' own names, so that a Trainer, and ``lightning_shard.checkpoint``, find
them; with several modules their keys come first. The keys are recorded beside the values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.foreign.keys_of_hooks import OPTIMIZER_TENSORS, OWN
from lightning_shard.checkpoint.names import prefix_of
from lightning_shard.checkpoint.optimizers.named import OPTIMIZER_STATES, name_numbered, named_optimizer_state
from lightning_shard.checkpoint.optimizers.restored import asked_as, described, plan_optimizers
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.sharded_values import lay_out
from lightning_shard.errors import ConfigurationError, StateMismatchError
from lightning_shard.layout import Layout
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO, Site
from lightning_shard.plugin.saving.drift import Drift
from lightning_shard.plugin.saving.plain_lightning import load_into
from lightning_shard.plugin.saving.state import load_module

_KEYS = "fabric"
"""Under ``lightning_shard``: which keys are modules', and which are optimizers', in order."""
_RESERVED = {"state_dict", OPTIMIZER_STATES, OPTIMIZER_TENSORS, OWN}

Filters = Mapping[str, Callable[[str, Any], bool]]


class Parts:
    """A state, by kinds.

    Attributes:
        modules, optimizers: By key.
        values: Everything else.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.modules = {key: each for key, each in state.items() if isinstance(each, nn.Module)}
        self.optimizers = {key: each for key, each in state.items() if isinstance(each, Optimizer)}
        self.values = {k: each for k, each in state.items() if k not in self.modules and k not in self.optimizers}
        self.prefixes = prefixes(self.modules)

    def joined(self) -> nn.Module:
        """One module, whose tensors have the names that they have in a checkpoint of these modules."""
        if len(self.modules) == 1:
            return next(iter(self.modules.values()))
        root = nn.Module()
        for key, module in self.modules.items():
            root.add_module(self.prefixes[key].removesuffix("."), module)
        return root


def prefixes(keys: Collection[str]) -> dict[str, str]:
    """What comes before the names of each module's tensors; nothing with a single one."""
    return {key: "" if len(keys) == 1 else f"{str(key).replace('.', '_')}." for key in keys}


class Saving:
    """Saves states; made once by each rank of a layout.

    Args:
        mesh: All ranks.
    """

    def __init__(
        self, layout: Layout, mesh: DeviceMesh, groups: Groups, device: torch.device, timeout: timedelta | None
    ) -> None:
        self._layout = layout
        self._mesh = mesh
        self._groups = groups
        self._device = device
        self._timeout = timeout
        self._drifts: dict[tuple[nn.Module, ...], Drift] = {}

    def save(
        self, io: ShardedCheckpointIO, path: Any, state: Mapping[str, Any], filters: Filters, storage_options: Any
    ) -> None:
        """Write a sharded checkpoint; a collective call over all ranks."""
        parts = Parts(state)
        root = parts.joined()
        if taken := sorted(_RESERVED & parts.values.keys()):
            raise ConfigurationError(
                f"The state's key {taken[0]!r} is one that a checkpoint needs itself: choose another."
            )
        if refused := [key for key in parts.optimizers if key in filters]:
            raise ConfigurationError(f"filter can't leave out a part of an optimizer ({refused[0]!r}): leave that out.")
        names = {id(parameter): name for name, parameter in root.named_parameters()}
        checkpoint = {
            **{key: _stored(value, filters.get(key)) for key, value in parts.values.items()},
            "state_dict": {
                parts.prefixes[key] + name: value
                for key, module in parts.modules.items()
                for name, value in _stored(module, filters.get(key)).items()
            },
            OPTIMIZER_STATES: [named_optimizer_state(each, names) for each in parts.optimizers.values()],
            OWN: {_KEYS: {"modules": [*parts.modules], "optimizers": [*parts.optimizers]}},
        }
        order = {name: place for place, name in enumerate(names.values())}
        modules = tuple(parts.modules.values())
        if modules not in self._drifts:
            self._drifts[modules] = Drift(root, self._layout, self._mesh, self._groups.host, dict)
        io.connect(
            Site(
                mesh=self._mesh,
                layout=self._layout,
                device=self._device,
                gather_over_stages=self._groups.gather_over_stages,
                order_of=lambda _: order,
                timeout=self._timeout,
                host=self._groups.host,
                drift=self._drifts[modules],
            ),
            fitting=True,
        )
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def save_whole(
        self, io: ShardedCheckpointIO, path: Any, state: Mapping[str, Any], filters: Filters, storage_options: Any
    ) -> None:
        """Write one file, as Fabric's other strategies do, by way of a sharded checkpoint that is removed."""
        folder = f"{os.fspath(path)}.parts"
        self.save(io, folder, state, filters, storage_options)
        io.wait()
        ranks = Ranks.of(self._groups.host)
        with ckpt.all_or_none():
            if ranks.first:
                content = opened(io, folder)
                TorchCheckpointIO().save_checkpoint(content, path, storage_options)
                io.remove_checkpoint(folder)


def _stored(value: Any, chosen: Callable[[str, Any], bool] | None) -> Any:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    if chosen is None:
        return state
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"filter takes a part of a {type(value).__name__}, which has no names: leave it out.")
    return {name: each for name, each in state.items() if chosen(name, each)}


def opened(io: ShardedCheckpointIO, path: Any) -> dict[str, Any]:
    """All of a checkpoint in memory, by the keys of the state that was saved; of a Trainer's, by Lightning's."""
    content = load_into(None, path, None, strict=False, io=io)
    keys = content.pop(OWN, {}).get(_KEYS)
    if keys is None:
        return content
    model, optimizers = content.pop("state_dict"), content.pop(OPTIMIZER_STATES)
    for key, prefix in prefixes(keys["modules"]).items():
        content[key] = {name.removeprefix(prefix): each for name, each in model.items() if name.startswith(prefix)}
    content.update(zip(keys["optimizers"], optimizers))
    return content


def load(
    io: ShardedCheckpointIO, path: Any, state: Any, groups: Groups, *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Fill a state from a checkpoint, or a module alone; see :meth:`HybridShardStrategy.load_checkpoint`."""
    if not state:
        return opened(io, path)
    if isinstance(state, Optimizer):
        raise ConfigurationError(
            f"{type(state).__name__} alone can't be loaded, since its parameters' names are its module's: load both,"
            ' as fabric.load(path, {"model": model, "optimizer": optimizer}).'
        )
    given = {"": state} if isinstance(state, nn.Module) else state
    parts = Parts(given)
    if os.path.isfile(path) and not os.fspath(path).endswith((".safetensors", ".json")):
        rest = _load_file(path, given, parts, groups, strict=strict, weights_only=weights_only)
    else:
        rest = _load_folder(io, path, parts, groups, strict=strict)
    for key, value in parts.values.items():
        if key not in rest:
            _lacks(path, key, rest, strict=strict)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(rest.pop(key))
        else:
            given[key] = rest.pop(key)
    return rest if given is state else {}


def _lacks(path: Any, key: str, has: Collection[Any], *, strict: bool) -> None:
    if strict:
        raise StateMismatchError(
            f"{os.fspath(path)} has nothing for the state's key {key!r}; it has {', '.join(map(str, has)) or 'no'} keys"
            " for values. Leave it out, or pass strict=False."
        )


def _load_folder(io: ShardedCheckpointIO, path: Any, parts: Parts, groups: Groups, *, strict: bool) -> dict[str, Any]:
    options = io.storage_options
    stored = ckpt.read_together(path, storage_options=options, group=groups.host)
    content = stored.trainer_state()
    content = {key: content[key] for key in content if key != OPTIMIZER_STATES} if isinstance(content, dict) else {}
    keys = content.pop(OWN, {}).get(_KEYS)
    is_by_key = keys is not None and "" not in parts.modules
    found = prefixes(keys["modules"]) if is_by_key else dict.fromkeys([*parts.modules][:1], "")
    for key in parts.modules.keys() - found.keys():
        _lacks(path, key, found, strict=strict)
    pairs = {found[key]: parts.prefixes[key] for key in parts.modules if key in found}
    root = parts.joined()
    if not is_by_key:
        pairs = _matched(stored, root.state_dict())

    def rename(name: str) -> str | None:
        prefix = next((each for each in pairs if name.startswith(each)), None)
        return None if prefix is None else pairs[prefix] + name.removeprefix(prefix)

    if pairs:
        ckpt.load(
            path,
            root,
            optimizer=[*parts.optimizers.values()] or None,
            strict=strict,
            cast=True,
            rename=rename,
            storage_options=options,
            group=groups.host,
        )
    rest, values = lay_out(content, {}, ())
    ckpt.load_tensors(values)
    return rest  # type: ignore[no-any-return]


def _matched(stored: Collection[str], own: Mapping[str, Any]) -> dict[str, str]:
    """A prefix of the stored names, and what a module's have in its place: one may be a part of the other."""
    return {prefix_of([*own], {*stored}): prefix_of([*stored], {*own})}


def _load_file(
    path: Any, given: Mapping[str, Any], parts: Parts, groups: Groups, *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Fill modules and optimizers from a file, as Fabric's other strategies read it; returns what is left."""
    with ckpt.all_or_none():
        content = TorchCheckpointIO().load_checkpoint(path, weights_only=weights_only is not False)
    rest = {"": content} if "" in given and "state_dict" not in content else dict(content)
    if "state_dict" in rest and not parts.modules.keys() & rest.keys():  # a Trainer's
        rest |= dict(zip(parts.modules, [rest.pop("state_dict")]))
        rest |= dict(zip(parts.optimizers, rest.pop(OPTIMIZER_STATES, ())))
    for key, module in parts.modules.items():
        if key not in rest:
            _lacks(path, key, rest, strict=strict)
            continue
        state = rest.pop(key)
        [(before, now)] = _matched(state, module.state_dict()).items()
        state = {now + name.removeprefix(before): each for name, each in state.items() if name.startswith(before)}
        load_module(module, state, (), strict=strict)
    names = {id(parameter): name for name, parameter in parts.joined().named_parameters()}
    for key, optimizer in parts.optimizers.items():
        if key not in rest:
            _lacks(path, key, rest, strict=strict)
            continue
        with ckpt.all_or_none():
            listed = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
            _, states = name_numbered({}, [described(0, rest.pop(key))], [listed])
            asked = {asked_as(0, name) for group in listed for name in group}
            [plan] = plan_optimizers([optimizer], names, {}, states, asked)
            plan.finish()
    return rest
