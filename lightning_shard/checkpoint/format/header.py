"""The safetensors header, and the strict JSON that it and the manifest are parsed by: of untrusted text, what different
readers could interpret differently is refused.

A safetensors file is ``u64 little-endian N`` · ``N bytes of JSON`` · data. We pad the JSON with spaces so that the data
begins at a multiple of 4096 bytes, a page. https://github.com/safetensors/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_shard.errors import CorruptCheckpointError, UnsupportedStateError

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader represents exactly."""


def loads(data: bytes, *, surrogates: bool = False) -> Any:
    """Parse a JSON text in UTF-8.

    Args:
        surrogates: Allow lone surrogates in strings, as escapes. UTF-8 can't encode them, so names and paths mustn't
            have any.

    Raises:
        ValueError: Not UTF-8, or not JSON (which has no ``NaN`` or ``Infinity``); a duplicate key in an object; a
            number beyond a double's range; a lone surrogate; too deeply nested.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant
        )
        if not surrogates and (b"\\ud" in data or b"\\uD" in data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    return value


def integer(value: Any, what: str, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Check that a value is an integer from ``least`` to ``most``, and return it."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {_shown(value)}, and must be an integer from {least} to {most}")
    return value


def integers(values: Any, what: str) -> tuple[int, ...]:
    """Check that a value is an array of integers from 0, and return them."""
    if type(values) is not list:
        raise ValueError(f"{what} is {_shown(values)}, and must be an array")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            integer(value, f"a number of {what}")
    return tuple(values)


def text(value: Any, what: str) -> str:
    """Check that a value is a string, and return it."""
    if type(value) is not str:
        raise ValueError(f"{what} is {_shown(value)}, and must be a string")
    return value


def _shown(value: Any) -> str:
    if type(value) is int and abs(value) > 2**64:
        return "an integer of more than 64 bits"
    return f"{value!r:.60}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in found if keys.count(key) > 1)!r:.60} is there twice")
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text:.40} is beyond the range of a double")
    return value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


ALIGNMENT_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors readers
METADATA = "__metadata__"


# The names of safetensors, and three more for dtypes that it, or its Python reader, lacks.
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.complex32: "C32",
}


DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}


# In the file's header such a tensor is declared as (dtype, extra last dim), with the same bytes.
CARRIERS: dict[str, tuple[str, tuple[int, ...]]] = {"F8_E8M0": ("U8", ()), "C128": ("F64", (2,)), "C32": ("F16", (2,))}


def dtype_name(dtype: torch.dtype, key: str = "") -> str:
    """The format's name of a dtype; ``key`` is the tensor's name, for errors."""
    try:
        return DTYPE_NAMES[dtype]
    except KeyError:
        raise UnsupportedStateError(
            f"{key!r} has dtype {dtype}, which the checkpoint format can't hold: convert it to one of"
            f" {', '.join(sorted(DTYPES))} before saving."
        ) from None


def check_name(key: str) -> None:
    """Refuse names that safetensors can't hold: ``__metadata__``, which it reserves, and text that isn't UTF-8."""
    try:
        key.encode()
    except UnicodeEncodeError:
        fits = False
    else:
        fits = key != METADATA
    if not fits:
        raise UnsupportedStateError(f"{key!r} can't be a tensor's name in a safetensors file: rename it.")


def item_bytes(name: str) -> int:
    """Bytes per element of a dtype, given by its name in the format."""
    return DTYPES[name].itemsize


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file: ``begin`` and ``end`` are byte offsets from the start of the *file*."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def tensor_table(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[str, list[tuple[int, int]]]:
    """The header's JSON without metadata, and each tensor's byte range from the beginning of the data section."""
    table: dict[str, Any] = {}
    assert all(key != METADATA for key, _, _ in tensors), f"a tensor is named {METADATA!r}"
    position = 0
    spans = []
    for key, dtype, shape in tensors:
        assert key not in table, f"two tensors of one file are named {key!r}"
        nbytes = math.prod(shape) * item_bytes(dtype)
        carrier, extra = CARRIERS.get(dtype, (dtype, ()))
        table[key] = {"dtype": carrier, "shape": [*shape, *extra], "data_offsets": [position, position + nbytes]}
        spans.append((position, position + nbytes))
        position += nbytes
    return _dump(table), spans


def header_of(table: str, metadata: Mapping[str, str]) -> bytes:
    """The header's bytes, from the JSON of :func:`tensor_table` and metadata."""
    if metadata:
        table = f"{_dump({METADATA: dict(metadata)})[:-1]}{',' if table != '{}' else ''}{table[1:]}"
    content = table.encode()
    content += b" " * (-(8 + len(content)) % ALIGNMENT_BYTES)
    if len(content) > MAX_HEADER_BYTES:
        raise UnsupportedStateError(
            f"One rank's file would need a header of {len(content):,} bytes, and safetensors allows"
            f" {MAX_HEADER_BYTES:,}: save fewer tensors per rank."
        )
    return struct.pack("<Q", len(content)) + content


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def parse_header(header: bytes, file: str) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    """Parse a header: its tensors, with dtypes and shapes as declared (see ``CARRIERS``), and its ``__metadata__``.

    Args:
        header: The file's first ``8 + N`` bytes, or more.
        file: The file's name, for errors.
    """
    try:
        (length,) = struct.unpack_from("<Q", header)
        if length > MAX_HEADER_BYTES or 8 + length > len(header):
            raise ValueError(f"its header says that it is {length:,} bytes long")
        table = loads(bytes(header[8 : 8 + length]))
        if not isinstance(table, dict):
            raise ValueError("its header is no object")
        metadata = table.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__ is no object of strings")
        return {key: _entry(key, value, 8 + length) for key, value in table.items()}, metadata
    except KeyError as error:
        raise CorruptCheckpointError(f"{file} is not a valid safetensors file: a tensor has no {error}.") from error
    except (ValueError, TypeError, struct.error) as error:
        raise CorruptCheckpointError(f"{file} is not a valid safetensors file: {error}.") from error


def _entry(key: str, value: Any, base: int) -> HeaderEntry:
    begin, end = (base + integer(offset, f"an offset of {key!r}") for offset in value["data_offsets"])
    shape = tuple(integer(size, f"a size of {key!r}") for size in value["shape"])
    return HeaderEntry(key, text(value["dtype"], f"the dtype of {key!r}"), shape, begin, end)


def layout_fault(entries: Iterable[HeaderEntry], header_bytes: int, file_bytes: int) -> tuple[str | None, str] | None:
    """Check that tensors lie end to end from the header to the file's end.

    Returns:
        The first tensor at fault (None if it is the file's end) and a text of the fault; or None.
    """
    position = header_bytes
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != position or entry.end < entry.begin:
            return entry.key, f"its bytes begin at {entry.begin:,}, and those before it end at {position:,}"
        position = entry.end
    if position != file_bytes:
        return None, f"its tensors end at byte {position:,} of {file_bytes:,}"
    return None
