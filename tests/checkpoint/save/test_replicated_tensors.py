"""Each rank writes a part of what all hold alike: so it must be the same, which costs next to nothing to tell."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_shard import checkpoint
from lightning_shard.errors import CheckpointError
from lightning_shard.testing import ranks

LARGE = 2**19


def _states(rank):
    """By name: what differs, and a state in which only that does."""
    mesh = init_device_mesh("cpu", (2,))

    def dtensor(local, placement):
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    same = {"same": torch.ones(1000), "sharded": dtensor(torch.full((2, 3), float(rank)), Shard(0))}
    apart = torch.arange(float(LARGE)) + rank
    yield "small", {**same, "small": torch.tensor(float(rank))}
    yield "large", {**same, "large": apart}
    yield "strided", {**same, "strided": apart.view(2, -1).t()}
    yield "replicated", {**same, "replicated": dtensor(apart, Replicate())}
    yield "moment", {**same, "moment": apart.to(torch.bfloat16)[-8192 * 3 :]}
    yield None, same
    # large tensors of any kind that are the same
    yield None, {"a": apart - rank, "b": dtensor(apart - rank, Replicate()), "c": (apart - rank).view(2, -1).t()}


@ranks(2)
def test_a_tensor_that_ranks_hold_alike_and_that_differs_is_refused_by_name(tmp_path):
    rank, folder = dist.get_rank(), tmp_path
    for number, (differs, state) in enumerate(_states(rank)):
        path = f"{folder}/{number}"
        if differs is None:
            checkpoint.save(state, path)
            assert checkpoint.exists(path)
            continue
        with pytest.raises(
            CheckpointError, match=f"'{differs}' isn't sharded, but its values differ between rank 0 and rank 1"
        ):
            checkpoint.save(state, path)
        assert not checkpoint.exists(path)
    saver = checkpoint.AsyncSaver()
    saver.save({"w": torch.full((4,), float(rank))}, f"{folder}/async")
    with pytest.raises(CheckpointError, match="'w' isn't sharded"):
        saver.wait()
    saver.close()


@ranks(2)
def test_what_is_compared_is_the_content_whoever_holds_it_how(tmp_path):
    """One content, and on each rank other memory; meshes with the ranks in another order; and what differs there."""
    rank, folder = dist.get_rank(), tmp_path
    reversed_mesh = DeviceMesh("cpu", [1, 0])

    def replicated(local):
        return DTensor.from_local(local, reversed_mesh, [Replicate()], run_check=False)

    for name, values in {"small": torch.arange(64.0), "large": torch.arange(float(LARGE))}.items():
        square = values.view(8, -1)
        strided = square.t().contiguous().t()
        same = {name: strided if rank else square, "d": replicated(square.clone()), "mixed": square.clone()}
        if rank:
            same["mixed"] = replicated(strided.clone())
            same = dict(reversed(same.items()))
        checkpoint.save(same, f"{folder}/{name}", fsync=False)
        assert all(torch.equal(found, square) for found in checkpoint.read(f"{folder}/{name}").full().values())
        with pytest.raises(CheckpointError, match="'d' isn't sharded, but its values differ between rank 0 and rank 1"):
            checkpoint.save({"d": replicated(square + rank)}, f"{folder}/never")
    tied = torch.ones(4)
    with pytest.raises(CheckpointError, match="'a' shares its memory with 'b' on rank 1, and no rank has written 'b'"):
        checkpoint.save(dict.fromkeys(("b", "a") if rank else ("a", "b"), tied), f"{folder}/never")
    assert not checkpoint.exists(f"{folder}/never")
