"""JSON that anyone may have written: what readers could understand differently is refused."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_INTEGER = 2**53 - 1
"""The largest integer that every JSON reader has exactly."""


def loads(data: bytes, *, surrogates: bool = False) -> Any:
    """The value of a JSON text in UTF-8.

    Args:
        surrogates: Strings may hold lone surrogates, as escapes. UTF-8 has none, so names and paths mustn't.

    Raises:
        ValueError: Not UTF-8 or not JSON, which has no ``NaN`` and ``Infinity``; a key twice in one object; a number
            beyond a double's range; a lone surrogate; nested too deep.
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
    """An integer within bounds.

    Raises:
        ValueError: Anything else: a text, a bool, a float that is whole.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {_shown(value)}, and must be an integer from {least} to {most}")
    return value


def text(value: Any, what: str) -> str:
    """A string.

    Raises:
        ValueError: Anything else.
    """
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
