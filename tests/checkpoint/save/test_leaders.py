"""Groups of ranks whose leaders join what these wrote: the checkpoint is the same, and so is what is said of errors."""

from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint import ranks
from lightning_shard.checkpoint.saving import background, save
from lightning_shard.errors import CheckpointError, UnsupportedStateError
from lightning_shard.testing import run_ranks


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
            with mock.patch.object(ranks, "GROUP_RANKS", size):
                save_to(root / f"{size}.ckpt", state, mesh)
    with (
        mock.patch.object(background, "new_attempt", return_value="0123456789ab"),
        mock.patch.object(ranks, "GROUP_RANKS", 1),
        mock.patch.object(save, "joined", wraps=save.joined) as joining,
        checkpoint.AsyncSaver() as saver,
    ):
        save_to(root / "background.ckpt", state, mesh, save=saver.save)
        saver.wait()
    assert joining.call_count == 1  # on every rank: each is the leader of its group
    dist.barrier()
    errors = []
    with mock.patch.object(ranks, "GROUP_RANKS", 2):
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
