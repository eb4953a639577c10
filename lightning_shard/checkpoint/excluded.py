"""Checkpoints that leave out frozen tensors: the record of what was left out, and completion from a base.

The trainer state has ``{"lightning_shard": {"excluded": {"tensors": …, "base": …, "origins": …}}}``. ``tensors``: by
name, each left-out tensor's ``dtype``, ``shape`` and ``content`` hash (:mod:`~lightning_shard.checkpoint.content`).
``base``: the path of a checkpoint that has them, or None. ``origins``: by name prefix, where transformers models were
loaded from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

from lightning_shard.checkpoint.content import content_of_stored
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.errors import CheckpointError, StateMismatchError

Record = Mapping[str, Any]
_WRAPPERS = re.compile(r"(?<![^.])(?:base_model\.model|base_layer|original_module)\.")
"""What peft inserts into names when it wraps the model and layers."""


def excluded_of(trainer_state: Any, stored: Container[str]) -> Record | None:
    """The record of left-out tensors in a trainer state, decoded or not, without those in ``stored``; None if empty."""
    own = trainer_state.get("lightning_shard") if isinstance(trainer_state, Mapping) else None
    record = own.get("excluded") if isinstance(own, Mapping) else None
    if record is None:
        return None
    # a hook may have stored some of them after all
    tensors = {name: told for name, told in record["tensors"].items() if name not in stored}
    return {**record, "tensors": tensors} if tensors else None


def told_of(checkpoint: Checkpoint) -> str:
    """A sentence for the error about tensors missing in the checkpoint; empty if it left none out."""
    record = excluded_of(checkpoint.state_json(), checkpoint)
    if record is None:
        return ""
    names = list(record["tensors"])
    return (
        f" It leaves out {len(names)} frozen tensors ({names[0]!r} …), which the module had {_source(record)}: fill"
        " them from there, and then load this with strict=False; or load what gather(path, out, base=) makes of both."
    )


def _source(record: Record) -> str:
    known = [record["base"]] if record["base"] else [*dict.fromkeys(record["origins"].values())]
    return f"from {', '.join(known)}" if known else "when it was made"


class Completed(Checkpoint):
    """A checkpoint whose model section is completed with tensors of another checkpoint."""

    def __init__(self, checkpoint: Checkpoint, others: Mapping[str, StoredTensor]) -> None:
        super().__init__(checkpoint.path, checkpoint.store, checkpoint.manifest, checkpoint.verify, checkpoint._state)
        self._tensors.update(others)

    def state_json(self) -> Any:
        """The trainer state without the record of left-out tensors, whose names may change when it is written anew."""
        state = super().state_json()
        own = {key: value for key, value in state["lightning_shard"].items() if key != "excluded"}
        return {**state, "lightning_shard": own}


def complete(
    checkpoint: Checkpoint,
    base: str | os.PathLike[str] | None = None,
    *,
    storage_options: dict[str, Any] | None = None,
    ranks: Ranks | None = None,
) -> Checkpoint:
    """The checkpoint completed with the tensors that it left out; unchanged if it left none out.

    They are taken from ``base``, by default from the place that the checkpoint records, and read once to check that
    they are the same. Several ranks share the reading, so an error may be raised on one rank only.

    Raises:
        CheckpointError: Their place isn't known, or can't be read.
        StateMismatchError: The base has different tensors.
    """
    record = excluded_of(checkpoint.state_json(), checkpoint)
    if record is None:
        return checkpoint
    names = list(record["tensors"])
    origins = {path for path in record["origins"].values() if os.path.isdir(path)}
    source = base or record["base"] or (origins.pop() if len(origins) == 1 else None)
    if source is None:
        raise CheckpointError(
            f"{checkpoint.path} leaves out {len(names)} frozen tensors ({names[0]!r} …), which the module had"
            f" {_source(record)}: pass base=, a checkpoint, safetensors file or transformers folder that holds them;"
            " load_from_checkpoint, which has no such argument, opens what gather(path, out, base=) writes."
        )
    try:
        stored = read(source, storage_options=storage_options, verify=checkpoint.verify)
    except CheckpointError as error:
        raise CheckpointError(
            f"{checkpoint.path} leaves out {len(names)} frozen tensors, and where they came from can't be read: {error}"
            " Pass base=, the place of what holds them."
        ) from error
    others = of_base(stored, record)
    ranks = ranks or Ranks()
    for name in names[ranks.members.index(ranks.rank) :: len(ranks.members)]:
        if content_of_stored(others[name]) != record["tensors"][name]["content"]:
            raise StateMismatchError(
                f"{stored.path} holds another {name!r} than the frozen one that {checkpoint.path} was trained with:"
                " pass as base= what the run began with."
            )
    return Completed(checkpoint, others)


def of_base(base: Checkpoint, record: Record) -> dict[str, StoredTensor]:
    """A base's tensors by the names of those that were left out.

    The base's names may lack a prefix common to all names, and what peft inserts.
    """
    tensors = record["tensors"]
    name_in_base = _naming(base, [name for name, told in tensors.items() if "same_as" not in told])
    found = {}
    for name, told in tensors.items():
        inner = name_in_base(name)
        if inner not in base and "same_as" in told:  # transformers' files have one of tied tensors
            inner = name_in_base(told["same_as"])
        if inner not in base:
            raise StateMismatchError(
                f"{base.path} has no {name!r}, which was left out as frozen. Its names must equal the module's,"
                " except that all may lack one common prefix, and what peft inserts (base_model.model, base_layer), if"
                " they stay unique without it. Save the whole module once, by checkpoint.save(module, path), and pass"
                " that."
            )
        stored = base[inner]
        if (stored.entry.dtype, list(stored.shape)) != (told["dtype"], list(told["shape"])):
            raise StateMismatchError(
                f"{base.path} has {name!r} as {stored.entry.dtype} {tuple(stored.shape)}, and it was"
                f" {told['dtype']} {tuple(told['shape'])} when it was left out: pass a base of the same dtypes."
            )
        found[name] = StoredTensor(name, stored.entry, base)
    return found


def _naming(base: Checkpoint, names: Sequence[str]) -> Callable[[str], str]:
    """A function from a module's names to a base's that finds all of ``names``, without collisions; else ``str``."""
    for spelling in (str, partial(_WRAPPERS.sub, "")):
        for first in map(spelling, names[:1]):
            # such as "model.", where a module holds a transformers model as self.model
            for beginning in (first[:at] for at in range(len(first)) if at == 0 or first[at - 1] == "."):
                naming = partial(_name_in_base, base, spelling, beginning)
                found = {naming(name) for name in names}
                if len(found) == len(names) and all(name in base for name in found):
                    return naming
    return str


def _name_in_base(base: Checkpoint, spelling: Callable[[str], str], beginning: str, name: str) -> str:
    inner = spelling(name)
    return inner if inner in base else inner.removeprefix(beginning)
