"""All ranks' tensors to one checkpoint: those of one name must be equal, whatever else differs; else none is saved."""

import itertools

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.content import content_sum
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.errors import CheckpointError
from lightning_shard.testing import ranks

A = torch.arange(40.0).view(10, 4)


def refuses(state, path, says, **options):
    with pytest.raises(CheckpointError, match=says):
        checkpoint.save(state, path, **options)
    assert not checkpoint.exists(path)


@ranks(4)
def test_different_tensors_of_one_name_are_refused(tmp_path):
    """Pipeline stages that number their layers from 0 would lose half of the model."""
    rank = dist.get_rank()
    stage = init_device_mesh("cpu", (4, 1), mesh_dim_names=("stage", "data"))["data"]
    for other in (A + 1, A.double(), A[:5]):
        state = {"w": (A, other)[rank]} if rank < 2 else {f"own{rank}": A}
        refuses(state, tmp_path, r"'w' is on the ranks \[0\] and on the ranks \[1\].*one of the two", mesh=stage)
    sharded = distribute_tensor(A, init_device_mesh("cpu", (4,)), [Shard(0)], src_data_rank=None)
    for other, says in (
        (A[:5], "belong to the same mesh"),
        (A + 1, "'w' isn't sharded, but its values differ between rank 0 and rank 2"),
        (sharded, "Rank 2 and rank 0 hold the same tensors, but different ones of them"),
    ):
        refuses({"w": other if rank == 2 else A}, tmp_path, says)


@ranks(4, timeout_s=120)
def test_a_name_may_be_tied_on_one_stage_and_plain_on_another_if_it_is_equal(tmp_path):
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("stage", "data"))["data"]
    for order, equal in itertools.product(itertools.permutations(range(3)), (True, False)):
        tied = A.clone()
        states = [{"a": tied, "b": tied, "c": tied}, {"b": A if equal else A + 1}, {"a": tied, "b": tied}, {"d": A}]
        state, path = states[(*order, 3)[dist.get_rank()]], tmp_path / f"{order} {equal}"
        if not equal:
            refuses(state, path, "differs in content", mesh=mesh)
            continue
        checkpoint.save(state, path, mesh=mesh, fsync=False)
        stored = checkpoint.read(path)
        assert {name: stored.alias_of(name) for name in stored} == {"a": None, "b": None, "c": "a", "d": None}
        assert all(torch.equal(tensor, A) for tensor in stored.full().values())


@ranks(4)
def test_tensors_that_are_cut_elsewhere_are_compared_by_their_sums(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    stage, data = mesh.get_local_rank("stage"), mesh["data"]
    for digests, equal in itertools.product((True, False), repeat=2):
        whole = A.clone()
        whole[9, 3] += 0 if equal else stage
        tied = distribute_tensor(whole, data, [Shard(stage)], src_data_rank=None)
        state, path = {"tied": tied, f"own{stage}": A}, tmp_path / f"{digests} {equal}"
        if equal:
            checkpoint.save(state, path, mesh=data, digests=digests)
            assert torch.equal(checkpoint.read(path)["tied"].full(), A)
        else:
            says = r"'tied' is on the ranks \[0, 1\] and on the ranks \[2, 3\]"
            refuses(state, path, says, mesh=data, digests=digests)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_sums_do_not_depend_on_cuts_and_see_every_element(dtype):
    def sum_of(offsets, part):
        return content_sum(part, Box(offsets, tuple(part.shape)), (6, 40)) % 2**64

    data = torch.arange(240, dtype=torch.int64).remainder(2 if dtype is torch.bool else 120).to(torch.uint8)
    tensor = data.repeat(dtype.itemsize).view(dtype).view(6, 40)
    whole = sum_of((0, 0), tensor)
    cut = [sum_of((r, c), tensor[r : r + 2, c : c + 20]) for r in (0, 2, 4) for c in (0, 20)]
    assert sum(cut) % 2**64 == whole
    for place in ((0, 0), (3, 7), (5, 39)):
        changed = tensor.clone()
        changed.view(torch.uint8)[place[0], place[1] * dtype.itemsize] ^= 1
        assert sum_of((0, 0), changed) != whole
    swapped = tensor.clone()
    swapped[0, :1], swapped[0, 1:2] = tensor[0, 1:2], tensor[0, :1]
    assert sum_of((0, 0), swapped) != whole
