"""Numbers and sizes that users give, checked where Python's own error would say less; and names that they are told."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from lightning_shard.errors import ConfigurationError

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([KMGTP]?)(i?)B?\s*")


def check_count(name: str, value: Any, least: int = 1, why: str = "") -> int:
    """The value as an ``int``.

    Raises:
        ConfigurationError: It is no integer of at least ``least``.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ConfigurationError(f"{name} ({value!r:.80}) must be an integer of at least {least}{why}.")
    return int(value)


def few(names: Iterable[object], most: int = 8) -> str:
    """The first of some names, each once, and how many more there are."""
    shown = [*dict.fromkeys(map(str, names))]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def size(value: object, setting: str) -> int:
    """Parse bytes: a number, or text such as ``"80GB"`` (10⁹) or ``"80GiB"`` (2³⁰).

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        number, unit, binary = found.groups()
        value = float(number) * (1024 if binary else 1000) ** " KMGTP".index(unit or " ")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{setting} ({value!r}) must be bytes: a number above 0, or such as 80GiB or 80GB.")
    return round(value)
