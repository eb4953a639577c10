"""Checkpoints that leave frozen tensors out: what they say of them, and how they are made whole again.

The trainer state has ``{"lightning_shard": {"excluded": {"tensors": …, "base": …, "origins": …}}}``: by name each
tensor's ``dtype``, ``shape`` and ``content`` (see :mod:`~lightning_shard.checkpoint.content`); the path of a checkpoint
that holds them, or None; and by the beginnings of names where transformers models came from.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_shard.checkpoint.content import content_of_stored
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor, StoredTensors
from lightning_shard.errors import CheckpointError, StateMismatchError

Record = Mapping[str, Any]


def excluded_of(trainer_state: Any, stored: Container[str]) -> Record | None:
    """What a trainer state, decoded or not, says of tensors that were left out and aren't stored; None if none are."""
    own = trainer_state.get("lightning_shard") if isinstance(trainer_state, Mapping) else None
    record = own.get("excluded") if isinstance(own, Mapping) else None
    if record is None:
        return None
    # a hook may have put some there
    tensors = {name: told for name, told in record["tensors"].items() if name not in stored}
    return {**record, "tensors": tensors} if tensors else None


class Completed(Checkpoint):
    """A checkpoint with tensors of another among those of its model."""

    def __init__(self, checkpoint: Checkpoint, others: Mapping[str, StoredTensor]) -> None:
        super().__init__(checkpoint.path, checkpoint.store, checkpoint.manifest, checkpoint.verify, checkpoint._state)
        self._others = others

    def __getitem__(self, name: str) -> StoredTensor:
        return self._others[name] if name in self._others else super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        yield from self._others

    def __len__(self) -> int:
        return super().__len__() + len(self._others)

    def __contains__(self, name: object) -> bool:
        return name in self._others or super().__contains__(name)

    def alias_of(self, name: str) -> str | None:
        return None if name in self._others else super().alias_of(name)

    def full(self) -> dict[str, Tensor]:
        own = StoredTensors(self.manifest.model, self).full()
        return {**own, **{name: stored.full() for name, stored in self._others.items()}}

    def state_json(self) -> Any:
        """Without what it said of tensors that were left out: the names may be others where it is written anew."""
        state = super().state_json()
        own = {key: value for key, value in state["lightning_shard"].items() if key != "excluded"}
        return {**state, "lightning_shard": own}


def complete(
    checkpoint: Checkpoint,
    base: str | os.PathLike[str] | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
) -> Checkpoint:
    """The checkpoint with what it left out, of ``base`` or where it says that this came from; itself if it is whole.

    Reads what was left out once, to see that it is the same.

    Raises:
        CheckpointError: It can't be told where they are.
        StateMismatchError: The base has others.
    """
    record = excluded_of(checkpoint.state_json(), checkpoint)
    if record is None:
        return checkpoint
    names = list(record["tensors"])
    origins = [path for path in record["origins"].values() if os.path.isdir(path)]
    source = base or record["base"] or (origins[0] if len(origins) == 1 else None)
    if source is None:
        known = ", ".join(dict.fromkeys(record["origins"].values()))
        raise CheckpointError(
            f"{checkpoint.path} leaves out {len(names)} frozen tensors ({names[0]!r} …), which the module had"
            f"{f' from {known}' if known else ' when it was made'}: pass base=, a checkpoint, safetensors file or"
            " transformers folder that holds them."
        )
    try:
        stored = read(source, storage_options=storage_options, verify=checkpoint.verify)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint.path} leaves out {len(names)} frozen tensors, and where they came from can't be read: {error}"
            " Pass base=, the place of what holds them."
        ) from error
    others = of_base(stored, record)
    for name, tensor in others.items():
        if content_of_stored(tensor) != record["tensors"][name]["content"]:
            raise StateMismatchError(
                f"{stored.path} holds another {name!r} than the frozen one that {checkpoint.path} was trained with:"
                " pass as base= what the run began with."
            )
    return Completed(checkpoint, others)


def of_base(base: Checkpoint, record: Record) -> dict[str, StoredTensor]:
    """A base's tensors by the names of those that were left out; their beginnings may be missing in it.

    Raises:
        StateMismatchError: One isn't there, or is of another dtype or shape.
    """
    tensors = record["tensors"]
    prefix = _missing_prefix(base, [name for name, told in tensors.items() if "same_as" not in told])
    found = {}
    for name, told in tensors.items():
        inner = name if name in base else name.removeprefix(prefix)
        same = told.get("same_as")
        if inner not in base and same is not None:  # transformers' files have one of tied tensors
            inner = same if same in base else same.removeprefix(prefix)
        if inner not in base:
            raise StateMismatchError(
                f"{base.path} has no {name!r}, which was left out as frozen. Its names must be the module's, or all"
                " lack one beginning: save the whole module once, by checkpoint.save(module, path), and pass that."
            )
        stored = base[inner]
        if (stored.entry.dtype, list(stored.shape)) != (told["dtype"], list(told["shape"])):
            raise StateMismatchError(
                f"{base.path} has {name!r} as {stored.entry.dtype} {tuple(stored.shape)}, and it was"
                f" {told['dtype']} {tuple(told['shape'])} when it was left out: pass a base of the same dtypes."
            )
        found[name] = StoredTensor(name, stored.entry, base)
    return found


def _missing_prefix(base: Checkpoint, names: list[str]) -> str:
    """What all names begin with and the base's lack: ``"model."`` where a module holds a transformers model so."""
    if all(name in base for name in names):
        return ""
    first = names[0]
    beginnings = (first[: at + 1] for at, letter in enumerate(first) if letter == ".")
    return next((p for p in beginnings if all(name.removeprefix(p) in base for name in names)), "")
