"""What the ranks of a run that fails print."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_shard.errors import ShardError


def say(text: str) -> None:
    print(f"[lightning_shard] {text}", file=sys.stderr, flush=True)


def print_failed_saves(trainer: pl.Trainer, is_first_to_say: Callable[[str], bool]) -> Callable[[], None]:
    """Have our own errors in ``on_exception`` hooks be printed, by one rank: the run's own error is to be raised.

    Returns:
        A function that undoes this.
    """

    def guarded(hook: Callable[..., None]) -> Callable[..., None]:
        def on_exception(*args: Any, **kwargs: Any) -> None:
            try:
                hook(*args, **kwargs)
            except ShardError as error:
                if is_first_to_say(str(error)):
                    say(str(error))

        return on_exception

    holders = [each for each in (*trainer.callbacks, trainer.datamodule) if each is not None]  # type: ignore[attr-defined]
    guards = [(vars(each), guarded(each.on_exception)) for each in holders if "on_exception" not in vars(each)]
    for attributes, guard in guards:
        attributes["on_exception"] = guard

    def undo() -> None:
        for attributes, guard in guards:
            if attributes.get("on_exception") is guard:
                del attributes["on_exception"]

    return undo


def take_over_from_observer() -> None:
    """Keep Lightning's launcher from killing this process since a child has failed: it ends by itself, and says why.

    Private in Lightning 2.6: ``_ChildProcessObserver._run``, whose result sets ``_finished`` after each pause.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._run = lambda: True  # type: ignore[method-assign]
