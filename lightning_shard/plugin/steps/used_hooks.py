"""Finds out which hooks of a module and its callbacks run user code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import ModelHooks

_OF_LIBRARIES = ("lightning.", "lightning_shard.")
_RECORDER = "lightning_shard.testing.recorder"


def has_hooks(trainer: pl.Trainer, module: pl.LightningModule, names: Iterable[str]) -> bool:
    """Whether user code runs in any of these hooks."""
    names = list(names)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(module, name, ModelHooks) for name in names) or any(
        is_users(callback, name) for callback in callbacks for name in names
    )


def is_used(trainer: pl.Trainer, module: pl.LightningModule, hook: str) -> bool:
    """Whether any code uses what this hook receives: a user's, or the recorder of this package's tests."""
    recorders = (type(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return has_hooks(trainer, module, [hook]) or any(kind.__module__ == _RECORDER for kind in recorders)


def is_overridden(holder: Any, name: str, base: Any) -> bool:
    return name in vars(holder) or getattr(type(holder), name) is not getattr(base, name)


def is_users(callback: pl.Callback, name: str) -> bool:
    """Whether a callback's hook is user code: Lightning's progress bars, prediction writers and so on only observe."""
    code = str(getattr(getattr(type(callback), name), "__module__", ""))
    return name in vars(callback) or not code.startswith(_OF_LIBRARIES)
