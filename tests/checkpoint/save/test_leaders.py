"""Work of a save that some ranks do for others: the checkpoint is the same, and so is what is said of errors.

Leaders join what groups of ranks wrote; and each rank writes a part of what all hold alike, which must be the same.
"""

from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint import ranks as groups
from lightning_shard.checkpoint.saving import background, save
from lightning_shard.errors import CheckpointError, UnsupportedStateError
from lightning_shard.testing import ranks, run_ranks


def state_of_a_stage(mesh):
    """Half of the ranks hold one stage, the others another; both have one tensor, which they cut in different ways."""
    stage, data = mesh.get_local_rank("pipeline"), mesh["data"]
    tied = torch.arange(24.0).view(6, 4)
    plain = torch.full((5,), stage + 0.5)
    return {
        f"layer{stage}": distribute_tensor(torch.randn(10, 4), data, [Shard(0)], src_data_rank=None),
        "tied": distribute_tensor(tied, data, [Shard(stage)], src_data_rank=None),
        f"plain{stage}": plain,
        f"alias{stage}": plain,
    }


def save_to(path, state, mesh, save=checkpoint.save):
    of_trainer, of_rank = {"step": 3, "of": torch.ones(2)}, {"seed": torch.tensor(dist.get_rank())}
    save(state, path, mesh=mesh["data"], layout={"ranks": 4}, trainer_state=of_trainer, rank_state=of_rank)


def raises_on(rank):
    def fail(*args):
        raise ValueError("a fault of the leader's own")

    return mock.patch.object(save, "joined", fail) if dist.get_rank() == rank else mock.MagicMock()


def try_sizes(root):
    """Saves by groups of so many ranks, and errors in them; returns this rank's errors."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    state = state_of_a_stage(mesh)
    with mock.patch.object(save, "new_attempt", return_value="0123456789ab"):
        for size in (64, 3, 2, 1):
            with mock.patch.object(groups, "GROUP_RANKS", size):
                save_to(root / f"{size}.ckpt", state, mesh)
    with (
        mock.patch.object(background, "new_attempt", return_value="0123456789ab"),
        mock.patch.object(groups, "GROUP_RANKS", 1),
        mock.patch.object(save, "joined", wraps=save.joined) as joining,
        checkpoint.AsyncSaver() as saver,
    ):
        save_to(root / "background.ckpt", state, mesh, save=saver.save)
        saver.wait()
    assert joining.call_count == 1  # on every rank: each is the leader of its group
    dist.barrier()
    errors = []
    with mock.patch.object(groups, "GROUP_RANKS", 2):
        for case in ("leader", "member", "both", "tied"):
            changed = {name: tensor + 1 for name, tensor in state.items()}
            if case == "tied" and "layer1" in changed:
                changed["tied"] += 1
            if case in ("member", "both") and dist.get_rank() == 3:
                changed["plain1"] = "text"
            if case == "both" and dist.get_rank() == 1:
                changed["plain0"] = b"bytes"
            with raises_on(2 if case == "leader" else None), pytest.raises(Exception, match="") as caught:
                save_to(root / "2.ckpt", changed, mesh)
            errors.append(caught.value)
    return errors


def test_several_leaders_make_the_manifest_that_one_makes_and_their_errors_are_all_ranks(tmp_path):
    first, *others = run_ranks(try_sizes, 4, tmp_path)
    manifests = {path.name: (path / "manifest.json").read_bytes() for path in tmp_path.iterdir()}
    assert set(manifests) == {"64.ckpt", "3.ckpt", "2.ckpt", "1.ckpt", "background.ckpt"}
    assert len(set(manifests.values())) == 1
    # what the faults left at the path is the checkpoint that was there, and nothing beside it
    kept, tried = checkpoint.read(tmp_path / "64.ckpt"), checkpoint.read(tmp_path / "2.ckpt")
    assert checkpoint.verify(tmp_path / "2.ckpt").ok
    assert set(kept) == {"layer0", "layer1", "tied", "plain0", "plain1", "alias0", "alias1"}
    assert all(torch.equal(kept[name].full(), tried[name].full()) for name in kept)
    assert len(list((tmp_path / "2.ckpt").rglob("*"))) == len(list((tmp_path / "64.ckpt").rglob("*")))
    leader, member, both, tied = zip(first, *others)
    assert [str(error) for error in leader[:2]] == ["rank 2: ValueError: a fault of the leader's own"] * 2
    assert all(isinstance(error, CheckpointError) for error in (*leader[:2], leader[3]))
    assert isinstance(leader[2], ValueError)
    assert all(isinstance(error, UnsupportedStateError) for error in (*member, *both))
    assert str(member[0]).startswith("rank 3: 'plain1' is a str")
    assert [str(error).startswith("rank 1: 'plain0' is a bytes") for error in both] == [True, False, True, False]
    assert all("'tied' is on the ranks [0, 1] and on the ranks [2, 3]" in str(error) for error in tied)


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
