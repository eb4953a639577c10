"""Watches what a step gives to loggers itself, or prints with ``self.print``; ``self.log`` has ways of its own.

A pipelined step runs for each of several microbatches, so it does that for each, with that microbatch's values: the
user is told once. Runs that only try what crosses between stages, and stages before the last, give nothing. Not seen
are ``print``, a logger's experiment that the user has kept, and what a step does ``if self.trainer.is_global_zero``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.lightning_private import loggers_in_place


class DirectOutput:
    """Watches one module's steps.

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
