"""torch.distributed.checkpoint through our writer and reader, in one process: states, sections, values, refusals."""

import contextlib
import enum

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.errors import CheckpointError, CorruptCheckpointError, UnsupportedStateError

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
