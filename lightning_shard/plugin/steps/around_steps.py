"""What surrounds a batch's steps on pipeline stages: loggers and printing, schedulers, inference mode.

A pipelined step runs for each of several microbatches. What it gives to loggers itself, or prints with ``self.print``
(``self.log`` has ways of its own), it gives for each, with that microbatch's values: the user is told once. Runs that
only try what crosses between stages, and stages before the last, give nothing. Not seen are ``print``, a logger's
experiment that the user has kept, and what a step does ``if self.trainer.is_global_zero``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.lightning_private import loggers_in_place


class DirectOutput:
    """Watches what one module's steps give to loggers and print.

    Args:
        is_silent: Whether the code that runs is to give nothing.
    """

    def __init__(self, module: nn.Module, is_silent: Callable[[], bool] = lambda: True) -> None:
        self._module: Any = module
        self._is_silent = is_silent
        self._microbatches = 1
        self._has_warned = False
        self._held: list[Callable[[], Any]] | None = None  # calls that wait for the batch's end; None: they don't

    @contextmanager
    def watched(self, microbatches: int = 1) -> Iterator[None]:
        """Inside, steps run for this number of microbatches."""
        self._microbatches, self._held = microbatches, None
        if not isinstance(self._module, pl.LightningModule):
            yield
            return
        own = vars(self._module)
        before = own.get("print")
        own["print"] = partial(self.call, "self.print", before or MethodType(type(self._module).print, self._module))
        try:
            with loggers_in_place(self._module, lambda logger: _Watched(logger, self, "self.logger")):
                yield
        finally:
            self._microbatches = 1
            del own["print"]
            if before is not None:
                own["print"] = before
        held: list[Callable[[], Any]] = self._held or []
        self._held = None
        for give in held:
            give()

    def remember(self) -> Callable[[], None]:
        """Hold calls from now to the batch's end; returns a function that drops those made since."""
        self._held = self._held or []
        held = [*self._held]

        def put_back() -> None:
            self._held = [*held]

        return put_back

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Make a call that a step makes, now or later, or none."""
        if self._is_silent():
            return None
        if self._microbatches > 1 and not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"A step calls {what}. With several pipeline stages it runs for each of {self._microbatches}"
                " microbatches of a batch, so it does that as often, with the values of each. Use self.log for numbers,"
                " or return from the step what is needed, and do it in on_train_batch_end (on_validation_batch_end, …),"
                " which runs once for a batch."
            )
        if self._held is None:
            return function(*args, **kwargs)
        self._held.append(partial(function, *args, **kwargs))
        return None


class _Watched:
    """Stands for a logger, or something of a logger, in steps."""

    def __init__(self, of: Any, output: DirectOutput, name: str) -> None:
        self._of = of
        self._output = output
        self._name = name

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return type(self._of)  # for isinstance

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._of, name)
        acts = callable(value) or name == "experiment"
        return _Watched(value, self._output, f"{self._name}.{name}") if acts else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._output.call(self._name, self._of, *args, **kwargs)

    def __getitem__(self, key: Any) -> _Watched:
        return _Watched(self._of[key], self._output, self._name)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._output.call(self._name, self._of.__setitem__, key, value)


@contextmanager
def steps_no_scheduler(schedulers: Sequence[Any], microbatches: int) -> Iterator[None]:
    """Context of a batch's steps on stages, for this number of microbatches."""
    schedulers = schedulers if microbatches > 1 else []
    before = [getattr(scheduler, "last_epoch", None) for scheduler in schedulers]
    yield
    for scheduler, count in zip(schedulers, before, strict=True):
        if getattr(scheduler, "last_epoch", None) != count:
            raise StepError(
                f"A training step steps the {type(scheduler).__name__} itself, and runs once for each of {microbatches}"
                " microbatches: leave that to the Trainer, as configure_optimizers may ask with interval='step', or do"
                " it in on_train_batch_end, or use microbatches=1 or pipeline_parallel_size=1.",
                breaks=6,
            )


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Context in which a step's own ``torch.inference_mode()`` acts as ``no_grad``; also where it decorates functions.

    Stages follow tensors by their versions and views, which inference tensors lack. What is computed is the same.
    """
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def enter_no_grad(self: Any) -> None:
        self._in_place_of_it = torch.set_grad_enabled(not self.mode)

    def leave_no_grad(self: Any, *error: Any) -> Any:
        inside = vars(self).pop("_in_place_of_it", None)
        return leave(self, *error) if inside is None else inside.__exit__(*error)

    kind.__enter__, kind.__exit__ = enter_no_grad, leave_no_grad
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave
