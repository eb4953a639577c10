"""Typed JSON: Python values as JSON with type tags, and back. See ``docs/format.md``, "Typed JSON".

A value that JSON supports is written as it is; any other as an object with the key ``"$"``, its tag. Codecs for a
program's own types are registered here.

Decoding builds only values of the types listed here, and of types that the reading program registered, and members of
its Enum classes. No name in a file is ever imported, looked up in a module, or called.
"""

from __future__ import annotations

import argparse
import base64
import builtins
import collections
import datetime
import decimal
import enum
import functools
import math
import operator
import pathlib
import re
import types
import uuid
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shard.checkpoint.format.header import DTYPE_NAMES, DTYPES, integer, loads, text
from lightning_shard.checkpoint.tensors import check_storable, is_dtensor
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError

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
        if kind in _PAIRS:
            return self._mapping(value, path, _PAIRS[kind])
        if isinstance(value, torch.Tensor):
            return {TAG: "tensor", "v": self._tensor(value, path)}
        if kind is Reference:
            return {TAG: "stored", "v": value.name}
        if kind in _TEXTS or kind in _LISTS:
            tag, to_json, _ = _TEXTS[kind] if kind in _TEXTS else _LISTS[kind]
            return {TAG: tag, "v": to_json(value)}
        if kind in _ITEMS:
            return {TAG: _ITEMS[kind], "v": self._items(_ordered(value), path)}
        if kind is collections.defaultdict:
            return self._defaultdict(value, path)
        if kind is collections.deque:
            return {TAG: "deque", "maxlen": value.maxlen, "v": self._items(value, path)}
        if kind is types.MappingProxyType:
            return self._mapping(dict(value), path, "dict")
        if kind in _NAMESPACES:
            return {TAG: _NAMESPACES[kind], "v": self._mapping(vars(value), path, "dict")}
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


def decode(
    tree: Any,
    tensor: Callable[[str], torch.Tensor],
    stored: Callable[[str], Any] = Reference,
    *,
    lenient: bool = False,
    plain_enums: bool = False,
) -> Any:
    """Decode a tree of JSON values.

    Args:
        tree: JSON values from :func:`encode`.
        tensor: Returns the tensor of a name.
        stored: Returns the value for a :class:`Reference` to a name.
        lenient: Return the encoded form of types that aren't registered here, instead of raising.
        plain_enums: Return values in place of members of Enum classes that aren't registered here.

    Raises:
        CheckpointError: The saving program registered a type that this program hasn't.
        CorruptCheckpointError: The tree isn't one that :func:`encode` makes.
    """
    try:
        return _Decoder(tensor, stored, lenient, plain_enums or lenient).value(tree)
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CorruptCheckpointError("The trainer state is damaged: it is nested too deep.") from error
    except Exception as error:  # whatever a type's constructor raises for an invalid value
        raise CorruptCheckpointError(f"The trainer state is damaged: {type(error).__name__} {error}.") from error


@dataclass
class _Decoder:
    tensor: Callable[[str], torch.Tensor]
    stored: Callable[[str], Any]
    lenient: bool
    plain_enums: bool
    _told: set[str] = field(default_factory=set)
    """Enum classes that this program lacks, of which it was told."""

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return self._values(tree)
        if not isinstance(tree, dict):
            if type(tree) is int and tree not in INT64:
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
        if tag in _FROM_PAIRS or tag == "defaultdict":
            pairs = [_list(pair, tag) for pair in _list(raw, tag)]
            values = {self.value(key): self.value(item) for key, item in pairs}
            if tag != "defaultdict":
                return _FROM_PAIRS[tag](values)
            factory = tree.get("factory")
            return collections.defaultdict(None if factory is None else FACTORIES[factory], values)
        if tag == "deque":
            limit = tree["maxlen"]
            return collections.deque(self._values(_list(raw, tag)), None if limit is None else integer(limit, "maxlen"))
        if tag == "tensor":
            return self.tensor(text(raw, "a tensor's name"))
        if tag == "stored":
            return self.stored(text(raw, "a tensor's name"))
        if tag in _FROM_NAMESPACES:
            space = _FROM_NAMESPACES[tag]()
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

    def _enum(self, tree: dict[str, Any]) -> Any:
        label, name = text(tree["type"], "an enum's type"), tree["name"]
        codec, value = by_name.get(label), self.value(tree["v"])
        if codec is None or not issubclass(codec.type, enum.Enum):
            return self._member_of_program(label, name, value)
        if name in codec.type.__members__:
            return codec.type.__members__[name]
        try:
            return codec.type(value)  # flags combine to members of no name
        except ValueError as error:
            if self.lenient:
                return value
            raise CheckpointError(
                f"The checkpoint holds the member {name!r} ({value!r:.40}) of {label!r}, which this program's class"
                " hasn't: give it that member back, or load with the program that saved."
            ) from error

    def _member_of_program(self, label: str, name: Any, value: Any) -> Any:
        """The member of a class that isn't registered; its value, if this program hasn't the class or the member."""
        kind = None if self.plain_enums else enum_of_program(label)
        # of combined flags the names; no constructor is called, since a class may have code for unknown values
        parts = name.split("|") if isinstance(name, str) else []
        if kind is not None and parts and all(part in kind.__members__ for part in parts):
            return functools.reduce(operator.or_, (kind.__members__[part] for part in parts))
        if not self.lenient and label not in self._told:
            self._told.add(label)
            warnings.warn(
                f"{value!r:.60} is given in place of the member {name!r:.40} of the Enum {label!r:.80}"
                + (
                    ", since a file that is read without pickle can't hold it."
                    if self.plain_enums
                    else ", which this program hasn't: import it before, or register it by checkpoint.register_codec."
                ),
                stacklevel=2,
            )
        return value

    def _custom(self, tree: dict[str, Any]) -> Any:
        name = text(tree["type"], "a type's name")
        codec = by_name.get(name)
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
    if not isinstance(raw, list):  # Python would iterate over a string or a dict, too
        raise ValueError(f"the value of a {tag} is no array")
    return raw


def _numpy_from_json(tag: str, tree: dict[str, Any]) -> Any:
    import numpy as np

    described = text(tree["dtype"], "a numpy dtype")
    if not _NUMPY_DTYPE.fullmatch(described):
        raise ValueError(f"unknown numpy dtype {described!r:.40}")
    dtype = np.dtype(described)
    shape = [integer(size, "a size") for size in _list(tree["shape"], "shape")] if tag == "ndarray" else []
    data = _bytes(text(tree["v"], "base64"))
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


def _matching(pattern: str, what: str, make: Callable[[str], Any]) -> Callable[[str], Any]:
    """``make``, of texts that match a pattern."""

    def made(raw: str) -> Any:
        if not re.fullmatch(pattern, raw):
            raise ValueError(f"{raw!r:.40} is no {what}")
        return make(raw)

    return made


def _complex_from_json(real: Any, imag: Any) -> complex:
    parts = [text(part, "a part of a complex number") for part in (real, imag)]
    if not all(_DECIMAL.fullmatch(part) for part in parts):
        raise ValueError(f"{parts!r:.60} is no complex number")
    return complex(*map(float, parts))


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


def parse(data: bytes, source: str) -> Any:
    """Parse the JSON of a trainer state's file."""
    try:
        return loads(data, surrogates=True)
    except ValueError as error:
        raise CorruptCheckpointError(f"{source} is not valid JSON: {error}.") from error


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(data: str) -> bytes:
    return base64.b64decode(data, validate=True)


_DECIMAL = re.compile(r"-?(inf|nan|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)")
_NUMPY_DTYPE = re.compile(
    r"\|b1|[<|][iu][1248]|<f(2|4|8|12|16)|<c(8|16|24|32)|[<|]S[0-9]{1,9}|<U[0-9]{1,9}|<[mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?"
)
_TORCH_DTYPES = {
    **{str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **DTYPES,
}
Forms = dict[type, tuple[str, Callable[[Any], Any], Callable[..., Any]]]
"""By type: the tag, a function from a value to its JSON, and the one back."""
_TEXTS: Forms = {
    bytes: ("bytes", _base64, _bytes),
    bytearray: ("bytearray", _base64, lambda raw: bytearray(_bytes(raw))),
    datetime.datetime: ("datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("time", datetime.time.isoformat, datetime.time.fromisoformat),
    decimal.Decimal: ("decimal", str, decimal.Decimal),
    uuid.UUID: ("uuid", str, uuid.UUID),
    torch.dtype: ("torch.dtype", lambda v: DTYPE_NAMES.get(v) or str(v).removeprefix("torch."), _dtype_from_json),
    torch.device: ("torch.device", str, _matching(r"[a-z]+(:[0-9]{1,3})?", "device", torch.device)),
}
"""Types that are written as a string."""
_LISTS: Forms = {
    complex: ("complex", lambda v: [repr(v.real), repr(v.imag)], _complex_from_json),
    datetime.timedelta: (
        "timedelta",
        lambda v: [v.days, v.seconds, v.microseconds],
        _integers(datetime.timedelta),
    ),
    datetime.timezone: (
        "timezone",
        lambda v: [v.utcoffset(None).total_seconds(), v.tzname(None)],
        _timezone_from_json,
    ),
    range: ("range", lambda v: [v.start, v.stop, v.step], _integers(range)),
    torch.Size: (
        "torch.Size",
        list,
        lambda *sizes: torch.Size(integer(size, "a size", -(2**63), 2**63 - 1) for size in sizes),
    ),
}
"""Types that are written as an array of the constructor's arguments."""
_ITEMS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_PAIRS: dict[type, str] = {dict: "dict", collections.OrderedDict: "ordered_dict", collections.Counter: "counter"}
_NAMESPACES: dict[type, str] = {argparse.Namespace: "namespace", types.SimpleNamespace: "simple_namespace"}
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    # not decimal, since Python limits the digits of these
    "int": _matching(r"-?0x[0-9a-f]+", "hexadecimal integer", lambda raw: int(raw, 16)),
    "float": _matching(r"-?inf|nan", "inf, -inf or nan", float),
    "path": pathlib.Path,
    "pure_path": pathlib.PurePath,
    **{tag: read for tag, _, read in _TEXTS.values()},
}
_FROM_LIST = {tag: read for tag, _, read in _LISTS.values()}
_FROM_ITEMS, _FROM_PAIRS, _FROM_NAMESPACES = (
    {tag: kind for kind, tag in tags.items()} for tags in (_ITEMS, _PAIRS, _NAMESPACES)
)
