"""What typed JSON knows beside Python's and torch's own types: those that a program registered. See ``docs/format.md``.

And what both ways of it share: see ``encode`` and ``decode``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TAG = "$"
INT64 = range(-(2**63), 2**63)
FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
"""Of defaultdicts."""


@dataclass(frozen=True)
class Codec:
    type: type
    name: str
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Reference:
    """Stands for a sharded tensor in a tree: its name in the ``optimizer`` section, where each rank saves its part."""

    name: str


by_type: dict[type, Codec] = {}
by_name: dict[str, Codec] = {}


def register_codec(
    type: type,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Teach the format a type; call it in every program that saves or loads values of it.

    Args:
        type: The exact class; subclasses need their own codec.
        encode: From a value to one that the format holds already (dicts, lists, tensors, …).
        decode: The way back. Both may be left out for an Enum class.
        name: What the file calls the type; by default its module and name. Keep it when you rename the class.

    Raises:
        ValueError: Another type has this name, or a function is missing.
    """
    label = name or f"{type.__module__}.{type.__qualname__}"
    if (encode is None or decode is None) and not issubclass(type, enum.Enum):
        raise ValueError(f"register_codec({label}): encode and decode are needed, except for an Enum class.")
    known = by_name.get(label)
    if known is not None and known.type is not type:
        raise ValueError(f"register_codec: the name {label!r} is taken by {known.type!r}; pass another name=.")
    codec = Codec(type, label, encode, decode)
    old = by_type.get(type)
    if old is not None:
        by_name.pop(old.name, None)
    by_type[type] = codec
    by_name[label] = codec
