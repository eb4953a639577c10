"""What ``fabric.save`` and ``fabric.load`` do with a state: a dict of modules, optimizers and values, by any keys.

Modules' tensors are stored under the modules' own names, so that a Trainer, and ``lightning_shard.checkpoint``, find
them; with several modules their keys come first. The keys are recorded beside the values.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.foreign.lightning_ckpt import OPTIMIZER_TENSORS, OWN
from lightning_shard.checkpoint.names import prefix_of
from lightning_shard.checkpoint.optimizers.named import OPTIMIZER_STATES, name_numbered, named_optimizer_state
from lightning_shard.checkpoint.optimizers.restored import asked_as, described, plan_optimizers, stored_states
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.sharded_values import lay_out
from lightning_shard.errors import ConfigurationError, StateMismatchError
from lightning_shard.fabric.pipelined import Pipelined
from lightning_shard.layout import Layout
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO, Site
from lightning_shard.plugin.saving.drift import Drift, copies_of_stages, on_several_stages
from lightning_shard.plugin.saving.own_loading import load_module
from lightning_shard.plugin.saving.plain_lightning import FABRIC_KEYS, load_into, prefixes

_RESERVED = {"state_dict", OPTIMIZER_STATES, OPTIMIZER_TENSORS, OWN}

_DRAWS = "draws"
"""Under ``lightning_shard``: of each module on stages, by key, where its random numbers stand."""

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


class States:
    """Saves and loads states; made once by each rank of a layout.

    Args:
        mesh: The ranks that hold this rank's stage.
        pipelined: The modules that were cut into stages.
    """

    def __init__(
        self,
        layout: Layout,
        mesh: DeviceMesh,
        groups: Groups,
        device: torch.device,
        timeout: timedelta | None,
        pipelined: Mapping[nn.Module, Pipelined],
    ) -> None:
        self._pipelined = pipelined
        self._layout = layout
        self._mesh = mesh
        self._groups = groups
        self._device = device
        self._timeout = timeout
        self._drifts: dict[tuple[nn.Module, ...], Drift] = {}
        self._copies: Mapping[str, Tensor] = {}  # of the save that is under way

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
        optimizers, elsewhere = [*parts.optimizers.values()], self._look_at_stages(parts)
        cut = {key: self._pipelined[module] for key, module in parts.modules.items() if module in self._pipelined}
        checkpoint = {
            **{key: _stored(value, filters.get(key)) for key, value in parts.values.items()},
            "state_dict": {
                parts.prefixes[key] + name: value
                for key, module in parts.modules.items()
                for name, value in _stored(module, filters.get(key)).items()
                if parts.prefixes[key] + name not in elsewhere
            },
            OPTIMIZER_STATES: [named_optimizer_state(each, names, elsewhere) for each in optimizers],
            OWN: {
                FABRIC_KEYS: {"modules": [*parts.modules], "optimizers": [*parts.optimizers]},
                _DRAWS: {key: each.draws for key, each in cut.items()},
            },
        }
        modules = tuple(parts.modules.values())
        if modules not in self._drifts:
            self._drifts[modules] = Drift(root, self._layout, self._mesh, self._groups.host, lambda: self._copies)
        io.connect(
            Site(
                mesh=self._mesh,
                layout=self._layout,
                device=self._device,
                groups=self._groups,
                order_of=lambda index: self._order(parts, optimizers[index]),
                timeout=self._timeout,
                drift=self._drifts[modules],
            ),
            fitting=True,
        )
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)

    def _look_at_stages(self, parts: Parts) -> set[str]:
        """Note what several stages hold; returns the names that this rank holds and another one saves."""
        tied: dict[str, nn.Parameter] = {}
        apart: dict[str, Tensor] = {}
        elsewhere: set[str] = set()
        for key, module in parts.modules.items():
            if (pipelined := self._pipelined.get(module)) is None:
                continue
            prefix, state = parts.prefixes[key], module.state_dict()
            for name, text in pipelined.first_checks.join_copies(tolerates=True).items():
                rank_zero_warn(f"{text} Until then, the last stage's copy is saved.")
                apart[prefix + name] = state[name]
            tied |= {prefix + name: p for name, p in on_several_stages(module, pipelined.known.ties).items()}
            elsewhere |= {prefix + name for name in pipelined.known.saved_elsewhere}
        self._copies = copies_of_stages(tied, apart, parts.optimizers.values())
        return elsewhere

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
                content = load_into(None, folder, None, strict=False, io=io)
                TorchCheckpointIO().save_checkpoint(content, path, storage_options)
                io.remove_checkpoint(folder)

    def load(
        self, io: ShardedCheckpointIO, path: Any, state: Any, *, strict: bool, weights_only: bool | None
    ) -> dict[str, Any]:
        """Fill a state from a checkpoint, or a module alone; see :meth:`HybridShardStrategy.load_checkpoint`."""
        if not state:
            return load_into(None, path, None, strict=False, io=io)
        if isinstance(state, Optimizer):
            raise ConfigurationError(
                f"{type(state).__name__} alone can't be loaded, since its parameters' names are its module's: load"
                ' both, as fabric.load(path, {"model": model, "optimizer": optimizer}).'
            )
        given = {"": state} if isinstance(state, nn.Module) else state
        parts = Parts(given)
        if os.path.isfile(path) and not os.fspath(path).endswith((".safetensors", ".json")):
            rest = self._load_file(path, given, parts, strict=strict, weights_only=weights_only)
        else:
            rest = self._load_folder(io, path, parts, strict=strict)
        for key, draws in rest.pop(OWN, {}).get(_DRAWS, {}).items():
            if parts.modules.get(key) in self._pipelined:
                self._pipelined[parts.modules[key]].draws = draws
        for key, value in parts.values.items():
            if key not in rest:
                _lacks(path, key, rest, strict=strict)
            elif hasattr(value, "load_state_dict"):
                value.load_state_dict(rest.pop(key))
            else:
                given[key] = rest.pop(key)
        return rest if given is state else {}

    def _load_folder(self, io: ShardedCheckpointIO, path: Any, parts: Parts, *, strict: bool) -> dict[str, Any]:
        options, host = io.storage_options, self._groups.host
        stored = ckpt.read_together(path, storage_options=options, group=host)
        content = stored.trainer_state()
        content = {key: content[key] for key in content if key != OPTIMIZER_STATES} if isinstance(content, dict) else {}
        keys = content.get(OWN, {}).get(FABRIC_KEYS)
        is_by_key = keys is not None and "" not in parts.modules
        found = prefixes(keys["modules"]) if is_by_key else dict.fromkeys([*parts.modules][:1], "")
        for key in parts.modules.keys() - found.keys():
            _lacks(path, key, found, strict=strict)
        pairs = {found[key]: parts.prefixes[key] for key in parts.modules if key in found}
        root = parts.joined()
        if not is_by_key:
            pairs = _matched(stored, self._names(root))

        def rename(name: str) -> str | None:
            prefix = next((each for each in pairs if name.startswith(each)), None)
            return None if prefix is None else pairs[prefix] + name.removeprefix(prefix)

        states = (stored_states(stored) or []) if self._pipelined else []
        numbered = any(each.get("numbered") for each in states)  # by their places among all stages'
        if pairs:
            optimizers = [] if numbered else [*parts.optimizers.values()]
            ckpt.load(
                path,
                root,
                optimizer=optimizers or None,
                strict=strict,
                cast=True,
                rename=rename,
                storage_options=options,
                group=host,
            )
        if numbered:
            self._restore(parts, dict(zip(parts.optimizers, states)))
        if self._pipelined:
            foreign = {
                parts.prefixes[key] + name: module.get_buffer(name)
                for key, module in parts.modules.items()
                for name in self._foreign_buffers(module)
            }
            read = [(stored[name], foreign[new]) for name in stored if (new := rename(name)) in foreign]
            ckpt.load_together(lambda: read, cast=True, group=host)
        rest, values = lay_out(content, {}, ())
        ckpt.load_tensors(values)
        return rest  # type: ignore[no-any-return]

    def _load_file(
        self, path: Any, given: Mapping[str, Any], parts: Parts, *, strict: bool, weights_only: bool | None
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
            state, names = rest.pop(key), self._names(module)
            [(before, now)] = _matched(state, names).items()
            state = {now + name.removeprefix(before): each for name, each in state.items() if name.startswith(before)}
            load_module(module, state, names, strict=strict, also=self._foreign_buffers(module))
        states = {key: rest.pop(key) for key in parts.optimizers if key in rest}
        for key in parts.optimizers.keys() - states.keys():
            _lacks(path, key, rest, strict=strict)
        self._restore(parts, states)
        return rest

    def _restore(self, parts: Parts, states: Mapping[str, Any]) -> None:
        """Fill optimizers from whole states, whose parameters are numbered as one process makes an optimizer."""
        names = {id(parameter): name for name, parameter in parts.joined().named_parameters()}
        for key, state in states.items():
            optimizer = parts.optimizers[key]
            order = self._order(parts, optimizer)
            own = [[names[id(each)] for each in group["params"]] for group in optimizer.param_groups]
            if self._pipelined:
                of_stages = zip(*self._groups.gather_over_stages(own))
                own = [sorted({*chain(*of_group)}, key=order.__getitem__) for of_group in of_stages]
            with ckpt.all_or_none():
                _, named = name_numbered({}, [described(0, state)], [own])
                asked = {asked_as(0, name) for group in own for name in group}
                [plan] = plan_optimizers([optimizer], names, {}, named, asked)
                plan.finish()

    def _order(self, parts: Parts, optimizer: Optimizer) -> dict[str, int]:
        """The parameters' places in an optimizer, as one process would make it; those of one module alone are in it."""
        order: dict[str, int] = {}
        for key, module in parts.modules.items():
            cut = self._pipelined.get(module)
            places = {name: place for place, (name, _) in enumerate(module.named_parameters())}
            places = places if cut is None else cut.places_in(optimizer)
            order |= {parts.prefixes[key] + name: place for name, place in places.items()}
        return order

    def _names(self, module: nn.Module) -> set[str]:
        """Of a module's state on all stages."""
        return {name for names in self._groups.gather_over_stages([*module.state_dict()]) for name in names}

    def _foreign_buffers(self, module: nn.Module) -> Collection[str]:
        """Names of buffers that another stage saves and this rank has too, for the code around the blocks."""
        stages = self._pipelined[module].known.stages if module in self._pipelined else None
        return stages.foreign_buffers if stages is not None else ()


def _stored(value: Any, chosen: Callable[[str, Any], bool] | None) -> Any:
    state = value.state_dict() if hasattr(value, "state_dict") else value
    if chosen is None:
        return state
    if not isinstance(state, Mapping):
        raise ConfigurationError(f"filter takes a part of a {type(value).__name__}, which has no names: leave it out.")
    return {name: each for name, each in state.items() if chosen(name, each)}


def _lacks(path: Any, key: str, has: Collection[Any], *, strict: bool) -> None:
    if strict:
        raise StateMismatchError(
            f"{os.fspath(path)} has nothing for the state's key {key!r}; it has {', '.join(map(str, has)) or 'no'} keys"
            " for values. Leave it out, or pass strict=False."
        )


def _matched(stored: Collection[str], own: Collection[str]) -> dict[str, str]:
    """A prefix of the stored names, and what a module's have in its place: one may be a part of the other."""
    return {prefix_of([*own], {*stored}): prefix_of([*stored], {*own})}
