"""Encodes Python values as JSON with type tags; ``decode`` is the inverse. See ``docs/format.md``, "Typed JSON".

A value that JSON supports is written as it is; any other as an object with the key ``"$"``, its tag. Codecs for a
program's own types are registered here.
"""

from __future__ import annotations

import argparse
import base64
import builtins
import collections
import datetime
import decimal
import enum
import math
import pathlib
import types
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shard.checkpoint.format.header import DTYPE_NAMES
from lightning_shard.checkpoint.tensors import check_storable, is_dtensor
from lightning_shard.errors import UnsupportedStateError

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


MAX_DEPTH = 200
_NUMPY_KINDS = "biufcSUMm"


def encode(
    value: Any, check: Callable[[str, torch.Tensor], None] = check_storable
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Encode a tree.

    Args:
        value: The tree.
        check: Called with each tensor's key path and the tensor; raises if the tensor can't be stored.

    Returns:
        The tree as JSON values, and its tensors by the names that the JSON refers to them by.

    Raises:
        UnsupportedStateError: The format can't hold a value; the error gives its key path and a remedy.
    """
    encoder = _Encoder(check)
    return encoder.value(value, ()), encoder.tensors


@dataclass
class _Encoder:
    check: Callable[[str, torch.Tensor], None]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    """By id; the value keeps the tensor alive, since the id of a freed one (such as a codec's result) is reused."""
    _open: set[int] = field(default_factory=set)

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value in INT64 else {TAG: "int", "v": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "v": str(value)}
        if len(path) > MAX_DEPTH:
            raise UnsupportedStateError(f"{_shown(path[:4])}… is nested more than {MAX_DEPTH} deep.")
        if id(value) in self._open:
            raise UnsupportedStateError(f"{_shown(path)} contains itself: break the cycle before saving.")
        self._open.add(id(value))
        try:
            return self._tagged(value, kind, path)
        finally:
            self._open.discard(id(value))

    def _tagged(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        codec = by_type.get(kind)
        if codec is not None and codec.encode is not None:
            return {TAG: "custom", "type": codec.name, "v": self.value(codec.encode(value), path)}
        if isinstance(value, enum.Enum):
            label = codec.name if codec else f"{kind.__module__}.{kind.__qualname__}"
            return {TAG: "enum", "type": label, "name": value.name, "v": self.value(value.value, path)}
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            return self._mapping(value, path, "dict")
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "v": self._tensor(value, path)}
        if kind is Reference:
            return {TAG: "stored", "v": value.name}
        scalar = _SCALARS.get(kind)
        if scalar is not None:
            tag, to_json = scalar
            return {TAG: tag, "v": to_json(value)}
        container = _CONTAINERS.get(kind)
        if container is not None:
            return {TAG: container, "v": self._items(_ordered(value), path)}
        if kind is collections.OrderedDict:
            return self._mapping(value, path, "ordered_dict")
        if kind is collections.Counter:
            return self._mapping(value, path, "counter")
        if kind is collections.defaultdict:
            return self._defaultdict(value, path)
        if kind is collections.deque:
            return {TAG: "deque", "maxlen": value.maxlen, "v": self._items(value, path)}
        if kind in (argparse.Namespace, types.SimpleNamespace, types.MappingProxyType):
            tag = "namespace" if kind is argparse.Namespace else "simple_namespace"
            if kind is types.MappingProxyType:
                return self._mapping(dict(value), path, "dict")
            return {TAG: tag, "v": self._mapping(vars(value), path, "dict")}
        if isinstance(value, pathlib.PurePath):
            return {TAG: "path" if isinstance(value, pathlib.Path) else "pure_path", "v": str(value)}
        return self._foreign(value, kind, path)

    def _foreign(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        """Encode types of optional packages, recognized by name; a value of one implies its package is installed."""
        module = kind.__module__.partition(".")[0]
        if module == "numpy":
            return self._numpy(value, path)
        if module == "omegaconf" and kind.__name__ in ("DictConfig", "ListConfig"):
            return self.value(_plain_config(value, path), path)
        if kind.__name__ == "AttributeDict" and isinstance(value, dict) and "lightning" in module:
            return self._mapping(dict(value), path, "dict")
        raise UnsupportedStateError(
            f"{_shown(path)} is a {kind.__module__}.{kind.__qualname__}, which the checkpoint can't hold (nothing is"
            f" pickled): store plain values instead, or call checkpoint.register_codec({kind.__qualname__}, encode,"
            " decode) in the programs that save and load."
        )

    def _items(self, values: Iterable[Any], path: tuple[str, ...]) -> list[Any]:
        return [self.value(item, (*path, f"[{index}]")) for index, item in enumerate(values)]

    def _mapping(self, value: dict[Any, Any], path: tuple[str, ...], tag: str) -> Any:
        if tag == "dict" and TAG not in value and all(type(key) is str for key in value):
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        pairs = [
            [self.value(key, (*path, f"key {key!r:.40}")), self.value(item, (*path, str(key)))]
            for key, item in value.items()
        ]
        return {TAG: tag, "v": pairs}

    def _defaultdict(self, value: collections.defaultdict[Any, Any], path: tuple[str, ...]) -> Any:
        factory = value.default_factory
        name = next((name for name, known in FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise UnsupportedStateError(
                f"{_shown(path)} is a defaultdict of {factory!r}, a function, which the checkpoint can't hold: use one"
                f" of {', '.join(FACTORIES)}, or a plain dict."
            )
        return {**self._mapping(value, path, "defaultdict"), "factory": name}

    def _tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        known = self._names.get(id(tensor))
        if known is not None:
            return known[1]
        if is_dtensor(tensor):
            raise UnsupportedStateError(
                f"{_shown(path)} is a DTensor: pass sharded tensors in state= or optimizer=, where each rank writes its"
                " part (a Trainer's callbacks: in dicts, lists or tuples)."
            )
        self.check(_shown(path).strip("'"), tensor)
        name = base = ".".join(part.strip("[]") for part in path) or "tensor"
        number = 1
        while name in self.tensors:
            number += 1
            name = f"{base}#{number}"
        self.tensors[name] = tensor.detach()
        self._names[id(tensor)] = (tensor, name)
        return name

    def _numpy(self, value: Any, path: tuple[str, ...]) -> Any:
        import numpy as np

        array = np.asarray(value) if isinstance(value, (np.ndarray, np.generic)) else None
        if array is None or array.dtype.kind not in _NUMPY_KINDS or type(value) not in (np.ndarray, array.dtype.type):
            what = type(value).__qualname__ if array is None else f"{type(value).__qualname__} of {array.dtype}"
            raise UnsupportedStateError(
                f"{_shown(path)} is a numpy {what}, which the checkpoint can't hold: convert it to an array of numbers,"
                " or to lists, or register a codec (checkpoint.register_codec)."
            )
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        encoded = {"dtype": little.dtype.str, "v": _base64(little.tobytes())}
        if isinstance(value, np.ndarray):
            return {TAG: "ndarray", "shape": list(array.shape), **encoded}
        return {TAG: "numpy", **encoded}


def _plain_config(value: Any, path: tuple[str, ...]) -> Any:
    """An omegaconf config as dicts and lists: interpolations resolved, missing values as ``"???"``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedStateError(
            f"{_shown(path)} is a config that can't be resolved ({reason}): give it the missing value, or save"
            " OmegaConf.to_container(config) instead."
        ) from error


def _ordered(value: Any) -> Any:
    if not isinstance(value, set | frozenset):
        return value
    # sets are unordered; this order is the same in every save
    return sorted(value, key=lambda item: (type(item).__name__, repr(item)))


def _shown(path: tuple[str, ...]) -> str:
    text = ""
    for part in path:
        text += part if part.startswith("[") else f".{part}" if text else part
    return repr(text) if text else "the state"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    complex: ("complex", lambda v: [repr(v.real), repr(v.imag)]),
    datetime.datetime: ("datetime", lambda v: v.isoformat()),
    datetime.date: ("date", lambda v: v.isoformat()),
    datetime.time: ("time", lambda v: v.isoformat()),
    datetime.timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    datetime.timezone: ("timezone", lambda v: [v.utcoffset(None).total_seconds(), v.tzname(None)]),
    decimal.Decimal: ("decimal", str),
    uuid.UUID: ("uuid", str),
    range: ("range", lambda v: [v.start, v.stop, v.step]),
    torch.dtype: ("torch.dtype", lambda v: DTYPE_NAMES.get(v) or str(v).removeprefix("torch.")),
    torch.device: ("torch.device", str),
    torch.Size: ("torch.Size", list),
}
