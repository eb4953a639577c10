"""Warns of steps on pipeline stages that change their batch, where a hook is given it afterwards.

In one process ``batch["logits"] = …`` is there in ``on_train_batch_end``. On stages a step runs on parts of the batch,
and to its end on the last stage only: hooks are given the batch as it was loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_shard.plugin.steps.loop import Loop
from lightning_shard.state.patch import Outline

_DEPTH = 8
"""How deep a batch is looked into."""


class ChangedBatches:
    """Looks at steps of one module where they run on a copy of their batch, and warns once of each kind.

    Attributes:
        changing: Steps that were seen to change their batch; they always get a copy, as the first ones do.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.changing: set[str] = set()

    @contextmanager
    def looking_at(self, method: str, batch: Any, *, warns: bool) -> Iterator[None]:
        """Context of a step on a copy of its batch, as far as a stage runs it.

        Args:
            warns: Whether to warn, as the last stage does.
        """
        before = Outline.of(batch, _DEPTH)
        try:
            yield
        finally:  # a stage may end within the step
            if method not in self.changing and not before.is_as(Outline.of(batch, _DEPTH)):
                self.changing.add(method)
                if warns:
                    self._warn(method)

    def _warn(self, method: str) -> None:
        hook = f"on_{method.removesuffix('_step').replace('training', 'train')}_batch_end"
        if (receiver := self._loop.receiver(hook)) is not None:
            warnings.warn(
                f"{method} changes its batch, and {receiver} is given it as it was loaded: with several pipeline stages"
                " a step runs on parts of a batch, and to its end on the last stage only. Return from the step what"
                " that needs.",
                stacklevel=2,
            )
