"""Checks of arguments where Python's own error would name neither the argument nor what it should be."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from lightning_shard.errors import ConfigurationError


def check_tolerance(name: str, value: Any) -> None:
    """Raise ConfigurationError unless ``value`` is a number that isn't negative."""
    if not isinstance(value, Real) or not float(value) >= 0:
        raise ConfigurationError(f"{name} ({value!r:.80}) must be a number, and not negative.")


def check_options(options: Any) -> None:
    """Raise ConfigurationError unless storage options are a mapping. They aren't shown, since they may hold secrets."""
    if options is not None and not isinstance(options, Mapping):
        raise ConfigurationError(f"storage_options ({type(options).__name__}) must be a dict for fsspec, or None.")
