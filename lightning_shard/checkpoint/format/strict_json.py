"""Strict JSON parsing of untrusted text: refuses what different JSON readers could interpret differently."""

from __future__ import annotations

import json
import math
from typing import Any

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
    """Check that a value is an integer from ``least`` to ``most``, and return it.

    Raises:
        ValueError: Anything else, such as a string, a bool, or a float with an integral value.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {_shown(value)}, and must be an integer from {least} to {most}")
    return value


def integers(values: Any, what: str) -> tuple[int, ...]:
    """Check that a value is an array of integers from 0, and return them.

    Raises:
        ValueError: Anything else.
    """
    if type(values) is not list:
        raise ValueError(f"{what} is {_shown(values)}, and must be an array")
    for value in values:
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            integer(value, f"a number of {what}")
    return tuple(values)


def text(value: Any, what: str) -> str:
    """Check that a value is a string, and return it.

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
