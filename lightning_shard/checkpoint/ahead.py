"""Ordered map over an executor with bounded look-ahead: no future for each of millions of items at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    pool: Executor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, Result]]:
    """Yield (item, ``function(item)``) in order; at most ``ahead`` items are submitted and not yet yielded."""
    running: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            running.append((item, pool.submit(function, item)))
            if len(running) >= ahead:
                done, future = running.popleft()
                yield done, future.result()
        while running:
            done, future = running.popleft()
            yield done, future.result()
    finally:
        for _, future in running:
            future.cancel()
