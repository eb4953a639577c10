"""Registry of codecs for a program's own types in typed JSON, and definitions shared by ``encode`` and ``decode``.

``docs/format.md`` specifies typed JSON.
"""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

TAG = "$"
INT64 = range(-(2**63), 2**63)
FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
"""The factories of defaultdicts that the format supports, by name."""


@dataclass(frozen=True)
class Codec:
    type: type
    name: str
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Reference:
    """Placeholder for a sharded tensor in a tree: its name in the ``optimizer`` section, to which each rank saves its
    part."""

    name: str


def enum_of_program(label: str) -> type[enum.Enum] | None:
    """The Enum class of this name that the running program has; None if there is none, or several.

    Searched among all Enum classes that exist, so that nothing is imported or called for a name in a file.
    """
    found, waiting = set[type[enum.Enum]](), [enum.Enum]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if f"{kind.__module__}.{kind.__qualname__}" == label:
            found.add(kind)
    return found.pop() if len(found) == 1 else None


by_type: dict[type, Codec] = {}
by_name: dict[str, Codec] = {}


def register_codec(
    type: type,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Register a type that checkpoints may contain. Call it in every program that saves or loads values of the type.

    Args:
        type: The exact class; subclasses need their own codec.
        encode: Converts a value to one that the format supports (dicts, lists, tensors, …).
        decode: The inverse. Both functions may be omitted for an Enum class.
        name: The type's name in the file; by default its module and qualified name. Keep it when you rename the class.

    Raises:
        ValueError: ``type`` is no class, another type is registered under this name, or a function is missing.
    """
    if not isinstance(type, builtins.type):
        raise ValueError(f"register_codec({type!r:.80}): its first argument must be a class.")
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
