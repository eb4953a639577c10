"""Decodes JSON with type tags to Python values; the inverse of ``encode``. See ``docs/format.md``, "Typed JSON".

Decoding builds only values of the types listed here, and of types that the reading program registered, and members of
its Enum classes. No name in a file is ever imported, looked up in a module, or called.
"""

from __future__ import annotations

import argparse
import base64
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shard.checkpoint.format.encode import FACTORIES, INT64, TAG, Reference, by_name, enum_of_program
from lightning_shard.checkpoint.format.header import DTYPES, integer, loads, text
from lightning_shard.errors import CheckpointError, CorruptCheckpointError


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
        if tag in _MAPPINGS or tag == "defaultdict":
            pairs = [_list(pair, tag) for pair in _list(raw, tag)]
            values = [(self.value(key), self.value(item)) for key, item in pairs]
            if tag != "defaultdict":
                return _MAPPINGS[tag](values)
            factory = tree.get("factory")
            return collections.defaultdict(None if factory is None else FACTORIES[factory], values)
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


_MAPPINGS: dict[str, Callable[[list[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "ordered_dict": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
}
_DECIMAL = re.compile(r"-?(inf|nan|[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?)")
_NUMPY_DTYPE = re.compile(
    r"\|b1|[<|][iu][1248]|<f(2|4|8|12|16)|<c(8|16|24|32)|[<|]S[0-9]{1,9}|<U[0-9]{1,9}|<[mM]8(\[[0-9]{0,9}[A-Za-z]{1,2}\])?"
)
_TORCH_DTYPES = {
    **{str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **DTYPES,
}
# Constructors by tag: from a string; from an array of arguments; from an array of the value's items.
_FROM_TEXT: dict[str, Callable[[str], Any]] = {
    # not decimal, since Python limits the digits of these
    "int": _matching(r"-?0x[0-9a-f]+", "hexadecimal integer", lambda raw: int(raw, 16)),
    "float": _matching(r"-?inf|nan", "inf, -inf or nan", float),
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
    "torch.device": _matching(r"[a-z]+(:[0-9]{1,3})?", "device", torch.device),
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
    """Parse the JSON of a trainer state's file."""
    try:
        return loads(data, surrogates=True)
    except ValueError as error:
        raise CorruptCheckpointError(f"{source} is not valid JSON: {error}.") from error
