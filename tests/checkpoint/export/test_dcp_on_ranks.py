"""DCP's own files and ours, of the same states on four ranks: each is the other's second opinion."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shard import checkpoint
from lightning_shard.errors import CheckpointError, UnsupportedStateError
from lightning_shard.testing import ranks
from tests.checkpoint.laid_out import assert_same, full_state, laid_out


@ranks(4, timeout_s=120)
def test_dcp_and_we_read_each_others_states_back_alike_on_any_layout(tmp_path):
    names = ["shards", "hsdp", "two axes", "replicated"]  # DCP takes no others
    for index, source in enumerate(names):
        state, _ = laid_out(source)
        by_dcp, ours, plain = (tmp_path / f"{source} {kind}" for kind in ("dcp", "ours", "save"))
        dcp.save(state, checkpoint_id=by_dcp)
        dcp.save(state, storage_writer=checkpoint.DcpWriter(ours, fsync=False))
        checkpoint.save(state, plain, fsync=False)
        if dist.get_rank() == 0:
            assert checkpoint.verify(ours).ok
            assert checkpoint.diff(ours, plain).ok
        for target in (names[index - 1],):
            loaded = [laid_out(target, fill=0)[0] for _ in range(4)]
            dcp.load(loaded[0], checkpoint_id=by_dcp)
            dcp.load(loaded[1], storage_reader=checkpoint.DcpReader(ours))
            dcp.load(loaded[2], storage_reader=checkpoint.DcpReader(plain))
            checkpoint.load(ours, loaded[3])
            for other in (*loaded[1:], state):
                assert_same(other, loaded[0])


@ranks(4, timeout_s=120)
def test_one_rank_that_fails_fails_all_and_the_earlier_checkpoint_stays(tmp_path):
    rank, path = dist.get_rank(), tmp_path / "c"
    state, _ = laid_out("shards")
    dcp.save(state, storage_writer=checkpoint.DcpWriter(path, fsync=False))
    before = (path / "manifest.json").read_bytes()
    dist.barrier()
    value = {f"of rank {rank}": print} if rank == 2 else {}
    with pytest.raises(CheckpointException) as caught:
        dcp.save({**laid_out("shards", fill=1)[0], **value}, storage_writer=checkpoint.DcpWriter(path, fsync=False))
    assert set(caught.value.failures) == {2}
    assert isinstance(caught.value.failures[2][0], UnsupportedStateError)

    class Broken(checkpoint.DcpWriter):
        def finish(self, metadata, results):
            results[1].clear()  # as if rank 1's part were lost
            super().finish(metadata, results)

    with pytest.raises(CheckpointException) as caught:
        dcp.save(laid_out("shards", fill=1)[0], storage_writer=Broken(path, fsync=False))
    assert set(caught.value.failures) == {0}
    assert isinstance(caught.value.failures[0][0], CheckpointError)
    assert "don't cover the tensor exactly" in str(caught.value.failures[0][0])
    dist.barrier()
    assert (path / "manifest.json").read_bytes() == before
    into, _ = laid_out("hsdp", fill=0)
    dcp.load(into, storage_reader=checkpoint.DcpReader(path))
    assert_same(into, state)

    # what the failed ones left goes with the next commit, when it is old
    if rank == 0:
        for file in (path / "model").iterdir():
            os.utime(file, (0, 0))
    dist.barrier()
    dcp.save(laid_out("shards", fill=2)[0], storage_writer=checkpoint.DcpWriter(path, fsync=False))
    stored = checkpoint.read(path)
    assert {f"model/{file.name}" for file in (path / "model").iterdir()} == {f.path for f in stored.manifest.files}
    assert stored["uneven"].full().eq(2).all()


@ranks(4, timeout_s=120)
def test_other_ways_to_call_dcp_and_shards_that_it_misreads(tmp_path):
    rank = dist.get_rank()
    state, _ = laid_out("shards")
    future = dcp.async_save(state, storage_writer=checkpoint.DcpWriter(tmp_path / "async", fsync=False))
    expected = full_state()
    for tensor in state.values():
        tensor.zero_()
    future.result()
    into, _ = laid_out("two axes", fill=0)
    dcp.load(into, storage_reader=checkpoint.DcpReader(tmp_path / "async"))
    assert_same(into, expected)

    own = {"w": torch.full((3,), float(rank))}
    writer = checkpoint.DcpWriter(tmp_path / f"alone {rank}", fsync=False)
    dcp.save(own, storage_writer=writer, no_dist=True)
    into = {"w": torch.zeros(3)}
    dcp.load(into, storage_reader=checkpoint.DcpReader(tmp_path / f"alone {rank}"), no_dist=True)
    assert into["w"].tolist() == [rank] * 3
    assert checkpoint.read(tmp_path / f"alone {rank}").manifest.world_size == 1

    pair = dist.new_group([2, 3])
    if rank >= 2:
        dcp.save(
            {"w": torch.ones(3), "x": torch.ones(4)},
            storage_writer=checkpoint.DcpWriter(tmp_path / "pair", fsync=False),
            process_group=pair,
        )
        names = {Path(file.path).name.rpartition("-")[0] for file in checkpoint.read(tmp_path / "pair").manifest.files}
        assert names == {"rank-00002", "rank-00003"}
    dist.barrier()

    # a strided shard of two runs: DCP sees one box at the first
    mesh = init_device_mesh("cpu", (4,))
    full = torch.arange(16.0)
    local = torch.cat([full[2 * rank : 2 * rank + 2], full[8 + 2 * rank : 10 + 2 * rank]])
    strided = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    with pytest.raises(CheckpointException, match=r"overlapping chunks|validate global plan|know such shards"):
        dcp.save({"w": strided}, storage_writer=checkpoint.DcpWriter(tmp_path / "strided", fsync=False))
    assert not (tmp_path / "strided" / "manifest.json").exists()
    checkpoint.save({"w": strided}, tmp_path / "strided", fsync=False)
    assert torch.equal(checkpoint.read(tmp_path / "strided")["w"].full(), full)
    with pytest.raises(CheckpointException, match="know such shards"):
        dcp.load({"w": strided}, storage_reader=checkpoint.DcpReader(tmp_path / "strided"))
