"""Python values to JSON with typed tags, and back. See ``docs/format.md``, "Typed JSON".

A value that JSON has is itself; any other is an object with the key ``"$"``, its tag. Decoding builds values of
the types listed here and of types that the reading program registered, and nothing else: no name in a file is ever
imported, looked up in a module, or called.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import decimal
import enum
import json
import math
import pathlib
import types
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shard.checkpoint.format.header import DTYPE_NAMES, DTYPES
from lightning_shard.checkpoint.storable import check_storable
from lightning_shard.checkpoint.tensors import is_dtensor
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError

TAG = "$"
MAX_DEPTH = 200
_INT64 = range(-(2**63), 2**63)
_FACTORIES: dict[str, Any] = {"list": list, "dict": dict, "set": set, "int": int, "float": float, "str": str}
_NUMPY_KINDS = "biufcSUMm"


@dataclass(frozen=True)
class _Codec:
    type: type
    name: str
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None


@dataclass(frozen=True)
class Reference:
    """Stands for a sharded tensor in a tree: its name in the ``optimizer`` section, where each rank saves its part."""

    name: str


_by_type: dict[type, _Codec] = {}
_by_name: dict[str, _Codec] = {}


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
    known = _by_name.get(label)
    if known is not None and known.type is not type:
        raise ValueError(f"register_codec: the name {label!r} is taken by {known.type!r}; pass another name=.")
    codec = _Codec(type, label, encode, decode)
    old = _by_type.get(type)
    if old is not None:
        _by_name.pop(old.name, None)
    _by_type[type] = codec
    _by_name[label] = codec


# -- encoding ---------------------------------------------------------------------------------------------------------


def encode(
    value: Any, check: Callable[[str, torch.Tensor], None] = check_storable
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tree as JSON values, and the tensors in it by the names that the JSON refers to them by.

    Args:
        check: Refuses a tensor, given the path to it, that can't be stored.

    Raises:
        UnsupportedStateError: A value that the format can't hold; names its key path and the way out.
    """
    encoder = _Encoder(check)
    return encoder.value(value, ()), encoder.tensors


@dataclass
class _Encoder:
    check: Callable[[str, torch.Tensor], None]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _names: dict[int, tuple[torch.Tensor, str]] = field(default_factory=dict)
    """By id, and with the tensor itself: a freed one's id, as of what a codec made, is given to another."""
    _open: set[int] = field(default_factory=set)

    def value(self, value: Any, path: tuple[str, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if value in _INT64 else {TAG: "int", "v": hex(value)}
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
        codec = _by_type.get(kind)
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
        """Types of packages that may not be installed, told by their names; the value's existence means they are."""
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
        name = next((name for name, known in _FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise UnsupportedStateError(
                f"{_shown(path)} is a defaultdict of {factory!r}, a function, which the checkpoint can't hold: use one"
                f" of {', '.join(_FACTORIES)}, or a plain dict."
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
    # a set has no order of its own; this one doesn't change from save to save
    return sorted(value, key=lambda item: (type(item).__name__, repr(item)))


def _shown(path: tuple[str, ...]) -> str:
    text = ""
    for part in path:
        text += part if part.startswith("[") else f".{part}" if text else part
    return repr(text) if text else "the state"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _timezone(zone: datetime.timezone) -> list[Any]:
    return [zone.utcoffset(None).total_seconds(), zone.tzname(None)]


_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_SCALARS: dict[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", _base64),
    bytearray: ("bytearray", _base64),
    complex: ("complex", lambda v: [repr(v.real), repr(v.imag)]),
    datetime.datetime: ("datetime", lambda v: v.isoformat()),
    datetime.date: ("date", lambda v: v.isoformat()),
    datetime.time: ("time", lambda v: v.isoformat()),
    datetime.timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    datetime.timezone: ("timezone", _timezone),
    decimal.Decimal: ("decimal", str),
    uuid.UUID: ("uuid", str),
    range: ("range", lambda v: [v.start, v.stop, v.step]),
    torch.dtype: ("torch.dtype", lambda v: DTYPE_NAMES.get(v) or str(v).removeprefix("torch.")),
    torch.device: ("torch.device", str),
    torch.Size: ("torch.Size", list),
}


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(
    tree: Any,
    tensor: Callable[[str], torch.Tensor],
    stored: Callable[[str], Any] = Reference,
    *,
    lenient: bool = False,
) -> Any:
    """The value that was encoded.

    Args:
        tensor: Gives the tensor of a name.
        stored: Gives what stands for a :class:`Reference` to a name.
        lenient: Give the encoded form of types that aren't registered here, where otherwise it is an error.

    Raises:
        CheckpointError: A type that was registered by the program that saved, and isn't here.
        CorruptCheckpointError: Not what :func:`encode` gives.
    """
    try:
        return _Decoder(tensor, stored, lenient).value(tree)
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, ArithmeticError, RecursionError) as error:
        raise CorruptCheckpointError(f"The trainer state is damaged: {type(error).__name__} {error}.") from error


@dataclass
class _Decoder:
    tensor: Callable[[str], torch.Tensor]
    stored: Callable[[str], Any]
    lenient: bool

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if TAG not in tree:
            return {key: self.value(item) for key, item in tree.items()}
        tag, raw = tree[TAG], tree["v"]
        if tag in _FROM_JSON:
            return _FROM_JSON[tag](raw)
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag](self.value(raw))
        if tag in ("dict", "ordered_dict", "counter", "defaultdict"):
            return self._mapping(tag, tree, [(self.value(key), self.value(item)) for key, item in raw])
        if tag == "deque":
            return collections.deque(self.value(raw), tree["maxlen"])
        if tag == "tensor":
            return self.tensor(raw)
        if tag == "stored":
            return self.stored(raw)
        if tag in ("namespace", "simple_namespace"):
            space = argparse.Namespace() if tag == "namespace" else types.SimpleNamespace()
            vars(space).update(self.value(raw))
            return space
        if tag == "enum":
            return self._enum(tree)
        if tag == "custom":
            return self._custom(tree)
        if tag in ("ndarray", "numpy"):
            return _numpy_from_json(tag, tree)
        raise ValueError(f"unknown tag {tag!r}")

    def _mapping(self, tag: str, tree: dict[str, Any], pairs: list[tuple[Any, Any]]) -> Any:
        if tag == "dict":
            return dict(pairs)
        if tag == "ordered_dict":
            return collections.OrderedDict(pairs)
        if tag == "counter":
            return collections.Counter(dict(pairs))
        factory = tree.get("factory")
        return collections.defaultdict(None if factory is None else _FACTORIES[factory], pairs)

    def _enum(self, tree: dict[str, Any]) -> Any:
        codec = _by_name.get(tree["type"])
        if codec is not None and issubclass(codec.type, enum.Enum):
            members: Any = codec.type.__members__
            return members[tree["name"]]
        return self.value(tree["v"])

    def _custom(self, tree: dict[str, Any]) -> Any:
        codec = _by_name.get(tree["type"])
        if codec is None or codec.decode is None:
            if self.lenient:
                return {"type": tree["type"], "value": self.value(tree["v"])}
            raise CheckpointError(
                f"The checkpoint holds a value of type {tree['type']!r}, for which this program has no codec: call"
                " checkpoint.register_codec for it, as the program that saved it did, before loading."
            )
        return codec.decode(self.value(tree["v"]))


def _numpy_from_json(tag: str, tree: dict[str, Any]) -> Any:
    import numpy as np

    dtype = np.dtype(str(tree["dtype"]))
    if dtype.kind not in _NUMPY_KINDS or dtype.hasobject:
        raise ValueError(f"numpy dtype {tree['dtype']!r}")
    shape = [int(size) for size in tree["shape"]] if tag == "ndarray" else []
    data = base64.b64decode(tree["v"], validate=True)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} of {dtype}")
    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if dtype.itemsize else np.zeros(shape, dtype)
    array = array.astype(dtype.newbyteorder("="), copy=False)
    return array if tag == "ndarray" else array[()]


def _dtype_from_json(name: str) -> torch.dtype:
    if name in DTYPES:
        return DTYPES[name]
    value = getattr(torch, name, None) if name.isidentifier() else None
    if not isinstance(value, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return value


def _timezone_from_json(raw: list[Any]) -> datetime.timezone:
    offset = datetime.timedelta(seconds=raw[0])
    zone = datetime.timezone(offset)
    return zone if zone.tzname(None) == raw[1] else datetime.timezone(offset, raw[1])


_FROM_JSON: dict[str, Callable[[Any], Any]] = {
    "int": lambda raw: int(raw, 16),  # not decimal, of which Python bounds the digits
    "float": float,
    "bytes": lambda raw: base64.b64decode(raw, validate=True),
    "bytearray": lambda raw: bytearray(base64.b64decode(raw, validate=True)),
    "complex": lambda raw: complex(float(raw[0]), float(raw[1])),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda raw: datetime.timedelta(*raw),
    "timezone": _timezone_from_json,
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "range": lambda raw: range(*raw),
    "path": pathlib.Path,
    "pure_path": pathlib.PurePath,
    "torch.dtype": _dtype_from_json,
    "torch.device": torch.device,
    "torch.Size": torch.Size,
}
_FROM_ITEMS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def parse(data: bytes, source: str) -> Any:
    """The JSON of a state file.

    Raises:
        CorruptCheckpointError: It isn't JSON.
    """
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{source} is not valid JSON: {error}.") from error
