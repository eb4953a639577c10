"""Warns of steps that append to files on pipeline stages, where lines would be there several times.

Every stage's rank runs the step, for each microbatch, and in first batches more than once. A file that is written anew
has what the last run wrote. Not seen are files that the module keeps open.
"""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_LOCK = threading.Lock()
_told_by: dict[int, Callable[[Any], None]] = {}
"""By thread, what is called with a file that it opens to append to; ``open`` is replaced while there is one."""
_put_back: list[Callable[[], None]] = []


class WrittenFiles:
    """Watches one module's steps, and warns once."""

    def __init__(self) -> None:
        self._has_warned = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context of steps, which this thread runs."""
        if self._has_warned:
            yield
            return
        with _telling(self._warn):
            yield

    def _warn(self, file: Any) -> None:
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"A step appends to {file}. With several pipeline stages it runs on each of their ranks, for each"
                " microbatch, and in first batches more than once, so lines may be there several times. Return from the"
                " step what is needed, and write it in on_train_batch_end (on_validation_batch_end, …), which runs once"
                " for a batch, or in a BasePredictionWriter."
            )


@contextmanager
def _telling(tell: Callable[[Any], None]) -> Iterator[None]:
    thread = threading.get_ident()
    with _LOCK:
        if not _told_by:
            _put_back.append(_replace_open())
        _told_by[thread] = tell
    try:
        yield
    finally:
        with _LOCK:
            del _told_by[thread]
            if not _told_by:
                _put_back.pop()()


def _replace_open() -> Callable[[], None]:
    of_builtins, of_io = builtins.open, io.open

    def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        tell = _told_by.get(threading.get_ident())
        if tell is not None and "a" in str(mode):
            tell(file)
        return of_builtins(file, mode, *args, **kwargs)

    def put_back() -> None:
        builtins.open, io.open = of_builtins, of_io

    builtins.open = io.open = opened
    return put_back
