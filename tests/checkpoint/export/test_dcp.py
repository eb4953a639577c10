"""torch.distributed.checkpoint through our writer and reader: states, sections, values, refusals.

DCP's own files and ours, of the same states on four ranks, are each the other's second opinion.
"""

import contextlib
import enum
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError
from lightning_shard.testing import ranks
from tests.checkpoint.laid_out import assert_same, full_state, laid_out

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*FutureWarning")


def save(state, path, **options):
    dcp.save(state, storage_writer=checkpoint.DcpWriter(path, fsync=False, **options))
    return path


def load(state, path, **options):
    dcp.load(state, storage_reader=checkpoint.DcpReader(path, **options))
    return state


@contextlib.contextmanager
def refused(kind, match):
    """As rank 0 raises it within DCP."""
    with pytest.raises(CheckpointException) as caught:
        yield
    with pytest.raises(kind, match=match):
        raise caught.value.failures[0][0]


def trained(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(2):
        model(torch.randn(3, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_model_and_optimizer_resume_through_dcp(tmp_path):
    model, optimizer = trained(0)
    weights, moments = get_state_dict(model, optimizer)
    state = {**weights, "optimizer": moments, "train_state": {"step": 17, "losses": [0.5, (1, 2)]}}
    path = save(state, tmp_path / "c")
    assert checkpoint.verify(path).ok

    other, other_optimizer = trained(1)
    weights, moments = get_state_dict(other, other_optimizer)
    into = {**weights, "optimizer": moments, "train_state": {"step": 0, "losses": None}}
    load(into, path)
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict={name: into[name] for name in weights},
        optim_state_dict=into["optimizer"],
    )
    assert into["train_state"] == {"step": 17, "losses": [0.5, (1, 2)]}
    assert other_optimizer.param_groups[0]["lr"] == 0.01
    x = torch.randn(3, 5)
    for net, opt in ((model, optimizer), (other, other_optimizer)):
        net(x).sum().backward()
        opt.step()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_what_dcp_wrote_is_a_checkpoint_with_the_models_own_names(tmp_path):
    model, optimizer = trained(0)
    weights, moments = get_state_dict(model, optimizer)
    path = save({**weights, "optimizer": moments, "step": 3}, tmp_path / "c")
    stored = checkpoint.read(path)
    assert set(stored) == set(model.state_dict())
    assert set(stored.optimizer) == {
        f"state.{n}.{k}" for n in model.state_dict() for k in ("exp_avg", "exp_avg_sq", "step")
    }
    assert stored.trainer_state()["step"] == 3
    assert stored.trainer_state()["optimizer.param_groups.0.betas"] == (0.9, 0.999)
    fresh = trained(1)[0]
    checkpoint.load(path, fresh)
    assert torch.equal(fresh[0].weight, model[0].weight)
    assert not list(path.rglob(".metadata"))


def test_dcp_reads_what_checkpoint_save_wrote(tmp_path):
    model, _ = trained(0)
    path = tmp_path / "c"
    trainer = {"epoch": 4, "loops": {"fit": {"done": True}}, "generator": {"state": torch.arange(3)}}
    checkpoint.save(model, path, optimizer={"0/w/exp_avg": torch.ones(4)}, trainer_state=trainer)
    into = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    into |= {"optimizer": {"0/w/exp_avg": torch.zeros(4)}, "epoch": 0, "loops": None, "generator": None}
    load(into, path)
    for name, value in model.state_dict().items():
        assert torch.equal(into[name], value), name
    assert torch.equal(into["optimizer"]["0/w/exp_avg"], torch.ones(4))
    assert (into["epoch"], into["loops"]) == (4, {"fit": {"done": True}})
    assert torch.equal(into["generator"]["state"], torch.arange(3))
    # the manifest's own path will do, as will DCP's name for it
    part = {"0.weight": torch.zeros(7, 5)}
    dcp.load(part, checkpoint_id=f"{path}/manifest.json", storage_reader=checkpoint.DcpReader())
    assert torch.equal(part["0.weight"], model[0].weight)


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
def test_every_dtype_comes_back_byte_for_byte(tmp_path, shape):
    count = torch.Size(shape).numel()
    state = {
        name: torch.arange(count * dtype.itemsize).remainder(2).to(torch.uint8).view(dtype).view(shape)
        for name, dtype in DTYPES.items()
    }
    path = save(state, tmp_path / "c")
    assert checkpoint.verify(path).ok
    into = load({name: torch.empty_like(tensor) for name, tensor in state.items()}, path)
    for name, tensor in state.items():
        assert into[name].dtype == tensor.dtype
        assert bytes(into[name].reshape(-1).view(torch.uint8)) == bytes(tensor.reshape(-1).view(torch.uint8)), name
    assert checkpoint.diff(path, save(into, tmp_path / "d")).ok


class Colour(enum.Enum):
    RED = 1


class Opaque:
    pass


@pytest.mark.parametrize(
    ("value", "match"),
    [(Opaque(), "'a.b' is a .*Opaque.*nothing is pickled.*register_codec"), ((torch.ones(1),), "'a.b'.*holds tensors")],
    ids=["opaque", "tensors in a tuple"],
)
def test_a_value_that_cannot_be_held_is_refused_by_its_key_and_nothing_is_committed(tmp_path, value, match):
    path = save({"w": torch.ones(2)}, tmp_path / "c")
    before = sorted(path.rglob("*"))
    with refused(UnsupportedStateError, match):
        save({"w": torch.zeros(2), "a": {"b": value}}, path)
    assert sorted(path.rglob("*")) == before
    assert torch.equal(load({"w": torch.zeros(2)}, path)["w"], torch.ones(2))


def test_nothing_is_pickled_and_nothing_unpickled(tmp_path, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("pickle")

    monkeypatch.setattr(torch, "save", forbidden)
    monkeypatch.setattr(torch, "load", forbidden)
    value = {"path": tmp_path, "set": {1, 2}, "none": None, "colour": Colour.RED}
    checkpoint.register_codec(Colour)
    path = save({"w": torch.ones(2), "v": value}, tmp_path / "c")
    assert load({"w": torch.zeros(2), "v": dict.fromkeys(value)}, path)["v"] == value


class OwnBytes(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        raise AssertionError("never called")


class NoLookup(dcp.SavePlanner):
    """A planner that has no more than DCP asks of one."""

    def __init__(self):
        self.planner = DefaultSavePlanner()

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        self.planner.set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self):
        return self.planner.create_local_plan()

    def create_global_plan(self, all_plans):
        return self.planner.create_global_plan(all_plans)

    def finish_plan(self, new_plan):
        return self.planner.finish_plan(new_plan)

    def resolve_data(self, write_item):
        return self.planner.resolve_data(write_item)


def test_planners_of_other_kinds_are_served_or_told(tmp_path):
    def save_by(state):
        dcp.save(state, storage_writer=checkpoint.DcpWriter(tmp_path / "c"), planner=NoLookup())

    save_by({"w": torch.ones(2)})
    with refused(CheckpointError, "'step' isn't a tensor, and NoLookup gives only pickled bytes"):
        save_by({"w": torch.ones(2), "step": 1})
    path = save({"w": torch.ones(2), "step": 1}, tmp_path / "c")
    with refused(CheckpointError, "'step' is stored as typed JSON"):
        dcp.load({"step": 0}, storage_reader=checkpoint.DcpReader(path), planner=OwnBytes())
    flat = {"step": 0, "w": torch.zeros(2)}
    dcp.load(flat, storage_reader=checkpoint.DcpReader(path), planner=DefaultLoadPlanner(False, False))
    assert flat["step"] == 1


def test_one_writer_and_one_reader_serve_many_paths(tmp_path):
    writer, reader = checkpoint.DcpWriter(fsync=False), checkpoint.DcpReader()
    for step in range(2):
        dcp.save({"w": torch.full((2,), step)}, checkpoint_id=tmp_path / str(step), storage_writer=writer)
    for step in range(2):
        into = {"w": torch.full((2,), 9)}
        dcp.load(into, checkpoint_id=tmp_path / str(step), storage_reader=reader)
        assert into["w"].tolist() == [step] * 2
    with refused(CheckpointError, "There is no path"):
        dcp.save({"w": torch.ones(1)}, storage_writer=checkpoint.DcpWriter())


def test_errors_of_loading_are_told(tmp_path):
    # torch 2.11 keeps a reader's errors to itself, and says what it hasn't got
    told = "holds no committed checkpoint" if torch.__version__ >= "2.12" else "metadata is None"
    with pytest.raises(CheckpointException, match=told):
        load({"w": torch.zeros(3)}, tmp_path / "nothing")
    path = save({"w": torch.ones(3)}, tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: v"):
        load({"v": torch.zeros(3)}, path)
    with pytest.raises(CheckpointException, match="Size mismatch"):
        load({"w": torch.zeros(4)}, path)
    (file,) = (path / "model").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"\7")
    with refused(CorruptCheckpointError, "differ from their digest"):
        load({"w": torch.zeros(3)}, path)
    load({"w": torch.zeros(3)}, path, verify=False)


def test_saving_without_collectives_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="use_collectives"):
        dcp.save({"w": torch.ones(1)}, storage_writer=checkpoint.DcpWriter(tmp_path / "c"), use_collectives=False)


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
