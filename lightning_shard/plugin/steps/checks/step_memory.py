"""What steps on pipeline stages may not change: parameters; and what is put back after runs of a check.

The state around each first microbatch is taken, and parameters are compared. In every other step what holds the
gathered parameters sees changes of them (``parallel/fsdp/watched_parameters.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.watched_parameters import show_writes, was_written
from lightning_shard.state.tree_state import Taken, take


class StepMemory:
    """The state that a step on pipeline stages may change beside gradients.

    Args:
        stages: How many stages of this rank run the step. With several, the step may not draw from an iterator.
        callbacks: The Trainer's, whose state a step may change too.
        puts_back: Whether the state may have to be restored; else it is taken for :meth:`check` alone.
    """

    def __init__(
        self,
        root: nn.Module,
        stages: int = 1,
        callbacks: Sequence[Any] = (),
        others: Sequence[Callable[[], None]] = (),
        *,
        puts_back: bool = True,
    ) -> None:
        self._stages = stages
        self._others = others
        with torch._C.DisableTorchFunction():  # they name operations by counting, and stages hold other parameters
            self._parameters = [
                (name, p, p._version) for name, p in nn.Module.named_parameters(root) if type(p) is nn.Parameter
            ]
        for _, parameter, _ in self._parameters:
            show_writes(parameter)
        self._taken = take(root, callbacks) if puts_back else Taken([])

    def put_back(self) -> None:
        """Restore the state; all else of objects before it raises for what can't be restored."""
        self._taken.put_back()
        for put_back in self._others:
            put_back()

    def changed(self) -> list[str]:
        """Paths of objects whose state is another one now."""
        return self._taken.changed()

    def forget(self) -> None:
        """Nothing will be restored any more."""
        self._taken.forget()

    def check(self) -> None:
        """Check, after a run, that parameters are as they were, and that one stage at most has drawn from iterators."""
        if self._stages > 1 and self._taken.has_drawn():
            raise StepError(
                f"The step draws from an iterator that the module keeps, and {self._stages} stages on this rank, which"
                " run it in turn, would be given different entries: draw in on_train_batch_start, or use a schedule"
                ' with one stage on each rank, such as schedule="1F1B".',
                breaks=6,
            )
        with torch._C.DisableTorchFunction():
            changed = (name for name, p, before in self._parameters if p._version != before or was_written(p))
            name = next(changed, None)
        if name is not None:
            raise StepError(
                f"The step changes the parameter {name} in place. In a step parameters are read, not written, and"
                " each microbatch would change it: keep it as a buffer, change it in on_train_batch_start or"
                " on_train_batch_end, or use pipeline_parallel_size=1.",
                breaks=8,
            )
