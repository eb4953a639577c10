"""All ranks' accounts to one manifest: tensors of one name on several meshes must be equal, whatever else differs."""

import itertools
import pickle

import pytest
import torch

from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.content import content_sum
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.saving.accounts import Account, joined
from lightning_shard.checkpoint.saving.files import Piece, arranged, write_file
from lightning_shard.checkpoint.saving.merge import Merged
from lightning_shard.checkpoint.saving.part import FINGERPRINT_BYTES
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError

HEAD = {"attempt": "0" * 12, "layout": None, "writer": "test", "digests": True}


def rows(name, tensor, start=0, stop=None):
    part = tensor[start:stop]
    return piece(name, tensor.shape, (start, *(0,) * (tensor.ndim - 1)), part)


def piece(name, shape, offsets, part):
    return Piece(name, part.dtype, tuple(shape), Box(offsets, tuple(part.shape))), part


def account(folder, rank, mesh_ranks, pieces, aliases=None, digests=True):
    made = Account(rank, mesh_ranks, aliases={"model": aliases} if aliases else {})
    path = f"model/rank-{rank:05d}-{'0' * 12}.safetensors"
    made.add("model", write_file(LocalStore(str(folder)), path, *arranged(pieces), {}, digests=digests, durable=False))
    return made


def merged(accounts):
    """Joined by one rank or by several: the same comes of it."""
    ends = []
    for size in (len(accounts), 2, 1):
        groups = [accounts[start : start + size] for start in range(0, len(accounts), size)]
        parts = [pickle.loads(pickle.dumps(joined(group))) for group in groups]
        try:
            found = Merged(parts)
            ends.append(found.manifest(**HEAD).to_bytes())
        except CheckpointError as error:
            found = error
            ends.append(str(error))
    assert len(set(ends)) == 1
    if isinstance(found, CheckpointError):
        raise found
    return found


A = torch.arange(40.0).view(10, 4)


@pytest.mark.parametrize("other", [A + 1, A.double(), A[:5]], ids=["content", "dtype", "shape"])
def test_different_tensors_of_one_name_are_refused(tmp_path, other):
    """Pipeline stages that number their layers from 0 would lose half of the model."""
    accounts = [account(tmp_path, 0, (0,), [rows("w", A)]), account(tmp_path, 1, (1,), [rows("w", other)])]
    with pytest.raises(CheckpointError, match=r"'w' is on the ranks \[0\] and on the ranks \[1\].*one of the two"):
        merged(accounts).unsettled()


def test_equal_tensors_of_one_name_are_one(tmp_path):
    accounts = [account(tmp_path, 0, (0,), [rows("w", A)]), account(tmp_path, 1, (1,), [rows("w", A.clone())])]
    found = merged(accounts)
    assert found.unsettled() == []
    assert [chunk.file for chunk in found.manifest(**HEAD).model["w"].chunks] == [0]


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("equal", [True, False])
def test_tensors_that_are_cut_elsewhere_are_compared_by_their_sums(tmp_path, equal, digests):
    other = A.clone()
    if not equal:
        other[9, 3] += 1
    pieces = {0: [rows("w", A, 0, 5)], 1: [rows("w", A, 5)], 2: [rows("w", other, 0, 2)], 3: [rows("w", other, 2)]}
    accounts = [account(tmp_path, r, (r // 2 * 2, r // 2 * 2 + 1), p, digests=digests) for r, p in pieces.items()]
    found = merged(accounts)
    assert found.unsettled() == [("model", "w")]
    sums = [{("model", "w"): content_sum(part)} for part in pieces.values()]
    if equal:
        found.settle(sums)
    else:
        with pytest.raises(CheckpointError, match=r"'w' is on the ranks \[0, 1\] and on the ranks \[2, 3\]"):
            found.settle(sums)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
@pytest.mark.parametrize("equal", [True, False])
def test_a_name_may_be_tied_on_one_stage_and_plain_on_another_if_it_is_equal(tmp_path, order, equal):
    stages = [
        ([rows("a", A)], {"b": "a", "c": "a"}),
        ([rows("b", A if equal else A + 1)], None),
        ([rows("a", A.clone())], {"b": "a"}),
    ]
    accounts = [account(tmp_path, rank, (rank,), *stages[stage]) for rank, stage in enumerate(order)]
    if not equal:
        with pytest.raises(CheckpointError, match=r"differs in content"):
            merged(accounts).unsettled()
        return
    found = merged(accounts)
    assert found.unsettled() == []
    model = found.manifest(**HEAD).model
    assert sorted(model) == ["a", "b", "c"]
    assert model["c"].shape == A.shape
    assert (model.alias_of("a"), model.alias_of("b"), model.alias_of("c")) == (None, None, "a")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_sums_do_not_depend_on_cuts_and_see_every_element(dtype):
    data = torch.arange(240, dtype=torch.int64).remainder(2 if dtype is torch.bool else 120).to(torch.uint8)
    tensor = data.repeat(dtype.itemsize).view(dtype).view(6, 40)
    whole = content_sum([piece("t", (6, 40), (0, 0), tensor)])
    cut = [piece("t", (6, 40), (r, c), tensor[r : r + 2, c : c + 20]) for r in (0, 2, 4) for c in (0, 20)]
    assert content_sum(cut) == whole == sum(content_sum([part]) for part in cut) % 2**64
    for place in ((0, 0), (3, 7), (5, 39)):
        changed = tensor.clone()
        changed.view(torch.uint8)[place[0], place[1] * dtype.itemsize] ^= 1
        assert content_sum([piece("t", (6, 40), (0, 0), changed)]) != whole
    swapped = tensor.clone()
    swapped[0, :1], swapped[0, 1:2] = tensor[0, 1:2], tensor[0, :1]
    assert content_sum([piece("t", (6, 40), (0, 0), swapped)]) != whole


def test_ranks_of_a_mesh_that_hold_a_tensor_in_other_shapes_are_refused(tmp_path):
    accounts = [account(tmp_path, rank, (0, 1), [rows("w", tensor)]) for rank, tensor in enumerate([A, A[:5]])]
    with pytest.raises(CheckpointError, match=r"'w' is F32 \(5, 4\) on rank 1, and F32 \(10, 4\) on a rank before it"):
        merged(accounts)


def test_ranks_that_hold_a_plain_tensor_otherwise_are_named(tmp_path):
    accounts = [account(tmp_path, 0, (0, 1, 2), [rows("w", A)]), *(Account(rank, (0, 1, 2)) for rank in (1, 2))]
    for one in accounts:
        one.replicated, one.contents = b"v\nw", b"0" * 2 * FINGERPRINT_BYTES
    merged(accounts)
    accounts[2].contents = b"0" * FINGERPRINT_BYTES + b"1" * FINGERPRINT_BYTES
    with pytest.raises(CheckpointError, match="'w' isn't sharded, but its values differ between rank 0 and rank 2"):
        merged(accounts)
    accounts[2].replicated = b"w"
    with pytest.raises(CheckpointError, match="Rank 2 and rank 0 hold the same tensors, but different ones of them"):
        merged(accounts)
