"""What ranks are told of a large manifest: all but the tensors' chunks, which each reads as it needs them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, Digest, digest
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.format.text import TENSOR_SECTIONS, Bring, Lines, Objects, Placed, Span

END_BYTES = 64
"""Of the manifest's end, which holds its own digest."""


@dataclass(frozen=True)
class Outline:
    """A manifest of which only the beginnings of tensors' lines are here, and where the rest of them lies.

    Attributes:
        fields: What else :class:`Manifest` has.
        lines: Of each section, by tensor; see :class:`Lines`.
        ranks: The lines of what belongs to single ranks.
        size: The manifest's, in bytes.
        end: Its end, by which it is told from any other.
        digests: Of its blocks of :data:`BLOCK_BYTES`.
    """

    fields: dict[str, Any]
    lines: dict[str, Mapping[str, bytes | Placed]]
    ranks: Mapping[str, bytes | Span]
    size: int
    end: bytes
    digests: tuple[Digest, ...]

    @classmethod
    def of(cls, data: bytes, source: str) -> Outline | None:
        """A manifest's; None where it is small, or isn't laid out so that its lines can be read one by one.

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
        """The manifest, whose chunks are brought from the file."""
        sections = {name: Lines(lines, bring, checked=False) for name, lines in self.lines.items()}
        return Manifest(**self.fields, raw_sections={**sections, "ranks": Objects(self.ranks, bring)})
