"""Saves on several processes: every part is written once, and comes back on any other layout byte for byte."""

import errno
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)
from lightning_shard.testing import ranks, run_ranks
from tests.checkpoint.laid_out import LAYOUTS, assert_same, full_state, laid_out


@ranks(4, timeout_s=120)
def test_every_layout_loads_on_every_other_byte_for_byte(tmp_path):
    for source in LAYOUTS:
        state, mesh = laid_out(source)
        path = tmp_path / f"{source}.ckpt"
        checkpoint.save(state, path, optimizer={"m": state["tall"]}, mesh=mesh if "axis" in source else None)
        for target in LAYOUTS:
            other, _ = laid_out(target, fill=0)
            moment = torch.zeros_like(other["tall"])
            assert checkpoint.load(path, other, optimizer={"m": moment}) == ([], [])
            assert_same({**other, "m": moment}, {**full_state(), "m": full_state()["tall"]})


def save_layout(path, layout):
    state, mesh = laid_out(layout)
    checkpoint.save(state, path, mesh=mesh, layout={"name": layout}, rank_state={"seed": torch.tensor(dist.get_rank())})


@pytest.fixture(scope="module", params=["two axes", "one axis of two"])
def of_four_ranks(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "a.ckpt"
    run_ranks(save_layout, 4, path, request.param)
    return path, request.param


def test_a_save_of_four_ranks_reads_in_one_process(of_four_ranks):
    path, layout = of_four_ranks
    stored = checkpoint.read(path)
    assert stored.manifest.layout == {"name": layout}
    for name, expected in full_state().items():
        assert torch.equal(stored[name].full(), expected), name
    assert torch.equal(stored["tall"][650:, 3:20:4], full_state()["tall"][650:, 3:20:4])
    assert [stored.rank_state(rank)["seed"].item() for rank in range(4)] == [0, 1, 2, 3]
    state = {name: torch.zeros_like(tensor) for name, tensor in full_state().items()}
    checkpoint.load(path, state)
    assert_same(state, full_state())


def test_replicas_write_once_and_alike_much(of_four_ranks):
    path, _ = of_four_ranks
    files = sorted(Path(path, "model").iterdir())
    stored = 0
    for file in files:
        with safe_open(file, "pt") as opened:
            stored += sum(opened.get_tensor(key).nbytes for key in opened.keys())  # noqa: SIM118
    assert stored == sum(tensor.nbytes for tensor in full_state().values())
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 4
    # parts of "tall" (840 kB) are cut at rows of 1200 bytes
    assert max(sizes) < 1.05 * min(sizes), sizes


class Block(nn.Module):
    """Sizes that neither 2 nor 4 divide; equal on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down, self.norm = nn.Linear(7, 18), nn.Linear(18, 7), nn.LayerNorm(7)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)


def parallel_block(shape: tuple[int, ...]) -> tuple[Block, object]:
    """HSDP or FSDP2 over tensor parallelism, as a strategy makes it."""
    names = ("replicas", "data", "tensor")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    block = Block()
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh[names[:-1]])
    return block, mesh


@ranks(4, timeout_s=120)
def test_fsdp_over_tensor_parallel_and_hsdp_save_the_plain_model(tmp_path):
    for shape in [(2, 2), (1, 4), (2, 1, 2)]:
        block, mesh = parallel_block(shape)
        path = tmp_path / f"{shape}.ckpt"
        checkpoint.save(block.state_dict(), path, mesh=mesh)
        assert_same(checkpoint.load(path), Block().state_dict())
        for tensor in (other := parallel_block(shape[::-1])[0].state_dict()).values():
            tensor.zero_()
        checkpoint.load(path, other)
        assert_same(other, Block().state_dict())


@ranks(4)
def test_stages_save_their_own_tensors_and_load_strictly(tmp_path):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    stage, data = mesh.get_local_rank("pipeline"), mesh["data"]
    full = torch.arange(40.0).view(10, 4) + stage
    state = {
        f"layer{stage}": distribute_tensor(full, data, [Shard(0)], src_data_rank=None),
        f"bias{stage}": torch.ones(3) * stage,
        "tied": torch.full((5,), 7.0),  # as the ends of a pipeline hold one embedding
    }
    path = tmp_path / "a.ckpt"
    checkpoint.save(state, path, mesh=data)
    stored = checkpoint.read(path)
    assert set(stored) == {"layer0", "layer1", "bias0", "bias1", "tied"}
    assert torch.equal(stored["layer1"].full(), torch.arange(40.0).view(10, 4) + 1)
    assert checkpoint.verify(path).ok
    for tensor in state.values():
        tensor.zero_()
    assert checkpoint.load(path, state) == ([], [])
    assert torch.equal(state[f"layer{stage}"].full_tensor(), full)
    assert torch.equal(state["tied"], torch.full((5,), 7.0))


@ranks(2)
def test_ranks_of_different_tensors_without_a_mesh_are_told_to_pass_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"pass mesh="):
        checkpoint.save({f"only{dist.get_rank()}": torch.ones(2)}, tmp_path / "a.ckpt")
    dist.barrier()
    assert not (tmp_path / "a.ckpt").exists()


@ranks(2)
def test_an_error_on_one_rank_raises_on_all_and_keeps_the_earlier_checkpoint(tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoint.save({"a": torch.ones(3)}, path)
    before = sorted(str(file) for file in path.rglob("*"))
    dist.barrier()
    bad = {"a": torch.zeros(3)} if dist.get_rank() == 0 else {"a": "text"}
    with pytest.raises(UnsupportedStateError, match=r"'a' is a str") as caught:
        checkpoint.save(bad, path)
    assert dist.get_rank() == 1 or str(caught.value).startswith("rank 1: ")
    dist.barrier()
    assert sorted(str(file) for file in path.rglob("*")) == before
    assert torch.equal(checkpoint.read(path)["a"].full(), torch.ones(3))


@ranks(2)
def test_bad_loads_raise_on_every_rank(tmp_path):
    path = tmp_path / "a.ckpt"
    mesh = init_device_mesh("cpu", (2,))
    state = {"a": distribute_tensor(torch.arange(10.0), mesh, [Shard(0)])}
    with pytest.raises(CheckpointNotFoundError, match="Nothing is there"):
        checkpoint.load(path, state)
    checkpoint.save(state, path)
    with pytest.raises(StateMismatchError, match="Missing in the checkpoint \\(1\\): b"):
        checkpoint.load(path, {**state, "b": torch.ones(1)})
    # one rank alone finds its file damaged
    if dist.get_rank() == 0:
        manifest = json.loads((path / "manifest.json").read_text())
        file = path / manifest["files"][1]["path"]
        file.write_bytes(file.read_bytes()[:-1] + b"\7")
    dist.barrier()
    into = {"a": torch.zeros_like(state["a"])}
    for shared in (False, True):
        with pytest.raises(CorruptCheckpointError, match="rank-00001"):
            checkpoint.load(path, into, share_reads=shared)
        assert not into["a"].to_local().any(), "written into on one rank, where another has found damage"
    checkpoint.load(path, into, verify=False)


@ranks(4, timeout_s=120)
def test_nested_states_of_dtensors_need_no_mesh(tmp_path):
    for layout in LAYOUTS:
        state, _ = laid_out(layout)
        path = tmp_path / f"{layout}.ckpt"
        nested = {"net": {"tall": state.pop("tall"), "head": {"uneven": state.pop("uneven")}}, "rest": state}
        checkpoint.save(nested, path, fsync=False)
        expected = {
            {"tall": "net.tall", "uneven": "net.head.uneven"}.get(name, f"rest.{name}"): tensor
            for name, tensor in full_state().items()
        }
        assert_same({name: stored.full() for name, stored in checkpoint.read(path).items()}, expected)
        for tensor in (nested["net"]["tall"], nested["net"]["head"]["uneven"], *state.values()):
            tensor.zero_()
        checkpoint.load(path, nested)
        assert_same({"net.tall": nested["net"]["tall"]}, {"net.tall": full_state()["tall"]})


@ranks(2)
def test_a_gather_that_fails_on_one_rank_fails_on_all_and_none_waits(tmp_path):
    """Only the first rank writes the file, and meets the error itself; the other is told of it."""
    checkpoint.save({"w": torch.arange(4.0)}, tmp_path / "c")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(LocalStore, "publish", side_effect=full), pytest.raises(CheckpointError, match="No space"):
        checkpoint.gather(tmp_path / "c", tmp_path / "model.safetensors")


@ranks(3)
def test_some_of_the_ranks_save_and_the_others_are_told_that_they_do_not(tmp_path):
    group, state, path = dist.new_group([0, 2]), {"t": torch.arange(5)}, tmp_path / "c"
    if dist.get_rank() == 1:
        for save in (lambda: checkpoint.save(state, path, group=group), lambda: checkpoint.AsyncSaver(group)):
            with pytest.raises(CheckpointError, match="Rank 1 isn't in group"):
                save()
    else:
        with checkpoint.AsyncSaver(group) as saver:
            saver.save(state, path)
    dist.barrier()
    assert torch.equal(checkpoint.read(path)["t"].full(), state["t"])


@ranks(2)
def test_partial_placements_are_refused(tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    with pytest.raises(UnsupportedStateError, match=r"'a'.*summands"):
        checkpoint.save({"a": partial}, tmp_path / "a.ckpt")
