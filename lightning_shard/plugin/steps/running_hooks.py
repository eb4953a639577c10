"""Knows which of the user's hooks runs, by the actions that Lightning has a Trainer's profiler measure.

Private in Lightning 2.6, used here: each hook runs inside of ``profiler.profile("[Callback]<its key>.<hook>")``, or of
``[LightningModule]<its class>.<hook>``. ``profile`` is replaced on a run's own profiler. What a hook calls of
Lightning's, such as a step or a save, has actions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
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


@dataclass
class HookCall:
    """A call of a user's hook: its class and name, and what a check has noted of it."""

    name: str
    noted: list[str] = field(default_factory=list)


class RunningHooks:
    """The user's hooks that run for one Trainer.

    Attributes:
        at_end: Called with a hook's call that has ended, and the error that it has raised, if any.
    """

    at_end: Callable[[HookCall, BaseException | None], None] | None = None

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        self._calls: list[HookCall | None] = []
        self._is_users: dict[str, bool] = {}

    @property
    def current(self) -> HookCall | None:
        """The call of the user's hook that runs, unless it has called Lightning, or the strategy."""
        return self._calls[-1] if self._calls else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of a run."""
        own: Any = vars(self._trainer.profiler)  # type: ignore[attr-defined]
        before = own.get("profile")
        own["profile"] = partial(self._profile, self._trainer.profiler.profile)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del own["profile"]
            if before is not None:
                own["profile"] = before

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of what is no user's code."""
        self._calls.append(None)
        try:
            yield
        finally:
            self._calls.pop()

    def _profile(self, profile: Callable[[str], AbstractContextManager[Any]], action: str) -> Any:
        if action not in self._is_users:
            self._is_users[action] = self._of_user(action)
        if not self._is_users[action] and not (self._calls and self._calls[-1]):
            return profile(action)
        return self._call(profile(action), HookCall(action.partition("]")[2]) if self._is_users[action] else None)

    @contextmanager
    def _call(self, profiled: AbstractContextManager[Any], call: HookCall | None) -> Iterator[Any]:
        self._calls.append(call)
        failure: BaseException | None = None
        try:
            with profiled as action:
                yield action
        except BaseException as error:
            failure = error
            raise
        finally:
            self._calls.pop()
            if call is not None and self.at_end is not None:
                self.at_end(call, failure)

    def _of_user(self, action: str) -> bool:
        holder, _, name = action.rpartition(".")
        kind, _, key = holder.partition("]")
        if kind == "[LightningModule":
            return is_overridden(self._trainer.lightning_module, name, pl.LightningModule)
        callbacks = self._trainer.callbacks  # type: ignore[attr-defined]
        return kind == "[Callback" and any(is_users(each, name) for each in callbacks if each.state_key == key)
