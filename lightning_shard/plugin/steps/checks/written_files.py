"""Warns of steps that append to files on pipeline stages, where lines would be there several times.

Every stage's rank runs the step, for each microbatch, and in first batches more than once. A file that is written anew
has what the last run wrote. Not seen are files that the module keeps open.
"""

from __future__ import annotations

import builtins
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_told: set[str] = set()


@contextmanager
def warning_of_appends() -> Iterator[None]:
    """Context of steps: warn of each file that this thread opens to append to."""
    thread, own = threading.get_ident(), builtins.open

    def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        if "a" in str(mode) and threading.get_ident() == thread and str(file) not in _told:
            _told.add(str(file))
            rank_zero_warn(
                f"A step appends to {file}. With several pipeline stages it runs on each of their ranks, for each"
                " microbatch, and in first batches more than once, so lines may be there several times. Return from the"
                " step what is needed, and write it in on_train_batch_end (on_validation_batch_end, …), which runs once"
                " for a batch, or in a BasePredictionWriter."
            )
        return own(file, mode, *args, **kwargs)

    builtins.open = io.open = opened
    try:
        yield
    finally:
        builtins.open = io.open = own
