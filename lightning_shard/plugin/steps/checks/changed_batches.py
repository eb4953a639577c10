"""Warns of steps on pipeline stages that change their batch, where a hook is given it afterwards.

In one process ``batch["logits"] = …`` is there in ``on_train_batch_end``. On stages a step runs on parts of the batch,
and to its end on the last stage only: hooks are given the batch as it was loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_shard import tree
from lightning_shard.plugin.steps.used_hooks import is_used


class ChangedBatches:
    """Looks at steps of one LightningModule where they run on a copy of their batch, and warns once of each kind."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._changing: set[str] = set()

    def changes(self, method: str) -> bool:
        """Whether a step was seen to change its batch; then it always gets a copy, as in the first one."""
        return method in self._changing

    @contextmanager
    def looking_at(self, method: str, batch: Any, *, warns: bool) -> Iterator[None]:
        """Context of a step on a copy of its batch, as far as a stage runs it.

        Args:
            warns: Whether to warn, as the last stage does.
        """
        before = _noted(batch)
        try:
            yield
        finally:  # a stage may end within the step
            if method not in self._changing and _is_other(before, _noted(batch)):
                self._changing.add(method)
                if warns:
                    self._warn(method)

    def _warn(self, method: str) -> None:
        hook = f"on_{method.removesuffix('_step').replace('training', 'train')}_batch_end"
        if is_used(self._module.trainer, self._module, hook):
            warnings.warn(
                f"{method} changes its batch, and {hook} is given it as it was loaded: with several pipeline stages"
                " a step runs on parts of a batch, and to its end on the last stage only. Return from the step what"
                " the hook needs.",
                stacklevel=2,
            )


def _noted(batch: Any) -> list[tuple[tree.Path, Any, Any]]:
    """The leaves of a batch, with the versions of tensors and the attributes of objects."""
    return [(path, leaf, _state(leaf)) for path, leaf in tree.walk(batch)]


def _is_other(before: list[tuple[tree.Path, Any, Any]], now: list[tuple[tree.Path, Any, Any]]) -> bool:
    return len(now) != len(before) or any(
        path != other_path or leaf is not other or state != other_state
        for (path, leaf, state), (other_path, other, other_state) in zip(now, before)
    )


def _state(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf._version
    return {name: id(value) for name, value in getattr(leaf, "__dict__", {}).items()}
