"""The chunks as columns: what is found, checked and read of them by arrays is what one finds one by one."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard import checkpoint
from lightning_shard.checkpoint.boxes import Box, uncovered
from lightning_shard.checkpoint.format import table as tables
from lightning_shard.checkpoint.format.chunks import Chunk, TensorEntry, rows_of
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest, Section
from lightning_shard.checkpoint.loading.open import find, open_found, to_tell
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError, CheckpointReplacedError, CorruptCheckpointError

NAMES = ['":{', "\\", 'a"', "model", "ü", "\n}", '","chunks":[', "x" * 300]
BLOCK_BYTES = 64


# -- found and checked by arrays --------------------------------------------------------------------------------------


def cuts(shape: tuple[int, ...], chooser: random.Random) -> list[Box]:
    """Boxes that make up a tensor, cut at random into no grid."""
    boxes = [Box.whole(shape)]
    for _ in range(chooser.randrange(6)):
        box = boxes.pop(chooser.randrange(len(boxes)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = chooser.choice(dims)
        at = chooser.randrange(1, box.sizes[dim])
        for first, length in ((0, at), (at, box.sizes[dim] - at)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += first
            sizes[dim] = length
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    chooser.shuffle(boxes)
    return boxes


def manifest_of(tensors: dict[str, tuple[tuple[int, ...], list[Box]]]) -> Manifest:
    """Of tensors whose bytes follow each other in one file."""
    entries, at = {}, 8
    for name, (shape, boxes) in tensors.items():
        chunks = []
        for box in boxes:
            chunks.append(Chunk(0, at, at + 4 * box.numel, box.offsets, box.sizes))
            at += 4 * box.numel
        entries[name] = TensorEntry("F32", shape, given=tuple(chunks))
    manifest = Manifest("0123456789ab", [FileEntry("model/a", at, 8)], writer="a test", model=Section(entries))
    return manifest.with_rows(rows_of(list(entries.values())))


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_cover_is_exact_if_each_element_is_in_one_box(shape: tuple[int, ...], seed: int) -> None:
    chooser = random.Random(seed)
    boxes = cuts(shape, chooser)
    for _ in range(chooser.randrange(3)):
        change = chooser.randrange(3)
        if change == 0 and boxes:
            boxes.pop()
        elif change == 1 and boxes:
            boxes.append(chooser.choice(boxes))
        elif boxes:
            moved = boxes.pop()
            offsets = tuple(chooser.randrange(size - length + 1) for size, length in zip(shape, moved.sizes))
            boxes.append(Box(offsets, moved.sizes))
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes))] += 1
    offsets, sizes = (
        np.array(list(parts), np.int64).reshape(len(boxes), len(shape))
        for parts in ([box.offsets for box in boxes], [box.sizes for box in boxes])
    )
    # together with a tensor that is covered, before and after it
    whole = np.array([shape], np.int64).reshape(1, len(shape))
    found = uncovered(
        np.concatenate([whole] * 3),
        np.array([0, 1, 1 + len(boxes), 2 + len(boxes)]),
        np.concatenate([0 * whole, offsets, 0 * whole]),
        np.concatenate([whole, sizes, whole]),
    )
    assert found.tolist() == [False, bool((counts != 1).any()), False]


def test_all_that_is_wrong_is_told_by_tensor() -> None:
    row = [Box((0,), (2,)), Box((2,), (2,))]
    manifest = manifest_of({name: ((4,), list(row)) for name in "abcd"})
    rows = manifest.chunks.table.rows
    columns = tables.Rows(*(column.copy() for column in rows))
    columns.file[0], columns.begin[3], columns.offsets[4] = 1, 2**62, 1
    manifest.with_rows(columns)
    faults = {manifest.chunks.names[number][1]: what for number, what in manifest.chunks.check_all().items()}
    assert {name: what[:22] for name, what in faults.items()} == {
        "a": "refers to file 1 of 1",
        "b": "has a chunk of 8 bytes",
        "c": "has chunks that don't m",
    } or {name: what.split()[0] for name, what in faults.items()} == {"a": "refers", "b": "has", "c": "has"}
    assert len(manifest.model["d"].chunks) == 2
    with pytest.raises(CorruptCheckpointError, match=r"model tensor 'c' has chunks that don't make it up: .* overlap"):
        len(manifest.model["c"].chunks)


# -- its file ---------------------------------------------------------------------------------------------------------


def save(path: Path, add: float = 0.0) -> Any:
    tensor = torch.arange(6.0) + add
    return checkpoint.save(
        {name: tensor + number for number, name in enumerate(NAMES)}
        | {f"of many {number}": tensor + number for number in range(50)}
        | {"tied": tensor, "also tied": tensor, "none": torch.empty(0, 3), "one": torch.tensor(7, dtype=torch.int8)},
        path,
        optimizer={"m": tensor.view(2, 3) * 2},
        trainer_state={"step": 3, "of": torch.ones(2)},
        rank_state={"seed": torch.tensor(5)},
        layout={"nested": {"model": {}}},
        fsync=False,
    )


def told(path: Path) -> Any:
    """What another rank is told."""
    return pickle.loads(pickle.dumps(to_tell(find(str(path), None), None, Ranks(0, (0, 1)))))


def entries(manifest: Manifest) -> dict[Any, Any]:
    return {
        (title, name): (entry.dtype, entry.shape, list(entry.chunks), section.alias_of(name))
        for title, section in manifest.sections().items()
        for name, entry in section.items()
    }


def test_what_the_first_rank_sends_is_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "BLOCK_BYTES", BLOCK_BYTES * 16)
    save(tmp_path)
    ours, whole = open_found(str(tmp_path), None, True, told(tmp_path)), checkpoint.read(tmp_path)
    assert ours.manifest.table.blocks > 3
    assert entries(ours.manifest) == entries(whole.manifest)
    assert ours.manifest.to_bytes() == (tmp_path / "manifest.json").read_bytes()
    assert told(tmp_path).table == (tmp_path / ours.manifest.table.path).read_bytes()
    assert all(torch.equal(ours[name].full(), torch.arange(6.0) + number) for number, name in enumerate(NAMES))
    assert ours.rank_state(0) == {"seed": torch.tensor(5)}
    assert ours.rank_state(1) == {}
    assert torch.equal(ours.trainer_state()["of"], torch.ones(2))
    assert torch.equal(ours.optimizer["m"][1], torch.tensor([6.0, 8.0, 10.0]))
    assert checkpoint.verify(tmp_path).ok
    checkpoint.gather(tmp_path, tmp_path / "out.safetensors")
    assert told(tmp_path / "out.safetensors").table


@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "replaced", "fails"])
def test_a_table_that_has_changed_since_the_manifest_was_read_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    save(tmp_path)
    ours = checkpoint.read(tmp_path)
    path = tmp_path / ours.manifest.table.path
    data = path.read_bytes()
    if how == "removed":
        checkpoint.remove(tmp_path)
    elif how == "replaced":
        save(tmp_path, add=1.0)
    elif how == "cut":
        path.write_bytes(data[:1000])
    elif how == "fails":

        def fail(self: LocalStore, name: str) -> Any:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(LocalStore, "reading", fail)
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    error: type[CheckpointError] = CheckpointReplacedError if how in ("removed", "replaced") else CorruptCheckpointError
    error = CheckpointError if how == "fails" else error
    with pytest.raises(CheckpointError) as caught:
        assert ours.manifest.chunks.table.data
    assert type(caught.value) is error
    assert "table-" in str(caught.value) or error is CheckpointReplacedError
