"""Index of chunks by file, for a checkpoint with millions of chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from lightning_shard.checkpoint.format.chunks import Columns
from lightning_shard.checkpoint.format.manifest import Chunk, TensorEntry


class Claim(NamedTuple):
    """A chunk, with its tensor's name and dtype (by the format's name)."""

    name: str
    dtype: str
    chunk: Chunk


class Claims:
    """All chunks by file. Objects for chunks are made lazily, when their file is requested.

    Args:
        tensors: (name, entry, columns) of each tensor; damaged ones must have been left out.
        files: The number of files.
    """

    def __init__(self, tensors: Iterable[tuple[str, TensorEntry, Columns]], files: int) -> None:
        self._tensors = [(name, entry.dtype, columns) for name, entry, columns in tensors]
        lengths = [len(columns) for _, _, columns in self._tensors]
        self._firsts = np.cumsum([0, *lengths])
        all_files = np.concatenate([np.empty(0, np.int64), *(columns.files for _, _, columns in self._tensors)])
        # the numbers of all chunks, counted through all tensors, sorted by file
        self._order = np.argsort(all_files, kind="stable")
        self._bounds = np.searchsorted(all_files[self._order], np.arange(files + 1))

    @property
    def tensors(self) -> int:
        return len(self._tensors)

    def of(self, file: int) -> list[Claim]:
        """The chunks in file number ``file``, sorted by begin and end."""
        numbers = self._order[self._bounds[file] : self._bounds[file + 1]]
        places = np.searchsorted(self._firsts, numbers, side="right") - 1
        claims = []
        for place, number in zip(places.tolist(), (numbers - self._firsts[places]).tolist()):
            name, dtype, columns = self._tensors[place]
            claims.append(Claim(name, dtype, columns.chunk(number)))
        return sorted(claims, key=lambda claim: (claim.chunk.begin, claim.chunk.end))
