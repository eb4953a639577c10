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
import math
import pathlib
import re
import types
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shard.checkpoint.format.header import DTYPE_NAMES, DTYPES
from lightning_shard.checkpoint.format.strict_json import integer, loads, text
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
    except RecursionError as error:
        raise CorruptCheckpointError("The trainer state is damaged: it is nested too deep.") from error
    except Exception as error:  # of whatever Python's types say to values that they can't be made of
        raise CorruptCheckpointError(f"The trainer state is damaged: {type(error).__name__} {error}.") from error


@dataclass
class _Decoder:
    tensor: Callable[[str], torch.Tensor]
    stored: Callable[[str], Any]
    lenient: bool

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return self._values(tree)
        if not isinstance(tree, dict):
            if type(tree) is int and tree not in _INT64:
                raise ValueError("an integer of more than 64 bits, without its tag")
            return tree
        if TAG not in tree:
            return {key: self.value(item) for key, item in tree.items()}
        tag, raw = text(tree[TAG], "a tag"), tree["v"]
        if tag in _FROM_TEXT:
            return _FROM_TEXT[tag](text(raw, f"the value of a {tag}"))
        if tag in _FROM_LIST:
            return _FROM_LIST[tag](*_list(raw, tag))
        if tag in _FROM_ITEMS:
            return _FROM_ITEMS[tag](self._values(_list(raw, tag)))
        if tag in _MAPPINGS:
            pairs = [_list(pair, tag) for pair in _list(raw, tag)]
            return self._mapping(tag, tree, [(self.value(key), self.value(item)) for key, item in pairs])
        if tag == "deque":
            limit = tree["maxlen"]
            return collections.deque(self._values(_list(raw, tag)), None if limit is None else integer(limit, "maxlen"))
        if tag == "tensor":
            return self.tensor(text(raw, "a tensor's name"))
        if tag == "stored":
            return self.stored(text(raw, "a tensor's name"))
        if tag in ("namespace", "simple_namespace"):
            space = argparse.Namespace() if tag == "namespace" else types.SimpleNamespace()
            vars(space).update({text(key, "an attribute"): item for key, item in dict(self.value(raw)).items()})
            return space
        if tag == "enum":
            return self._enum(tree)
        if tag == "custom":
            return self._custom(tree)
        if tag in ("ndarray", "numpy"):
            return _numpy_from_json(tag, tree)
        raise ValueError(f"unknown tag {tag!r:.40}")

    def _values(self, trees: list[Any]) -> list[Any]:
        return [self.value(item) for item in trees]

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
        codec = _by_name.get(text(tree["type"], "an enum's type"))
        if codec is not None and issubclass(codec.type, enum.Enum):
            members: Any = codec.type.__members__
            return members[tree["name"]]
        return self.value(tree["v"])

    def _custom(self, tree: dict[str, Any]) -> Any:
        name = text(tree["type"], "a type's name")
        codec = _by_name.get(name)
        value = self.value(tree["v"])
        if codec is not None and codec.decode is not None:
            return codec.decode(value)
        if self.lenient:
            return {"type": name, "value": value}
        raise CheckpointError(
            f"The checkpoint holds a value of type {name!r}, for which this program has no codec: call"
            " checkpoint.register_codec for it, as the program that saved it did, before loading."
        )


def _list(raw: Any, tag: str) -> list[Any]:
    if not isinstance(raw, list):  # of a text or another tagged value Python would take the items
        raise ValueError(f"the value of a {tag} is no array")
    return raw


def _numpy_from_json(tag: str, tree: dict[str, Any]) -> Any:
    import numpy as np

    described = text(tree["dtype"], "a numpy dtype")
    if not _NUMPY_DTYPE.fullmatch(described):
        raise ValueError(f"unknown numpy dtype {described!r:.40}")
    dtype = np.dtype(described)
    shape = [integer(size, "a size") for size in _list(tree["shape"], "shape")] if tag == "ndarray" else []
    data = base64.b64decode(text(tree["v"], "base64"), validate=True)
    count = math.prod(shape)
    if not dtype.itemsize and count:
        raise ValueError(f"an array of shape {shape} of elements without bytes")
    if len(data) != count * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} of {dtype}")
    array = np.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if dtype.itemsize else np.zeros(shape, dtype)
    array = array.astype(dtype.newbyteorder("="), copy=False)
    return array if tag == "ndarray" else array[()]


def _dtype_from_json(name: str) -> torch.dtype:
    if name not in _TORCH_DTYPES:
        raise ValueError(f"unknown dtype {name!r:.40}")
    return _TORCH_DTYPES[name]


def _device_from_json(name: str) -> torch.device:
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"unknown device {name!r:.40}")
    return torch.device(name)


def _complex_from_json(real: Any, imag: Any) -> complex:
    parts = [text(part, "a part of a complex number") for part in (real, imag)]
    if not all(_DECIMAL.fullmatch(part) for part in parts):
        raise ValueError(f"{parts!r:.60} is no complex number")
    return complex(*map(float, parts))


def _float_from_json(name: str) -> float:
    if name not in ("inf", "-inf", "nan"):
        raise ValueError(f"{name!r:.40} is not inf, -inf or nan")
    return float(name)


def _int_from_json(digits: str) -> int:
    if not _HEX.fullmatch(digits):
        raise ValueError(f"{digits!r:.40} is no hexadecimal integer")
    return int(digits, 16)  # not decimal, of which Python bounds the digits


def _timezone_from_json(offset_s: Any, name: Any) -> datetime.timezone:
    offset = datetime.timedelta(seconds=offset_s)
    zone = datetime.timezone(offset)
    return zone if zone.tzname(None) == name else datetime.timezone(offset, text(name, "a time zone's name"))


def _integers(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*raw: Any) -> Any:
        if any(type(value) is not int for value in raw):
            raise ValueError("an item is no integer")
        return make(*raw)

    return made


_MAPPINGS = ("dict", "ordered_dict", "counter", "defaultdict")
_HEX = re.compile(r"-?0x[0-9a-f]+")
_DECIMAL = re.compile(r"-?(inf|nan|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)")
_DEVICE = re.compile(r"[a-z]+(:[0-9]{1,3})?")
_NUMPY_DTYPE = re.compile(
    r"\|b1|[<|][iu][1248]|<f(2|4|8|12|16)|<c(8|16|24|32)|[<|]S[0-9]{1,9}|<U[0-9]{1,9}|<[mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?"
)
_TORCH_DTYPES = {
    **{str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **DTYPES,
}
# By tag, what a string means, and what an array does of which each item is an argument, or of which all are the items.
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    "int": _int_from_json,
    "float": _float_from_json,
    "bytes": lambda raw: base64.b64decode(raw, validate=True),
    "bytearray": lambda raw: bytearray(base64.b64decode(raw, validate=True)),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "decimal": decimal.Decimal,
    "uuid": uuid.UUID,
    "path": pathlib.Path,
    "pure_path": pathlib.PurePath,
    "torch.dtype": _dtype_from_json,
    "torch.device": _device_from_json,
}
_FROM_LIST: dict[str, Callable[..., Any]] = {
    "complex": _complex_from_json,
    "timedelta": _integers(datetime.timedelta),
    "timezone": _timezone_from_json,
    "range": _integers(range),
    "torch.Size": lambda *sizes: torch.Size(integer(size, "a size", -(2**63), 2**63 - 1) for size in sizes),
}
_FROM_ITEMS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def parse(data: bytes, source: str) -> Any:
    """The JSON of a state file.

    Raises:
        CorruptCheckpointError: It isn't JSON.
    """
    try:
        return loads(data, surrogates=True)
    except ValueError as error:
        raise CorruptCheckpointError(f"{source} is not valid JSON: {error}.") from error
