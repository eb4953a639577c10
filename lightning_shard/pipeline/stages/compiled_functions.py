"""Functions that a user has compiled, where code around a stage's blocks calls them.

There a value may be unknown, or its operations are counted: compiled code can do neither. So such functions run as they
were written, but for those that are called within this stage's blocks, and those that follow the last block, such as a
compiled loss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class CompiledFunctions:
    """Has functions run as they were written, or compiled, as outside of a stage's step."""

    def __init__(self) -> None:
        self._eager: Any = None

    def run_as_written(self) -> None:
        if self._eager is None and "torch._dynamo" in sys.modules:  # else nothing is compiled, and its import is slow
            self._eager = torch.compiler.set_stance("force_eager")

    def run_compiled(self) -> None:
        eager, self._eager = self._eager, None
        if eager is not None:
            eager.__exit__(None, None, None)


@contextmanager
def as_written() -> Iterator[None]:
    """Context in which no function runs compiled, blocks included."""
    functions = CompiledFunctions()
    functions.run_as_written()
    try:
        yield
    finally:
        functions.run_compiled()
