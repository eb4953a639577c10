"""Other names for tensors on their way out of a checkpoint, or into a state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from lightning_shard.errors import StateMismatchError

Rename = Mapping[str, str] | Callable[[str], str | None]
"""Beginnings of names to what takes their place (the longest that fits; ``""`` fits all), or a function of the name
that gives the new one, or None to leave the tensor out."""


def new_names(names: Iterable[str], strip_prefix: str | None = None, rename: Rename | None = None) -> dict[str, str]:
    """The new name of each tensor to its own: first the prefix is taken off names that have it, then ``rename``.

    Raises:
        StateMismatchError: No name has the prefix, or two tensors would have one name.
    """
    old = list(names)
    if strip_prefix and old and not any(name.startswith(strip_prefix) for name in old):
        raise StateMismatchError(
            f"strip_prefix ({strip_prefix!r}) begins no tensor's name; they are named as {old[0]!r} is: leave it out,"
            " or give the one they have."
        )
    found: dict[str, str] = {}
    for name in old:
        new = _renamed(name.removeprefix(strip_prefix or ""), rename)
        if new is None:
            continue
        if new in found:
            raise StateMismatchError(
                f"{found[new]!r} and {name!r} would both be named {new!r}: change strip_prefix or rename."
            )
        found[new] = name
    return found


def prefix_of(stored: Collection[str], names: set[str]) -> str:
    """What the names that a module has for stored tensors begin with, if these have one beginning more.

    So it is with a transformers model's file, where a LightningModule holds the model as ``self.model``.
    """
    if not names.isdisjoint(stored) or not stored:
        return ""
    first = next(iter(stored))
    for name in sorted(names):
        prefix = name.removesuffix(first)
        if prefix != name and prefix.endswith(".") and all(prefix + key in names for key in stored):
            return prefix
    return ""


def _renamed(name: str, rename: Rename | None) -> str | None:
    if rename is None:
        return name
    if callable(rename):
        return rename(name)
    prefix = max((prefix for prefix in rename if name.startswith(prefix)), key=len, default=None)
    return name if prefix is None else rename[prefix] + name.removeprefix(prefix)
