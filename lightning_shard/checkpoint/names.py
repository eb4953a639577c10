"""Renames tensors when they are read from a checkpoint or loaded into a state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lightning_shard.errors import ConfigurationError, StateMismatchError

Rename = Mapping[str, str] | Callable[[str], str | None]
"""A mapping from prefixes to their replacements (the longest matching prefix counts; ``""`` matches all); or a function
from a name to the new one, or to None to leave the tensor out."""

COMPILED = "_orig_mod."


def new_names(names: Iterable[str], strip_prefix: str | None = None, rename: Rename | None = None) -> dict[str, str]:
    """Map new names to old ones: first ``strip_prefix`` is removed from names that have it, then ``rename`` is applied.

    Args:
        names: All of a model's names.
    """
    old = list(names)
    found = renamed_among(old, strip_prefix, rename)
    if strip_prefix and old and not any(name.startswith(strip_prefix) for name in old):
        raise StateMismatchError(
            f"No tensor's name begins with strip_prefix ({strip_prefix!r}); a name is {old[0]!r}, for example: pass the"
            " prefix that names have, or leave strip_prefix out."
        )
    return found


def renamed_among(names: Iterable[str], strip_prefix: str | None, rename: Rename | None) -> dict[str, str]:
    """:func:`new_names` of some of a model's names, none of which need have the prefix."""
    if not (strip_prefix is None or isinstance(strip_prefix, str)):
        raise ConfigurationError(f"strip_prefix ({strip_prefix!r:.80}) must be a str or None.")
    if not (rename is None or callable(rename) or isinstance(rename, Mapping)):
        raise ConfigurationError(f"rename ({rename!r:.80}) must map prefixes to what replaces them, or be a function.")
    if isinstance(rename, Mapping) and not all(isinstance(each, str) for pair in rename.items() for each in pair):
        raise ConfigurationError(f"rename ({rename!r:.80}) must map prefixes to what replaces them, all of them str.")
    if rename is None and not strip_prefix:
        return {name: name for name in names}
    found: dict[str, str] = {}
    for name in names:
        new = _renamed(name.removeprefix(strip_prefix or ""), rename)
        if new is None:
            continue
        if new in found:
            raise StateMismatchError(
                f"{found[new]!r} and {name!r} would both be named {new!r}: change strip_prefix or rename."
            )
        found[new] = name
    return found


def unmatched(names: Iterable[str], strip_prefix: str | None, rename: Rename | None) -> list[str]:
    """The prefixes in ``rename`` that no name begins with."""
    if not isinstance(rename, Mapping):
        return []
    rest = [name.removeprefix(strip_prefix or "") for name in names]
    return [prefix for prefix in rename if not any(name.startswith(prefix) for name in rest)]


def prefix_of(stored: Collection[str], names: set[str]) -> str:
    """The prefix that a module's names (``names``) have before the stored ones; ``""`` if there is none.

    For example ``"model."`` for a transformers model's file, where a LightningModule holds the model as ``self.model``.
    """
    if not names.isdisjoint(stored) or not stored:
        return ""
    first = next(iter(stored))
    for name in sorted(names):
        prefix = name.removesuffix(first)
        if prefix != name and prefix.endswith(".") and all(prefix + key in names for key in stored):
            return prefix
    return ""


def as_compiled(stored: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Stored names to those of ``names`` that they match, of parts that were compiled on one side only.

    ``torch.compile(net)`` holds the network as ``_orig_mod``, which is in its tensors' names then.
    """
    stored = set(stored)
    uncompiled = {name.replace(COMPILED, ""): name for name in names if name not in stored}
    found = {old: uncompiled.get(old.replace(COMPILED, "")) for old in stored.difference(names)} if uncompiled else {}
    return {old: new for old, new in found.items() if new is not None}


def renamed_keys(tree: Any, new: Mapping[str, str]) -> Any:
    """A tree of dicts, lists and tuples with new names for some keys of dicts."""
    if type(tree) in (dict, OrderedDict):
        return type(tree)((new.get(key, key), renamed_keys(value, new)) for key, value in tree.items())
    return type(tree)(renamed_keys(value, new) for value in tree) if type(tree) in (list, tuple) else tree


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        new = rename(name)
        if new is not None and not isinstance(new, str):
            raise ConfigurationError(f"rename({name!r:.80}) ({new!r:.80}) must be a str, or None to leave it out.")
        return new
    prefix = max((prefix for prefix in rename if name.startswith(prefix)), key=len, default=None)
    return name if prefix is None else rename[prefix] + name.removeprefix(prefix)
