"""What is replaced in other packages: their functions and classes, compared by identity."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

OTHERS = ("torch", "lightning", "torchmetrics", "numpy", "builtins", "io", "random", "os", "safetensors", "fsspec")


def callables() -> dict[tuple[str, ...], Any]:
    """All that can be called in loaded modules of other packages, and the code of functions, by name."""
    found: dict[tuple[str, ...], Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of deprecated names
        _look(found)
    return found


def _look(found: dict[tuple[str, ...], Any]) -> None:
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in OTHERS and inspect.ismodule(module):
            for path, value in _held((name,), vars(module)):
                found[path] = value
                if inspect.isclass(value) and value.__module__ == name:
                    found.update(_held(path, vars(value)))


def _held(start: tuple[str, ...], names: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in [*names.items()]:
        if callable(value) or isinstance(value, (staticmethod, classmethod, property)):
            yield (*start, key), value
            if hasattr(value, "__code__"):
                yield (*start, key, "__code__"), value.__code__


def replaced(before: Mapping[tuple[str, ...], Any]) -> list[str]:
    """The names of what is another object now, or isn't there any more."""
    now = callables()
    return sorted(".".join(path) for path, value in before.items() if now.get(path) is not value)
