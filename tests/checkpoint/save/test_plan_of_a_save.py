"""Who holds, writes and reads which box: plain arithmetic, compared with torch's own and with plain slicing."""

import itertools
import math
import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shard import checkpoint
from lightning_shard.checkpoint import shards
from lightning_shard.checkpoint.boxes import Box, coverage_fault, rows_of, uncovered
from lightning_shard.checkpoint.catalog import Earlier
from lightning_shard.checkpoint.loading import ranges
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.saving import commit, files, merge
from lightning_shard.checkpoint.saving.accounts import Account, joined
from lightning_shard.checkpoint.saving.files import Piece, arranged, write_file
from lightning_shard.checkpoint.saving.part import my_cuts, outlined
from lightning_shard.checkpoint.shards import Shared, deal, share
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.checkpoint.tensors import Frame, KnownMesh, Located, Spread, _boxes, _splits
from lightning_shard.errors import CheckpointError

shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
mesh_shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def placed(draw, shape=None, mesh_shape=None):
    """A shape, a mesh, and a placement per axis: sharded, replicated, or strided as FSDP2 over tensor parallel."""
    shape = shape or draw(shapes)
    mesh_shape = mesh_shape or draw(mesh_shapes)
    dims = [draw(st.one_of(st.none(), st.integers(0, len(shape) - 1))) for _ in mesh_shape]
    placements = []
    for axis, dim in enumerate(dims):
        later = math.prod(n for n, other in zip(mesh_shape[axis + 1 :], dims[axis + 1 :]) if other == dim)
        if dim is None:
            placements.append(Replicate())
        elif axis == 0 and later > 1 and draw(st.booleans()):
            placements.append(_StridedShard(dim, split_factor=later))
        else:
            placements.append(Shard(dim))
    return shape, mesh_shape, tuple(placements)


def coordinates(mesh_shape):
    return list(itertools.product(*(range(n) for n in mesh_shape)))


def by_fsdp(full, placements, mesh_shape, coordinate):
    """The local tensor as FSDP2 makes it of what tensor parallelism left: strided axes last, each a plain chunk."""
    axes = list(range(len(mesh_shape)))
    strided = [axis for axis in axes if isinstance(placements[axis], _StridedShard)]
    for axis in [axis for axis in axes if axis not in strided] + strided[::-1]:
        if not placements[axis].is_replicate():
            shards = Shard(placements[axis].dim)._split_tensor(full, mesh_shape[axis], with_padding=False)[0]
            full = shards[coordinate[axis]]
    return full


# -- sharing ----------------------------------------------------------------------------------------------------------

boxes = shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.sampled_from([1, 2, 4, 8])))


@given(st.lists(boxes, max_size=6), st.integers(1, 7), st.sampled_from([1, 64, 2**16]))
@settings(max_examples=100, deadline=None)
def test_shares_make_up_every_tensor_once(items, holders, min_part):
    shared = [Shared(Box.whole(shape), width) for shape, width in items]
    with mock.patch.object(shards, "MIN_PART_BYTES", min_part):
        shares = [share(shared, holders, index) for index in range(holders)]
        dealt = list(deal(shared, holders))
    assert dealt == [
        (number, index, part)
        for number, parts in enumerate(zip(*shares))
        for index, part in enumerate(parts)
        if part is not None and part.numel
    ]
    for item, parts in zip(shared, zip(*shares)):
        assert covers(item.box.sizes, [part for part in parts if part is not None])


# -- coverage ---------------------------------------------------------------------------------------------------------


def covers(shape, boxes):
    """Looked at together with a tensor that is covered, before and after it."""
    boxes = [Box.whole(shape), *(box for box in boxes if box.numel or 0 in shape), Box.whole(shape)]
    offsets, sizes = (
        np.array(part, np.int64).reshape(len(boxes), len(shape))
        for part in ([box.offsets for box in boxes], [box.sizes for box in boxes])
    )
    shapes = np.array([shape] * 3, np.int64).reshape(3, len(shape))
    first, found, last = uncovered(shapes, np.array([0, 1, len(boxes) - 1, len(boxes)]), offsets, sizes)
    assert not first
    assert not last
    return not found


def cut_at_random(shape, chooser):
    """Boxes that make up a tensor, in no grid."""
    boxes = [Box.whole(shape)]
    for _ in range(chooser.randrange(6)):
        box = boxes.pop(chooser.randrange(len(boxes)))
        dims = [dim for dim, size in enumerate(box.sizes) if size > 1]
        dim = chooser.choice(dims) if dims else None
        at = chooser.randrange(1, box.sizes[dim]) if dims else 0
        boxes += [rows_of(box, dim, 0, at), rows_of(box, dim, at, box.sizes[dim])] if dims else [box]
    chooser.shuffle(boxes)
    return boxes


@given(st.lists(st.integers(1, 4), max_size=3).map(tuple), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_a_cover_is_exact_if_each_element_is_in_one_box(shape, seed):
    chooser = random.Random(seed)
    boxes = cut_at_random(shape, chooser)
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
    assert covers(shape, boxes) == bool((counts == 1).all())
    if counts.sum() < counts.size:
        assert "in no box" in coverage_fault(shape, boxes)
    elif (counts != 1).any():
        assert "overlap" in coverage_fault(shape, boxes)


# -- any layout to any layout -----------------------------------------------------------------------------------------


def save_simulated(folder, full, mesh_shape, placements, extra_axis):
    """Save what the ranks of a mesh write, one after another in this process."""
    count = math.prod(mesh_shape)
    grid = torch.arange(count * extra_axis).view(*mesh_shape, extra_axis)
    accounts = []
    store = LocalStore(str(folder))
    for rank in range(count * extra_axis):
        frame = Frame(grid, rank)
        *coordinate, extra = ((grid == rank).nonzero().tolist())[0]
        mesh = KnownMesh(lambda: None, grid[..., extra], tuple(coordinate))
        located = []
        for name, tensor in full.items():
            where = placements[name]
            splits = _splits(name, where, mesh_shape, tuple(coordinate))
            local = by_fsdp(tensor, where, mesh_shape, coordinate)
            places = _boxes(tuple(tensor.shape), splits, tuple(local.shape))
            located.append(Located(name, local, Spread(tuple(tensor.shape), places, mesh, where)))
        account = Account.of_rank(rank, frame.ranks)
        pieces = [
            (Piece(t.name, t.local.dtype, t.spread.shape, cut.box), cut.of(t))
            for cut in my_cuts(list(enumerate(outlined(located))), frame)
            for t in [located[cut.number]]
        ]
        if pieces:
            path = f"model/rank-{rank:05d}-{'0' * 12}.safetensors"
            account.add("model", write_file(store, path, *arranged(pieces), {}, digests=True, durable=False))
        accounts.append(account)
    manifest = merge.Merged([joined(accounts)]).manifest(attempt="0" * 12, layout=None, digests=True)
    commit.commit(store, manifest, Earlier(), durable=False)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_layout_reads_into_any_other(tmp_path_factory, data):
    source_mesh, target_mesh = data.draw(mesh_shapes), data.draw(mesh_shapes)
    full, placements = {}, {}
    for name in "abc"[: data.draw(st.integers(1, 3))]:
        shape, _, placements[name] = data.draw(placed(mesh_shape=source_mesh))
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
        full[name] = torch.arange(1, 1 + math.prod(shape)).view(shape).to(dtype)
    # small limits, so that small tensors take the paths of large ones
    limits = mock.patch.multiple(files, BLOCK_BYTES=64, WRITE_STEP_BYTES=24, STAGING_BYTES=32)
    reading = mock.patch.multiple(ranges, BATCH_BYTES=128, SPAN_BYTES=data.draw(st.sampled_from([32, 4096])))
    grid, parts = mock.patch.object(merge, "BLOCK_BYTES", 64), mock.patch.object(shards, "MIN_PART_BYTES", 8)
    steps = mock.patch.object(LocalStore, "step_bytes", data.draw(st.sampled_from([24, 4096])))
    with limits, reading, grid, parts, steps:
        folder = tmp_path_factory.mktemp("checkpoint")
        save_simulated(folder, full, source_mesh, placements, data.draw(st.integers(1, 2)))
        saved = checkpoint.read(folder)
        for name, tensor in full.items():
            _, _, where = data.draw(placed(shape=tuple(tensor.shape), mesh_shape=target_mesh))
            for coordinate in coordinates(target_mesh):
                expected = by_fsdp(tensor, where, target_mesh, coordinate)
                splits = _splits(name, where, target_mesh, coordinate)
                got = torch.zeros_like(expected)
                if data.draw(st.booleans()) and got.ndim > 1:
                    got = torch.zeros(expected.shape[::-1], dtype=expected.dtype).permute(*range(got.ndim)[::-1])
                reads = []
                for place in _boxes(tuple(tensor.shape), splits, tuple(expected.shape)):
                    view = got[tuple(slice(a, a + n) for a, n in zip(place.local_offsets, place.box.sizes))]
                    reads.append(Read(saved[name], place.box, view))
                saved.fetch(reads, verify=data.draw(st.booleans()))
                assert torch.equal(got, expected)


# -- who holds what ---------------------------------------------------------------------------------------------------


def test_holders_on_a_part_of_the_mesh():
    grid = torch.arange(8).view(2, 2, 2)  # replicas × data × tensor
    frame = Frame(grid, 5)  # at (1, 0, 1)
    data = grid[1, :, 1]
    assert frame.holders("t", data, (0,)) == (0, 1, 4, 5)
    assert frame.holders("t", data, ()) == tuple(range(8))
    assert frame.holders("t", grid[:, :, 1], (1,)) == (0, 1, 4, 5)
    assert frame.holders("t", grid, (1, 2)) == (1, 5)
    assert frame.holders("t", grid[:, :, 1].reshape(-1), (0,)) == (4, 5)  # a flattened mesh


def test_a_mesh_that_does_not_fit_is_refused():
    frame = Frame(torch.arange(4).view(2, 2), 0)
    with pytest.raises(CheckpointError, match="aren't among those"):
        frame.holders("t", torch.tensor([0, 5]), (0,))
    with pytest.raises(CheckpointError, match="aren't complete axes"):
        frame.holders("t", torch.tensor([0, 3]), (0,))
    with pytest.raises(CheckpointError, match="this is rank 9"):
        Frame(torch.arange(4), 9)
