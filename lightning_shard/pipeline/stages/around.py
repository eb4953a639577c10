"""Names of the modules that contain blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, takewhile


def around_all(blocks: Sequence[str]) -> list[str]:
    """The names of the modules that contain all blocks, beginning with the root."""
    paths = [name.split(".")[:-1] for name in blocks]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*paths))
    return list(accumulate((parts[0] for parts in shared), lambda path, part: f"{path}.{part}".lstrip("."), initial=""))


def around_any(blocks: Sequence[str]) -> list[str]:
    """The names of the modules that contain at least one block, without the root."""
    paths = [name.split(".") for name in blocks]
    return [*dict.fromkeys(".".join(path[:length]) for path in paths for length in range(1, len(path)))]
