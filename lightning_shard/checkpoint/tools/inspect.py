"""``inspect``: summarizes a checkpoint from its manifest and its trainer state; reads no tensors."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from lightning_shard.arguments import check_count
from lightning_shard.checkpoint.format.manifest import writer_of
from lightning_shard.checkpoint.loading.open import read


@dataclass(frozen=True)
class TensorLine:
    """One tensor; ``section`` is ``model`` or ``optimizer``, ``chunks`` the number of its chunks."""

    section: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    chunks: int
    alias_of: str | None = None


@dataclass(frozen=True)
class InspectReport:
    """A checkpoint's summary; its many attributes are the lines of a table.

    Sizes are in bytes; ``rank_bytes`` is what each rank wrote, for ranks that wrote any.
    """

    path: str
    writer: str
    attempt: str
    format_version: int
    layout: Any
    world_size: int
    epoch: int | None
    global_step: int | None
    digests: bool
    manifest_digest: bool
    """Whether the manifest contains its own digest; if so, it has been verified."""
    tensors: dict[str, int]
    """The number of tensors by section."""
    section_bytes: dict[str, int]
    parameters: int
    """The number of elements of the model's tensors."""
    rank_bytes: dict[int, int]
    files: dict[str, int]
    biggest: list[TensorLine]

    @property
    def bytes(self) -> int:
        return sum(self.files.values())

    @property
    def imbalance(self) -> float:
        """The most bytes that a rank wrote over the mean: 1.0 is even, and a save's time grows with it."""
        written = sum(self.rank_bytes.values())
        return max(self.rank_bytes.values()) * self.world_size / written if written else 1.0


def inspect(
    path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None, biggest: int = 10
) -> InspectReport:
    """Summarize a checkpoint: layout, step, sizes and the ``biggest`` tensors.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`.
    """
    check_count("biggest", biggest, 0)
    checkpoint = read(path, storage_options=storage_options)
    manifest = checkpoint.manifest
    sections = manifest.sections()
    own = [(title, name, entry) for title in ("model", "optimizer") for name, entry in sections[title].own()]
    largest = sorted(own, key=lambda one: (-one[2].nbytes, *one[:2]))[:biggest]
    # a user's trainer state may be anything; Lightning's is a dict with these keys
    tree = checkpoint.state_json()
    state = tree if isinstance(tree, dict) else {}
    rank_bytes: dict[int, int] = {}
    for file in manifest.files:
        rank = writer_of(file.path) or 0
        rank_bytes[rank] = rank_bytes.get(rank, 0) + file.bytes
    return InspectReport(
        path=checkpoint.path,
        writer=manifest.writer,
        attempt=manifest.attempt,
        format_version=manifest.format_version,
        layout=manifest.layout,
        world_size=manifest.world_size,
        epoch=_integer(state.get("epoch")),
        global_step=_integer(state.get("global_step")),
        digests=bool(manifest.block_bytes),
        manifest_digest=manifest.signed,
        tensors={title: len(section) for title, section in sections.items() if section},
        section_bytes={t: sum(entry.nbytes for title, _, entry in own if title == t) for t in ("model", "optimizer")},
        parameters=sum(math.prod(entry.shape) for title, _, entry in own if title == "model"),
        rank_bytes=rank_bytes,
        files={file.path: file.bytes for file in manifest.files},
        biggest=[
            TensorLine(title, name, entry.dtype, entry.shape, entry.nbytes, entry.chunk_count)
            for title, name, entry in largest
        ],
    )


def _integer(value: Any) -> int | None:
    return value if type(value) is int else None
