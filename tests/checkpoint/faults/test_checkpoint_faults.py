"""Failures of saves and gathers: what was there stays whole, and nobody else's files are taken."""

import os

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError, CorruptCheckpointError
from lightning_shard.testing import ranks
from tests.checkpoint.manifests import edit

STATE = {"w": torch.arange(3000.0).view(100, 30), "b": torch.ones(7, dtype=torch.bfloat16)}


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "step=1.ckpt"
    checkpoint.save(STATE, path, optimizer={"w.m": torch.ones(50)}, trainer_state={"t": torch.ones(3)})
    return path


def files(path):
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json")


def age(path, hours=2):
    """Make files as old as leftovers must be to be removed."""
    for file in path.rglob("*"):
        then = file.stat().st_mtime - hours * 3600
        os.utime(file, (then, then))


def test_only_our_own_leftovers_are_removed(saved):
    keep = [
        saved / "notes.txt",
        saved / "model" / "rank-00000.safetensors",
        saved / "model" / "x-0123456789ab.safetensors",
    ]
    for file in keep:
        file.write_text("mine")
    leftover = saved / "optimizer" / "rank-00009-0123456789ab.safetensors"
    leftover.write_text("torn")
    # an old manifest that names a file of someone else's
    edit(saved, lambda manifest: manifest["files"].append({"path": "notes.txt", "bytes": 4, "digest": "0" * 32}))
    checkpoint.save({"w": torch.zeros(1)}, saved)
    assert all(file.read_text() == "mine" for file in keep)
    assert leftover.exists(), "it may be of a save under way"
    age(saved)
    checkpoint.save({"w": torch.zeros(1)}, saved)
    assert all(file.read_text() == "mine" for file in keep)
    assert not leftover.exists()


def test_a_failed_gather_leaves_no_file(saved, tmp_path):
    out = tmp_path / "out" / "model.safetensors"
    checkpoint.gather(saved, out)
    good = out.read_bytes()
    (file,) = (saved / "model").iterdir()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        checkpoint.gather(saved, out)
    assert list(out.parent.iterdir()) == [out]
    assert out.read_bytes() == good


# -- ranks ------------------------------------------------------------------------------------------------------------


def sharded(value):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((40, 3), float(value)), mesh, [Shard(0)], src_data_rank=None)}


@ranks(2)
def test_a_failing_commit_raises_on_all(tmp_path):
    if dist.get_rank() == 0:
        os.link = lambda *args: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.save(sharded(1), tmp_path / "a.ckpt")
    dist.barrier()
    assert not (tmp_path / "a.ckpt").exists()


def test_an_interruption_after_the_commit_takes_nothing_away(saved, monkeypatch):
    new = {"w": torch.zeros(10, 10)}
    original = LocalStore.names

    def interrupted(self):
        original(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, "names", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(new, saved)
    monkeypatch.undo()
    assert checkpoint.verify(saved).ok
    assert torch.equal(checkpoint.read(saved)["w"].full(), new["w"])


def test_a_manifest_that_came_through_in_spite_of_an_error_keeps_its_files(saved, monkeypatch):
    new = {"w": torch.zeros(10, 10)}
    monkeypatch.setattr("lightning_shard.checkpoint.store.local._fsync_folder", lambda path: None)
    original = os.replace

    def replaced(*paths):
        original(*paths)
        if os.path.basename(paths[1]) == "manifest.json":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save(new, saved)
    assert checkpoint.verify(saved).ok
    assert torch.equal(checkpoint.read(saved)["w"].full(), new["w"])
