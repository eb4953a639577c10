"""``diff``: compares two checkpoints, of any layouts and in any stores, in bounded memory.

Chunks with the same box and the same digests are equal, and aren't read. All other boxes are read from both
checkpoints, part by part.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box, slabs
from lightning_shard.checkpoint.engine import groups
from lightning_shard.checkpoint.format.chunks import TensorEntry
from lightning_shard.checkpoint.format.manifest import Section
from lightning_shard.checkpoint.format.typed_json import TAG
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor, fetch
from lightning_shard.errors import ConfigurationError, CorruptCheckpointError

SECTIONS = ("model", "optimizer", "trainer", "ranks")
BATCH_BYTES = 16 * 2**20
"""How much of each checkpoint is compared at a time."""
STEP_ELEMENTS = 2**18
SHOWN_CHARS = 40
_MAPPINGS = ("dict", "ordered_dict", "counter", "defaultdict")
Kind = Literal["only in a", "only in b", "shape", "dtype", "value"]


@dataclass(frozen=True)
class Difference:
    """One tensor, or key path of the trainer state, that differs.

    Attributes:
        section: ``model``, ``optimizer``, ``trainer`` or ``rank 0`` and so on.
        a, b: What each side has: dtype and shape of a tensor, or a value of the trainer state as JSON.
        different: How many of the tensor's ``elements`` differ.
        max_difference: The largest absolute difference of elements.
    """

    section: str
    name: str
    kind: Kind
    a: str = ""
    b: str = ""
    different: int = 0
    elements: int = 0
    max_difference: float = 0.0

    @property
    def what(self) -> str:
        if self.kind in ("only in a", "only in b"):
            return f"{self.kind}: {self.a or self.b}"
        if self.kind == "value" and self.elements:
            return self._values
        return f"{self.a} in a, {self.b} in b" + (f"; {self._values}" if self.different else "")

    @property
    def _values(self) -> str:
        return f"{self.different:,} of {self.elements:,} elements differ, by at most {self.max_difference:.3g}"

    def __str__(self) -> str:
        return f"{self.section}: {self.name}: {self.what}"


@dataclass
class DiffReport:
    """What was compared, and what differs: ``bytes`` of tensors were compared; ``bytes_read`` were read for that."""

    a: str
    b: str
    tensors: int = 0
    bytes: int = 0
    bytes_read: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        compared = f"{self.tensors} tensors, {self.bytes:,} bytes"
        if self.ok:
            return f"a ({self.a}) and b ({self.b}) are equal: {compared}"
        count = len(self.differences)
        head = f"a ({self.a}) and b ({self.b}): {count} {'difference' if count == 1 else 'differences'} in {compared}"
        return "\n".join([head, *map(str, self.differences)])


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    sections: Collection[str] = SECTIONS,
    verify: bool = True,
    storage_options: dict[str, Any] | None = None,
    b_storage_options: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiffReport:
    """Compare two checkpoints: names, shapes, dtypes and values of tensors, and the trainer state by key path.

    Where both manifests have the same digests, files aren't read: :func:`verify` tells whether they are whole. Elements
    are compared as numbers, NaN equals NaN. Tensors of different dtypes always differ.

    Args:
        a: A checkpoint's path.
        b: The other's.
        rtol: Floating numbers differ if ``|a - b| > atol + rtol * |b|``.
        atol: The same.
        sections: Some of ``model``, ``optimizer``, ``trainer`` (its state) and ``ranks`` (tensors of single ranks,
            which differ between different numbers of ranks).
        verify: Check digests of what is read.
        storage_options: For fsspec.
        b_storage_options: For ``b``, if it needs others than ``a``.
        progress: Called repeatedly with the bytes done and the total bytes.

    Raises:
        CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`read`.
        ConfigurationError: ``sections`` has an unknown name, or a tolerance is negative.
    """
    if isinstance(sections, str) or not isinstance(sections, Collection):
        raise ConfigurationError(f"sections ({sections!r:.80}) must be a list of some of {', '.join(SECTIONS)}.")
    if unknown := [str(section) for section in sections if section not in SECTIONS]:
        raise ConfigurationError(f"sections has {', '.join(unknown)}: use some of {', '.join(SECTIONS)}.")
    for name, value in {"rtol": rtol, "atol": atol}.items():
        if not isinstance(value, Real) or not float(value) >= 0:
            raise ConfigurationError(f"{name} ({value!r:.80}) must be a number, and not negative.")
    ours = read(a, storage_options=storage_options, verify=verify)
    theirs = read(
        b, storage_options=b_storage_options if b_storage_options is not None else storage_options, verify=verify
    )
    report = DiffReport(ours.path, theirs.path)
    comparison = _Comparison(ours, theirs, rtol, atol, report)
    mine, other = ours.manifest.sections(), theirs.manifest.sections()
    for title in sorted({**mine, **other}, key=lambda title: (len(title), title)):  # ranks by their numbers
        if title == "trainer" and title in sections:
            comparison.trainer_state()
        elif title != "trainer" and (title if title in SECTIONS else "ranks") in sections:
            comparison.section(title, mine.get(title, Section()), other.get(title, Section()))
    comparison.values(progress)
    report.differences.sort(key=lambda found: SECTIONS.index(found.section if found.section in SECTIONS else "ranks"))
    return report


@dataclass
class _Pair:
    """Two tensors of one shape, and the differences of their elements found so far."""

    section: str
    name: str
    a: StoredTensor
    b: StoredTensor
    different: int = 0
    max_difference: float = 0.0

    @property
    def width(self) -> int:
        """The most bytes that an element takes on either side."""
        return max(self.a.dtype.itemsize, self.b.dtype.itemsize)


@dataclass
class _Comparison:
    a: Checkpoint
    b: Checkpoint
    rtol: float
    atol: float
    report: DiffReport
    pairs: list[_Pair] = field(default_factory=list)

    def differ(self, section: str, name: str, kind: Kind, a: str = "", b: str = "") -> None:
        self.report.differences.append(Difference(section, name, kind, a, b))

    # -- names --------------------------------------------------------------------------------------------------------

    def section(self, title: str, a: Section, b: Section) -> None:
        for name in sorted({*a, *b}):
            if name not in b:
                self.differ(title, name, "only in a", a=_shown(a[name]))
            elif name not in a:
                self.differ(title, name, "only in b", b=_shown(b[name]))
            elif a.alias_of(name) is None or a.alias_of(name) != b.alias_of(name):
                # an alias of the same tensor on both sides is skipped: reported once, under that tensor's name
                self.tensor(title, name, a[name], b[name])

    def tensor(self, section: str, name: str, a: TensorEntry, b: TensorEntry) -> None:
        self.report.tensors += 1
        if a.shape != b.shape:
            self.differ(section, name, "shape", _shown(a), _shown(b))
        else:
            self.pairs.append(_Pair(section, name, StoredTensor(name, a, self.a), StoredTensor(name, b, self.b)))

    # -- the trainer state --------------------------------------------------------------------------------------------

    def trainer_state(self) -> None:
        try:
            self.state(self.a.state_json(), self.b.state_json(), "")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"A trainer state is damaged: {type(error).__name__} {error}.") from error

    def state(self, a: Any, b: Any, path: str) -> None:
        """Compare two trees of typed JSON."""
        tags = [tree.get(TAG) if isinstance(tree, dict) else None for tree in (a, b)]
        if tags == ["tensor", "tensor"]:
            self.tensor("trainer", path, self.a.manifest.trainer[a["v"]], self.b.manifest.trainer[b["v"]])
        elif isinstance(a, dict) and isinstance(b, dict) and _kind(a) == _kind(b):
            if tags[0] is None or tags[0] in _MAPPINGS:
                self.mapping(_items(a), _items(b), path)
            else:
                self.state(a["v"], b["v"], path)
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for index, items in enumerate(zip(a, b)):
                self.state(*items, f"{path}[{index}]")
        elif type(a) is not type(b) or (
            a != b and not (type(a) is float and abs(a - b) <= self.atol + self.rtol * abs(b))
        ):
            self.differ("trainer", path or "the state", "value", _text(a), _text(b))

    def mapping(self, a: dict[str, tuple[str, Any]], b: dict[str, tuple[str, Any]], path: str) -> None:
        for key, (label, _) in (a | b).items():
            inner = (path + label).lstrip(".")
            if key not in b:
                self.differ("trainer", inner, "only in a", a=_text(a[key][1]))
            elif key not in a:
                self.differ("trainer", inner, "only in b", b=_text(b[key][1]))
            else:
                self.state(a[key][1], b[key][1], inner)

    # -- values -------------------------------------------------------------------------------------------------------

    def values(self, progress: Callable[[int, int], None] | None) -> None:
        self.report.bytes = total = sum(pair.a.nbytes for pair in self.pairs)
        before = itertools.accumulate((pair.a.nbytes for pair in self.pairs), initial=0)
        boxes = ((pair, box, done) for pair, done in zip(self.pairs, before) for box in self.boxes(pair))
        for batch in groups(boxes, lambda item: item[1].numel * item[0].width, BATCH_BYTES):
            self.compare([(pair, box) for pair, box, _ in batch])
            if progress is not None:
                progress(batch[-1][2], total)
        if progress is not None:
            progress(total, total)
        for pair in self.pairs:
            if pair.different or pair.a.dtype != pair.b.dtype:
                kind: Kind = "value" if pair.a.dtype == pair.b.dtype else "dtype"
                found = Difference(pair.section, pair.name, kind, _shown(pair.a.entry), _shown(pair.b.entry))
                found = replace(found, different=pair.different, max_difference=pair.max_difference)
                self.report.differences.append(replace(found, elements=pair.a.numel()))

    def boxes(self, pair: _Pair) -> Iterator[Box]:
        """The boxes of a tensor that must be read to compare it."""
        grids = {checkpoint.manifest.block_bytes for checkpoint in (self.a, self.b)}
        alike = pair.a.dtype == pair.b.dtype and len(grids) == 1 and 0 not in grids
        a, b = ({chunk[3:] for chunk in stored.entry.chunks} for stored in (pair.a, pair.b))
        for offsets, sizes, _ in sorted(a - b if alike else a):
            yield from slabs(Box(offsets, sizes), BATCH_BYTES // pair.width)

    def compare(self, batch: list[tuple[_Pair, Box]]) -> None:
        ours = self.a.room_for([(pair.a, box) for pair, box in batch])
        theirs = self.b.room_for([(pair.b, box) for pair, box in batch])
        reads = [Read(pair.a, box, room) for (pair, box), room in zip(batch, ours)]
        self.report.bytes_read += fetch(
            [*reads, *(Read(pair.b, box, room) for (pair, box), room in zip(batch, theirs))]
        )
        for (pair, _), a, b in zip(batch, ours, theirs):
            different, most = differing(a, b, self.rtol, self.atol)
            pair.different += different
            pair.max_difference = max(pair.max_difference, most)


def differing(a: Tensor, b: Tensor, rtol: float = 0.0, atol: float = 0.0) -> tuple[int, float]:
    """The number of differing elements of two tensors of one shape, and the largest absolute difference.

    NaN equals NaN, and differs from any number by infinity.
    """
    count, most = 0, 0.0
    # small steps, since intermediate results are wider than the elements
    for x, y in zip(a.reshape(-1).split(STEP_ELEMENTS), b.reshape(-1).split(STEP_ELEMENTS)):
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        p, q = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (x, y))
        equal = (p == q) | (p.isnan() & q.isnan())
        distances = (p - q).abs()
        if x.dtype == y.dtype and not (x.is_floating_point() or x.is_complex()):  # a double hasn't all int64s
            equal = (x.view(torch.uint8) == y.view(torch.uint8)).view(-1, x.element_size()).all(dim=1)
            distances.clamp_(min=1)
        distances = distances.masked_fill(equal, 0).nan_to_num(math.inf, math.inf)
        if rtol or atol:
            equal |= distances <= atol + rtol * q.abs().nan_to_num(0.0)
        count += int((~equal).count_nonzero())
        most = max(most, float(distances.masked_fill(equal, 0).max()))
    return count, most


def _kind(tree: dict[str, Any]) -> dict[str, Any]:
    """The fields of a tagged value except ``v``; empty for a plain mapping."""
    return {key: value for key, value in tree.items() if key != "v"} if TAG in tree else {}


def _items(tree: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """A mapping's items: unique text of the key, to the key's part of a path and the value."""
    if TAG not in tree:
        return {key: (f".{key}", value) for key, value in tree.items()}
    keys = [(json.dumps(key), key, value) for key, value in tree["v"]]
    return {text: (f".{key}" if isinstance(key, str) else f"[{text}]", value) for text, key, value in keys}


def _shown(entry: TensorEntry) -> str:
    return f"{entry.dtype} {' × '.join(map(str, entry.shape)) or 'scalar'}"


def _text(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"
