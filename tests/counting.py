"""How much of a checkpoint this process reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from lightning_shard.checkpoint import Checkpoint


@contextlib.contextmanager
def reads() -> Iterator[list[int]]:
    """The bytes of tensors, call by call."""
    counted: list[int] = []
    fetch = Checkpoint.fetch

    def counting(self: Checkpoint, *args: Any, **kwargs: Any) -> int:
        counted.append(fetch(self, *args, **kwargs))
        return counted[-1]

    with mock.patch.object(Checkpoint, "fetch", counting):
        yield counted
