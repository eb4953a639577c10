"""The check of a number that users give, where Python's own error would say less; and names that they are told."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from lightning_shard.errors import ConfigurationError


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
