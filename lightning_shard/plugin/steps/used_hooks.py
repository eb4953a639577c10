"""Whose hooks run: which ones a user's module and callbacks have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.hooks import ModelHooks

_OF_LIBRARIES = ("lightning.", "lightning_shard.")
_RECORDER = "lightning_shard.testing.recorder"


def has_hooks(trainer: pl.Trainer, module: pl.LightningModule, names: Iterable[str]) -> bool:
    """Whether code of a user's runs in any hook of these names."""
    names = list(names)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return any(is_overridden(module, name, ModelHooks) for name in names) or any(
        _is_users(callback, name) for callback in callbacks for name in names
    )


def is_told(trainer: pl.Trainer, module: pl.LightningModule, hook: str) -> bool:
    """Whether anyone looks at what this hook is given: a user's code, or the recorder of this package's tests."""
    recorders = (type(callback) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    return has_hooks(trainer, module, [hook]) or any(kind.__module__ == _RECORDER for kind in recorders)


def is_overridden(holder: Any, name: str, base: Any) -> bool:
    return name in vars(holder) or getattr(type(holder), name) is not getattr(base, name)


def _is_users(callback: pl.Callback, name: str) -> bool:
    """Lightning's progress bars, writers of predictions and so on look on."""
    code = str(getattr(getattr(type(callback), name), "__module__", ""))
    return name in vars(callback) or not code.startswith(_OF_LIBRARIES)
