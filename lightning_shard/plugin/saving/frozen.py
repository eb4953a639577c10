"""Leaves frozen parameters out of checkpoints: ``ShardedCheckpointIO(exclude_frozen=True)``.

A parameter is left out if it doesn't train and still has, byte for byte, the value that it had when the module was
first laid out (or that ``base`` has): then whoever builds the module again has it. A parameter that was trained and
then frozen is saved. The checkpoint lists what is left out, with a digest of each one's content, so that a run never
resumes with other weights.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.content import content_of_all
from lightning_shard.checkpoint.excluded import Record, of_base
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.header import dtype_name
from lightning_shard.checkpoint.memory import byte_view, resolved
from lightning_shard.checkpoint.ranks import Ranks, together
from lightning_shard.errors import StateMismatchError
from lightning_shard.plugin.saving.beside_tensors import models_of_transformers
from lightning_shard.sharding import local_tensor

_BEGINNING = "_lightning_shard_frozen"
"""The attribute of a module that holds its :class:`_Beginning`; it outlives a single fit."""


@dataclass(frozen=True)
class _Beginning:
    """The values of this rank's parameters when the module was first laid out, or last filled from a checkpoint.

    Attributes:
        digests: By name; a parameter without one is saved.
        base: The checkpoint that holds them all; None: the module was built with these values.
    """

    digests: dict[str, str]
    base: str | None


class Frozen:
    """The frozen parameters of this rank's part of a module.

    Args:
        base: The checkpoint that holds them, according to the user.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, base: str | None, storage_options: dict[str, Any] | None
    ) -> None:
        self._module = module
        self._mesh = mesh
        self._base = base
        self._options = storage_options
        self._base_checked = base is None
        self._loaded_base: str | None = None
        self._told: dict[str, dict[str, Any]] = {}
        if _BEGINNING not in module.__dict__:
            self._begin(self._parameters(), None)

    @property
    def _beginning(self) -> _Beginning:
        return self._module.__dict__[_BEGINNING]

    def _begin(self, parameters: Mapping[str, Tensor], base: str | None) -> None:
        self._module.__dict__[_BEGINNING] = _Beginning(self._digests(parameters), base)
        self._told = {}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._module.named_parameters(remove_duplicate=False))

    def begin_with(self, path: str, without: Collection[str]) -> None:
        """Record that the module was filled from a checkpoint of weights, except for the names in ``without``.

        These aren't in it, or as values of another dtype, and are saved.
        """
        self._begin({name: p for name, p in self._parameters().items() if name not in without}, path)

    def leave_out(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Record | None]:
        """Split a state dict; returns what is saved, and a record of what is left out. Collective over all ranks."""
        frozen = {name for name, p in self._parameters().items() if not p.requires_grad}
        own = {name: state[name] for name in state if name in frozen and isinstance(state[name], Tensor)}
        beginning = self._beginning.digests

        def look() -> tuple[list[str], list[str]]:
            return list(own), [name for name, value in self._digests(own).items() if value != beginning.get(name)]

        everyone = together(Ranks.of(), look, list)
        anywhere = {name for names, _ in everyone for name in names}
        anywhere -= {name for _, names in everyone for name in names}
        if not anywhere:
            return dict(state), None
        out = {name: value for name, value in own.items() if name in anywhere}
        first = not self._told
        if anywhere - self._told.keys():
            self._told = self._tell(out)
        told = {name: entry for name, entry in self._told.items() if name in anywhere}
        if not self._base_checked:
            self._check_base(out, told)
        record = {"tensors": told, "base": self._base or self._beginning.base, "origins": _origins(self._module)}
        if first:
            _warn_of_unknown_source(record)
        return {name: value for name, value in state.items() if name not in out}, record

    def _tell(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
        contents = content_of_all(tensors, self._mesh)

        def tell() -> dict[str, dict[str, Any]]:
            first: dict[int, str] = {}
            told: dict[str, dict[str, Any]] = {}
            parameters = self._parameters()
            for name, tensor in tensors.items():
                told[name] = {"dtype": dtype_name(tensor.dtype, name), "shape": list(tensor.shape)}
                told[name]["content"] = contents[name]
                other = first.setdefault(id(parameters[name]), name)
                if other != name:
                    told[name]["same_as"] = other
            return told

        return {name: value for part in together(Ranks.of(), tell, list) for name, value in part.items()}

    def _check_base(self, tensors: Mapping[str, Tensor], told: Mapping[str, dict[str, Any]]) -> None:
        """Check once that the base holds what is left out, byte for byte; reads one parameter at a time."""
        with ckpt.all_or_none():
            assert self._base is not None
            base = ckpt.read(self._base, storage_options=self._options)
            for name, stored in of_base(base, {"tensors": {name: told[name] for name in tensors}}).items():
                target = torch.empty_like(tensors[name])
                ckpt.load_tensors([(stored, target)])
                if self._digests({name: target}) != self._digests({name: tensors[name]}):
                    raise StateMismatchError(
                        f"base ({self._base}) has another {name!r} than the module, whose frozen parameters would be"
                        " lost: pass the base that the module was made from, or leave it out."
                    )
        self._base_checked = True

    def complete(self, stored: Mapping[str, Any], record: Record) -> dict[str, Any]:
        """Add to ``stored`` what was left out: nothing if the module has it, otherwise the base's tensors.

        A collective call over all ranks.
        """
        self._loaded_base = record["base"]
        wrong = self.differing(record)
        if not wrong:
            return dict(stored)
        path = self._base or record["base"]
        if path is None:
            raise StateMismatchError(_other_weights(wrong, record))
        self._loaded_base = path
        with ckpt.all_or_none():
            others = of_base(ckpt.read(path, storage_options=self._options), record)
        return {**stored, **others}

    def differing(self, record: Record) -> list[str]:
        """The names of left-out parameters that differ in this module, on any rank, from the recorded content."""
        told = record["tensors"]
        now = self._tell({name: p.detach() for name, p in self._parameters().items() if name in told})
        compared = ("dtype", "shape", "content")
        return [name for name, was in told.items() if any(now.get(name, {}).get(key) != was[key] for key in compared)]

    def check(self, record: Record) -> None:
        """After loading: check that the module has what was left out, and record it. Collective over all ranks."""
        if wrong := self.differing(record):
            raise StateMismatchError(_other_weights(wrong, record))
        if self._loaded_base is not None:
            # parameters that aren't in the record may be missing in the base too
            held = {name: p for name, p in self._parameters().items() if name in record["tensors"]}
            self._begin(held, self._loaded_base)

    def _digests(self, tensors: Mapping[str, Tensor]) -> dict[str, str]:
        """Digests of this rank's parts of tensors."""
        parts = ((name, resolved(local_tensor(tensor))) for name, tensor in tensors.items())
        return {name: digest(byte_view(part.cpu().contiguous())) for name, part in parts}


def _warn_of_unknown_source(record: Record) -> None:
    """Warn if only the program of this run can recreate what is left out."""
    known = tuple(record["origins"])
    names = [name for name in record["tensors"] if not name.startswith(known)]
    if names and record["base"] is None:
        rank_zero_warn(
            f"exclude_frozen leaves {len(names)} frozen parameters ({names[0]} …) out of the checkpoint, and nothing"
            " says where they came from: it can be restored only where the module is built with the very same ones. If"
            " they are random, save the module once, by checkpoint.save(module, path), and pass"
            " ShardedCheckpointIO(base=path)."
        )


def _other_weights(names: list[str], record: Record) -> str:
    known = ", ".join(dict.fromkeys(record["origins"].values()))
    source = f" They came from {known}." if known else ""
    return (
        f"The checkpoint leaves out {len(record['tensors'])} frozen parameters, and {len(names)} of them have"
        f" different values here ({', '.join(names[:3])}{' …' if len(names) > 3 else ''}), so results would be"
        f" wrong.{source} Build the module from the same weights, or pass ShardedCheckpointIO(base=), a checkpoint that"
        " holds them."
    )


def _origins(module: nn.Module) -> dict[str, str]:
    """Where transformers models in the module were loaded from, by the prefix of their tensors' names."""
    paths = {prefix: getattr(model, "name_or_path", "") for prefix, model in models_of_transformers(module)}
    return {prefix: os.path.abspath(p) if os.path.isdir(p) else str(p) for prefix, p in paths.items() if p}
