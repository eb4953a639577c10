"""Save, read and load in one process: the bytes of the files, every kind of tensor, slices, aliases, gather, verify."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from lightning_shard import checkpoint
from lightning_shard.checkpoint import memory
from lightning_shard.checkpoint.format.blocks import digest
from lightning_shard.checkpoint.format.header import CARRIERS, DTYPES
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.saving import files, merge
from lightning_shard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    StateMismatchError,
    UnsupportedStateError,
)
from tests.checkpoint.manifests import edit_table, resigned


def raw(tensor):
    """A tensor's elements as bytes: compares what == can't, such as float8 and nan."""
    return bytes(memory.byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous()))


def tensor_of(dtype, shape=(3, 5)):
    count = math.prod(shape) * dtype.itemsize
    data = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 120).to(torch.uint8)
    return data.view(dtype).view(shape)


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,), (3, 5)], ids=str)
def test_every_dtype_and_shape_comes_back_byte_for_byte(tmp_path, shape):
    state = {name: tensor_of(dtype, shape) for name, dtype in DTYPES.items()}
    checkpoint.save(state, tmp_path / "c", fsync=False)
    stored = checkpoint.read(tmp_path / "c")
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(tmp_path / "c", into)
    for name, tensor in state.items():
        back = stored[name].full()
        assert back.dtype == tensor.dtype
        assert back.shape == shape
        assert raw(back) == raw(into[name]) == raw(tensor), name
    assert checkpoint.verify(tmp_path / "c").ok


def test_plain_safetensors_reads_each_file(tmp_path):
    state = {str(dtype): tensor_of(dtype) for dtype in DTYPES.values()}
    checkpoint.save(state, tmp_path / "c", optimizer={"m": torch.ones(2)}, rank_state={"g": torch.get_rng_state()})
    files = list(Path(tmp_path / "c").glob("*/*.safetensors"))
    assert len(files) == 3
    names = {dtype: name for name, dtype in DTYPES.items()}
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            for key in opened.keys():  # noqa: SIM118
                assert opened.get_tensor(key) is not None
    (model,) = [file for file in files if file.parent.name == "model"]
    loaded = load_file(model)
    for dtype, name in names.items():
        assert raw(loaded[str(dtype)]) == raw(state[str(dtype)])
        if name not in CARRIERS:
            assert loaded[str(dtype)].dtype == dtype
    data = model.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    assert start % 4096 == 0


STRIDED = {
    "transposed": torch.randn(300, 200).t(),
    "columns": torch.randn(50, 40)[:, 3:9],
    "reversed steps": torch.randn(40)[::3],
    "expanded": torch.randn(1, 7).expand(5, 7),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "negated": torch.randn(4, dtype=torch.complex64).conj().imag,
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "odd single": torch.randn(3, 5)[:1, :1],
}


@pytest.mark.parametrize("name", STRIDED)
def test_non_contiguous_tensors_save_and_load(tmp_path, name, monkeypatch):
    monkeypatch.setattr(files, "STAGING_BYTES", 4096)
    tensor = STRIDED[name]
    checkpoint.save({"t": tensor}, tmp_path / "c", fsync=False)
    back = checkpoint.read(tmp_path / "c")["t"].full()
    assert torch.equal(back, tensor)
    if name not in ("expanded", "conjugate", "negated"):
        into = torch.empty_strided(tensor.shape, tensor.stride()).zero_()
        checkpoint.load(tmp_path / "c", {"t": into})
        assert torch.equal(into, tensor)


def test_tied_tensors_are_saved_once_and_come_back_tied(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    model, path = Tied(), tmp_path / "c"
    checkpoint.save(model, path)
    stored = checkpoint.read(path)
    assert stored.alias_of("head.weight") == "embed.weight"
    assert stored["head.weight"].shape == (50, 8)
    assert sum(chunk.end - chunk.begin for chunk in stored.manifest.model["embed.weight"].chunks) == 50 * 8 * 4
    assert sum(file.bytes - file.header_bytes for file in stored.manifest.files) == 50 * 8 * 4
    whole = stored.full()
    assert whole["head.weight"] is whole["embed.weight"]
    other = Tied()
    checkpoint.load(path, other)
    assert torch.equal(other.head.weight, model.embed.weight)
    assert checkpoint.verify(path).ok
    checkpoint.gather(path, tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["head.weight"], model.embed.weight)


def test_views_of_one_storage_that_differ_are_not_taken_for_one(tmp_path):
    base = torch.arange(12.0)
    state = {"a": base[:6], "b": base[6:], "c": base.view(3, 4), "d": base[:6].view(torch.int32), "e": base[:0]}
    checkpoint.save(state, tmp_path / "c")
    stored = checkpoint.read(tmp_path / "c")
    assert [stored.alias_of(name) for name in state] == [None] * 5
    for name, tensor in state.items():
        assert torch.equal(stored[name].full(), tensor)


# -- names, shapes, dtypes --------------------------------------------------------------------------------------------


def test_mismatches_are_told_before_anything_is_written(tmp_path):
    checkpoint.save({f"w{i}": torch.ones(2) for i in range(15)}, tmp_path / "c")
    into = {f"v{i}": torch.zeros(2) for i in range(3)}
    with pytest.raises(StateMismatchError, match=r"\(3\): v0, v1, v2. Not in the state \(15\): .* and 5 more"):
        checkpoint.load(tmp_path / "c", into)
    partly = {"w0": torch.zeros(2), "new": torch.zeros(2)}
    missing, unexpected = checkpoint.load(tmp_path / "c", partly, strict=False)
    assert missing == ["new"]
    assert sorted(unexpected) == sorted(f"w{i}" for i in range(1, 15))
    assert torch.equal(partly["w0"], torch.ones(2))
    for bad, match in [
        (torch.zeros(3), r"\(2,\) in the checkpoint and \(3,\) in the state"),
        (torch.zeros(2).half(), r"cast=True"),
        (torch.zeros(1).expand(2), r"'w1' is expanded in the state"),
    ]:
        good = torch.zeros(2)
        with pytest.raises(StateMismatchError, match=match):
            checkpoint.load(tmp_path / "c", {"w0": good, "w1": bad}, strict=False)
        assert not good.any()
    half = {"w0": torch.zeros(2).half()}
    checkpoint.load(tmp_path / "c", half, strict=False, cast=True)
    assert half["w0"].sum() == 2


def test_into_views_of_any_strides_but_not_into_elements_that_share_memory(tmp_path):
    saved = torch.arange(24.0).view(4, 3, 2)
    checkpoint.save({"w": saved}, tmp_path / "c")
    wide = torch.zeros(8, 6, 4)
    for view in (torch.zeros(2, 3, 4).permute(2, 1, 0), wide[::2, ::2, ::2], torch.zeros(4, 1, 3, 2)[:, 0]):
        checkpoint.load(tmp_path / "c", {"w": view})
        assert torch.equal(view, saved)
    memory = torch.zeros(24)
    for strides in ((2, 1, 1), (6, 2, 0), (1, 1, 1), (5, 2, 1)):
        with pytest.raises(StateMismatchError, match="'w' is expanded in the state"):
            checkpoint.load(tmp_path / "c", {"w": memory.as_strided(saved.shape, strides)})
    assert not memory.any()


class Scaled(torch.Tensor):
    """As quantized weights are kept: an operation on it sees other elements than those in memory."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].inner)
        return func(*(arg.inner.float() * 3 if isinstance(arg, Scaled) else arg for arg in args), **(kwargs or {}))


NO_PLAIN_TENSORS = {
    "meta": (torch.ones(2, device="meta"), "meta device"),
    "sparse": (torch.ones(2).to_sparse(), "layout .*indices and values"),
    "mkldnn": (torch.ones(2).to_mkldnn(), "layout .*to_dense"),
    "nested": (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested tensor"),
    "quantized": (torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "quantized"),
    "wrapper": (Scaled(torch.ones(2, dtype=torch.int8)), r"Scaled, .*\(inner\).*register_codec\(Scaled"),
    "wrapper as parameter": (nn.Parameter(Scaled(torch.ones(2, dtype=torch.int8))), "Scaled"),
    "lazy": (nn.UninitializedParameter(), "not initialized"),
    "sub-byte dtype": (torch.empty(2, dtype=torch.uint8).view(torch.uint4), "dtype torch.uint4"),
}


@pytest.mark.parametrize("name", NO_PLAIN_TENSORS)
def test_what_is_no_plain_tensor_is_refused_at_save(tmp_path, name):
    value, match = NO_PLAIN_TENSORS[name]
    checkpoint.save({"a": torch.ones(1)}, tmp_path / "c")
    before = sorted(tmp_path.rglob("*"))
    for state, rest in [({"a": {"b": value}}, {}), ({}, {"trainer_state": {"a": {"b": value}}})]:
        with pytest.raises(UnsupportedStateError, match=f"'a.b' .*{match}"):
            checkpoint.save(state, tmp_path / "c", **rest)
        assert sorted(tmp_path.rglob("*")) == before
    assert checkpoint.verify(tmp_path / "c").ok


@pytest.mark.parametrize("value", [3, None, [torch.ones(1)]], ids=str)
def test_what_is_no_tensor_belongs_into_the_trainer_state(tmp_path, value):
    with pytest.raises(UnsupportedStateError, match=r"'a\.b' is a .*trainer_state"):
        checkpoint.save({"a": {"b": value}}, tmp_path / "c")
    assert not (tmp_path / "c").exists()
    checkpoint.save({}, tmp_path / "c", trainer_state={"a": {"b": value}})
    assert checkpoint.read(tmp_path / "c").trainer_state() == {"a": {"b": value}}


def test_every_kind_of_tensor_in_the_trainer_state(tmp_path):
    shared = torch.arange(6.0)
    state = {
        **{str(dtype): tensor_of(dtype) for dtype in DTYPES.values()},
        **STRIDED,
        "0-d": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "parameter": nn.Parameter(torch.ones(2)),
        "views": [shared[:4], shared[2:]],
        "same": (shared, shared),
    }
    checkpoint.save({}, tmp_path / "c", trainer_state=state)
    back = checkpoint.read(tmp_path / "c").trainer_state()
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
            assert raw(back[name]) == raw(tensor), name
    assert [view.tolist() for view in back["views"]] == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert back["same"][0] is back["same"][1]
    assert type(back["parameter"]) is torch.Tensor


def test_names_that_meet_when_joined_are_refused(tmp_path):
    with pytest.raises(UnsupportedStateError, match=r"named 'a\.b'"):
        checkpoint.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, tmp_path / "c")


@pytest.mark.parametrize("name", ["../../etc/x", "/abs", "a/b", "", "ünï", "__metadata__x", "a\nb", "x#2"])
def test_any_name_is_only_a_name(tmp_path, name):
    checkpoint.save({name: torch.ones(3), "x": torch.zeros(1)}, tmp_path / "c")
    assert torch.equal(checkpoint.read(tmp_path / "c")[name].full(), torch.ones(3))
    assert {file.name for file in tmp_path.iterdir()} == {"c"}


# -- blocks and manifests --------------------------------------------------------------------------------------------


def test_blocks_are_hashed_on_a_fixed_grid(tmp_path, monkeypatch):
    for module in (files, merge):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)
    monkeypatch.setattr(files, "WRITE_STEP_BYTES", 24)
    tensor = torch.arange(50, dtype=torch.int32)
    checkpoint.save({"t": tensor, "columns": torch.arange(100, dtype=torch.int16).view(10, 10).t()}, tmp_path / "c")
    manifest = checkpoint.read(tmp_path / "c").manifest
    for name, whole in [("t", tensor), ("columns", torch.arange(100, dtype=torch.int16).view(10, 10).t().contiguous())]:
        data = raw(whole)
        (chunk,) = manifest.model[name].chunks
        assert chunk.digests.hex() == "".join(digest(data[at : at + 64]) for at in range(0, len(data), 64))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_manifest_means_the_same_however_its_json_is_laid_out(tmp_path, indent):
    awkward = ['":{', "\\", 'a"', "model", "\u00fc", "\n}"]
    tensor = torch.arange(6.0)
    checkpoint.save({name: tensor + i for i, name in enumerate(awkward)} | {"tied": tensor}, tmp_path / "c")
    path = tmp_path / "c" / "manifest.json"
    ours = Manifest.from_bytes(path.read_bytes())
    other = Manifest.from_bytes(resigned(json.loads(path.read_bytes()), indent=indent))
    assert set(ours.model) == {*awkward, "tied"}
    assert list(ours.model) == list(other.model)
    assert ours.model.aliases == other.model.aliases
    for (name, entry), (_, same) in zip(ours.model.items(), other.model.items(), strict=True):
        assert (entry.dtype, entry.shape, entry.span) == (same.dtype, same.shape, same.span), name


def test_a_tensor_and_a_table_may_say_more(tmp_path):
    checkpoint.save({"t": torch.ones(4), "empty": torch.ones(0)}, tmp_path)

    def more(manifest, columns):
        manifest["model"]["t"]["new"] = 1
        manifest["table"]["new"] = 1
        columns["new"] = columns["file"]

    edit_table(tmp_path, more)
    assert torch.equal(checkpoint.read(tmp_path)["t"].full(), torch.ones(4))
    assert checkpoint.verify(tmp_path).ok


def test_what_a_path_without_a_manifest_holds_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "single.ckpt").write_bytes(b"x")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / ".metadata").write_bytes(b"x")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "torn" / "model").mkdir(parents=True)
    (tmp_path / "torn" / "model" / "rank-00000-0123456789ab.safetensors").write_bytes(b"x")
    checkpoint.save({}, tmp_path / "runs" / "step=1.ckpt")
    for name, what in {
        "nothing": "Nothing is there",
        "empty": "folder without files",
        "single.ckpt": "single file",
        "dcp": "torch.distributed.checkpoint",
        "bin": "pytorch_model.bin in it",
        "torn": "not completed",
        "runs": "there is step=1.ckpt/",
    }.items():
        with pytest.raises(CheckpointNotFoundError, match=what):
            checkpoint.read(tmp_path / name)
        assert not checkpoint.exists(tmp_path / name)
    with pytest.raises(CheckpointError, match="empty"):
        checkpoint.read("")
