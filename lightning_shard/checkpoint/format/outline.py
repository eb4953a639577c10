"""The outline of a large manifest, which the first rank broadcasts: everything but the tensors' chunks.

It has each tensor's position in the file, so that a rank reads the chunks of only those tensors that it needs, and a
digest of each block of the file, so that it can verify what it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, Digest, digest
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.format.text import TENSOR_SECTIONS, Bring, Lines, Objects, Placed, Span

END_BYTES = 64
"""Length of the manifest's end to keep, which contains its own digest."""


@dataclass(frozen=True)
class Outline:
    """A manifest with, for each tensor, only the head of its line and the byte range of its chunks' text.

    Attributes:
        fields: The other fields of :class:`Manifest`.
        lines: By section, then by tensor; see :class:`Lines`.
        ranks: By rank, the line of the tensors that belong to it alone, or the line's byte range.
        size: The manifest's size in bytes.
        end: Its last bytes, which identify it.
        digests: The digests of its blocks of :data:`BLOCK_BYTES`.
    """

    fields: dict[str, Any]
    lines: dict[str, Mapping[str, bytes | Placed]]
    ranks: Mapping[str, bytes | Span]
    size: int
    end: bytes
    digests: tuple[Digest, ...]

    @classmethod
    def of(cls, data: bytes, source: str) -> Outline | None:
        """The outline of a manifest; None if it is small, or its lines can't be read one by one.

        Raises:
            FormatVersionError, CorruptCheckpointError: As :meth:`Manifest.from_bytes`.
        """
        manifest = Manifest.from_bytes(data, source)
        raw = manifest.raw_sections
        if not isinstance(raw["ranks"], Objects):
            return None
        view = memoryview(data)
        return cls(
            fields={
                field.name: getattr(manifest, field.name)
                for field in dataclasses.fields(manifest)
                if field.name != "raw_sections"
            },
            lines={name: raw[name].lines for name in TENSOR_SECTIONS},
            ranks=raw["ranks"].lines,
            size=len(data),
            end=data[-END_BYTES:],
            digests=tuple(digest(view[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES)),
        )

    def manifest(self, bring: Bring) -> Manifest:
        """The manifest; its chunks' texts are read lazily by ``bring(begin, end)``."""
        sections = {name: Lines(lines, bring, checked=False) for name, lines in self.lines.items()}
        return Manifest(**self.fields, raw_sections={**sections, "ranks": Objects(self.ranks, bring)})
