"""The check of a number that users give, where Python's own error would name neither it nor what it should be."""

from __future__ import annotations

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
