"""What gather writes and what read opens, in one process: names, dtypes, layouts, stores, damage."""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from pathlib import Path
from unittest import mock

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from lightning_shard import checkpoint
from lightning_shard.checkpoint.convert import write
from lightning_shard.checkpoint.saving import files, merge
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.checkpoint.store.remote import RemoteStore
from lightning_shard.cli import main
from lightning_shard.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)
from tests.checkpoint.manifests import flip
from tests.checkpoint.save.test_plan_of_a_save import placed, save_simulated

STATE = {
    "model.a": torch.randn(6, 5),
    "model.b": torch.randn(3).bfloat16(),
    "model.n": torch.arange(4),
    "metric": torch.tensor(2.0),
}
LIGHTNING = {
    "pytorch-lightning_version": "2.6.0",
    "epoch": 1,
    "global_step": 7,
    "loops": {
        "fit_loop": {"state_dict": {"combined_loader": [dict.fromkeys(("epoch", "position", "unit", "seed"), 1)]}}
    },
    "callbacks": {"kept": torch.arange(3)},
    "optimizer_states": [{"values": {}, "param_groups": [{"lr": 0.1, "params": ["model.b", "model.a"]}]}],
    "lr_schedulers": [{"last_epoch": 3}],
}
MOMENTS = {"0/model.a/exp_avg": torch.randn(6, 5), "0/model.a/step": torch.tensor(7.0)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(STATE, tmp_path / "c", optimizer=MOMENTS, trainer_state=LIGHTNING)
    return tmp_path / "c"


# -- layouts ----------------------------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(placed(), st.integers(1, 2), st.sampled_from([None, torch.bfloat16]), st.sampled_from([16, 40, 1000]))
def test_any_layout_is_gathered(tmp_path_factory, where, copies, dtype, size):
    shape, mesh_shape, placements = where
    folder = tmp_path_factory.mktemp("c")
    full = {"t": torch.randn(shape), "last": torch.arange(math.prod(shape)).view(shape)}
    with contextlib.ExitStack() as patches:
        for module in (merge, files):
            patches.enter_context(mock.patch.object(module, "BLOCK_BYTES", 64))
        save_simulated(folder, full, mesh_shape, dict.fromkeys(full, placements), copies)
    # blocks of 64 bytes, and steps and slabs that fit neither them nor rows
    with mock.patch.object(write, "STEP_BYTES", size), mock.patch.object(write, "SLAB_BYTES", size):
        checkpoint.gather(folder, folder / "m.safetensors", dtype=dtype)
        checkpoint.gather(folder, f"memory://{folder}/m.safetensors", dtype=dtype)
        found = load_file(folder / "m.safetensors")
        assert found.keys() == full.keys()
        assert torch.equal(found["t"], full["t"].to(dtype or torch.float32))
        assert torch.equal(found["last"], full["last"])
        remote = checkpoint.read(f"memory://{folder}/m.safetensors")
        assert all(torch.equal(remote[name].full(), found[name]) for name in full)
        # a flipped byte anywhere is found, and nothing appears
        for file in (folder / "model").iterdir():
            flip(file)
            with pytest.raises(CorruptCheckpointError, match="differ from their digest"):
                checkpoint.gather(folder, folder / "damaged.safetensors", dtype=dtype)
            flip(file)
        assert not list(folder.glob("damaged*"))
    fsspec.filesystem("memory").store.clear()


# -- names and dtypes -------------------------------------------------------------------------------------------------


def test_names_and_dtypes_can_be_changed(saved, tmp_path):
    out = tmp_path / "m.safetensors"
    checkpoint.gather(saved, out, strip_prefix="model.", rename={"a": "w", "": ""}, dtype=torch.float16)
    found = load_file(out)
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "w": torch.float16,
        "b": torch.float16,
        "n": torch.int64,
        "metric": torch.float16,
    }
    assert torch.equal(found["w"], STATE["model.a"].half())
    checkpoint.gather(saved, out, rename=lambda name: name.upper() if name.startswith("model") else None)
    assert set(load_file(out)) == {"MODEL.A", "MODEL.B", "MODEL.N"}
    # and back, under the names of a state
    state = {name: torch.zeros_like(tensor) for name, tensor in STATE.items() if name != "metric"}
    assert checkpoint.load(out, state, rename=str.lower) == ([], [])
    assert all(torch.equal(state[name], STATE[name]) for name in state)
    bare = {"a": torch.zeros(6, 5)}
    assert checkpoint.load(saved, bare, strip_prefix="model.", strict=False) == ([], ["n", "metric", "b"])
    assert torch.equal(bare["a"], STATE["model.a"])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"rename": lambda name: "x"}, StateMismatchError, "would both be named 'x'"),
        ({"rename": {"net.": "", "head.": ""}}, StateMismatchError, "No tensor's name begins with 'net.' or 'head.'"),
        ({"rename": {"model.": "", "modle.": ""}}, StateMismatchError, "No tensor's name begins with 'modle.'"),
        ({"rename": {"model.": ""}, "strip_prefix": "model."}, StateMismatchError, "name is 'n', for example"),
        ({"rename": lambda name: None}, StateMismatchError, "leaves out all tensors"),
        ({"rename": {"metric": "__metadata__"}}, UnsupportedStateError, "'__metadata__' can't be a tensor's name"),
        ({"rename": {"metric": "\ud800"}}, UnsupportedStateError, "can't be a tensor's name"),
        ({"strip_prefix": "net."}, StateMismatchError, "No tensor's name begins with"),
        ({"dtype": torch.int8}, CheckpointError, "floating"),
        ({"format": "zip"}, CheckpointError, "must be one of"),
        ({"format": "transformers"}, CheckpointError, "config="),
        ({"format": "transformers", "optimizer": True}, CheckpointError, "no place for an optimizer"),
        ({"format": "lightning", "max_shard_bytes": 100}, CheckpointError, "one file, a .ckpt"),
        ({"format": "safetensors", "config": "folder"}, CheckpointError, "no place for a config"),
    ],
)
def test_what_can_not_be_gathered_is_said_and_leaves_no_file(saved, tmp_path, options, error, says):
    out = tmp_path / ("out" if "format" in options else "out.safetensors")
    with pytest.raises(error, match=says):
        checkpoint.gather(saved, out, **options)
    assert not out.exists()


@pytest.mark.parametrize(
    ("out", "format"),
    [
        ("m.bin", None),
        ("m.pt", None),
        ("folder", None),
        ("m.bin", "safetensors"),
        ("m.ckpt", "safetensors"),
        ("m.safetensors", "lightning"),
    ],
)
def test_an_ending_that_readers_would_take_for_another_format_is_refused(saved, tmp_path, out, format):
    with pytest.raises(CheckpointError, match=r"must end with \.safetensors, or with \.ckpt"):
        checkpoint.gather(saved, tmp_path / out, format=format)
    assert not (tmp_path / out).exists()


def test_a_file_is_not_named_as_an_index(saved, tmp_path):
    with pytest.raises(CheckpointError, match=r"such as m\.safetensors, and give max_shard_bytes"):
        checkpoint.gather(saved, tmp_path / "m.safetensors.index.json")
    assert not list(tmp_path.glob("m.*"))


def test_dtypes_that_safetensors_lacks_are_warned_of(tmp_path):
    state = {"plain": torch.ones(2), "z": torch.tensor([1 + 2j], dtype=torch.complex128), "e": torch.ones(3)}
    state["e"] = state["e"].to(torch.float8_e8m0fnu)
    checkpoint.save(state, tmp_path / "c")
    with pytest.warns(UserWarning, match="will be read as") as told:
        checkpoint.gather(tmp_path / "c", tmp_path / "m.safetensors")
    assert [str(one.message).partition(":")[0] for one in told] == [
        "'e' of dtype torch.float8_e8m0fnu will be read as torch.uint8, byte for byte",
        "'z' of dtype torch.complex128 will be read as torch.float64 with a last dim of 2",
    ]
    with warnings.catch_warnings(action="error"):
        checkpoint.gather(tmp_path / "c", tmp_path / "m.ckpt")
    assert checkpoint.diff(tmp_path / "c", tmp_path / "m.ckpt", sections=["model"]).ok


def test_a_checkpoints_own_files_are_not_overwritten(saved, tmp_path, monkeypatch):
    before = {file: file.read_bytes() for file in saved.rglob("*.*")}
    (tmp_path / "linked").symlink_to(saved)
    for folder in (saved, tmp_path / "linked"):
        for file in before:
            with pytest.raises(CheckpointError, match="is the name of a checkpoint's own file"):
                checkpoint.gather(saved, folder / file.relative_to(saved))
            monkeypatch.chdir(file.parent)
            with pytest.raises(CheckpointError, match="choose another name"):
                checkpoint.gather(saved, file.name)
    assert {file: file.read_bytes() for file in saved.rglob("*.*")} == before


def test_a_config_can_be_given_where_the_checkpoint_has_none(saved, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "mine"}')
    out = tmp_path / "out"
    checkpoint.gather(saved, out, format="transformers", strip_prefix="model.", config=tmp_path / "hf")
    assert json.loads((out / "config.json").read_text()) == {"model_type": "mine", "dtype": "float32"}
    assert set(load_file(out / "model.safetensors")) == {"a", "b", "n"}
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        checkpoint.gather(saved, out, format="transformers", config=tmp_path)


def test_one_of_several_models_is_chosen(tmp_path):
    state = {"teacher.w": torch.zeros(2), "student.w": torch.ones(2), "metric": torch.ones(())}
    models = {prefix: {"config.json": json.dumps({"model_type": prefix})} for prefix in ("teacher.", "student.")}
    known = {"transformers": {"models": models, "tokenizer": {"vocab.txt": torch.tensor([97, 98], dtype=torch.uint8)}}}
    checkpoint.save(state, tmp_path / "c", trainer_state=known)
    with pytest.raises(CheckpointError, match=r"strip_prefix='teacher\.' or 'student\.'"):
        checkpoint.gather(tmp_path / "c", tmp_path / "hf", format="transformers")
    checkpoint.gather(tmp_path / "c", tmp_path / "hf", format="transformers", strip_prefix="student.")
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == [1, 1]
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "student."
    assert (tmp_path / "hf" / "vocab.txt").read_text() == "ab"


# -- Lightning's .ckpt ------------------------------------------------------------------------------------------------


def test_a_ckpt_is_what_torch_reads_and_reads_back(saved, tmp_path):
    out = tmp_path / "x.ckpt"
    report = checkpoint.gather(saved, out)
    assert report.tensors == len(STATE) + len(MOMENTS) + 1
    content = torch.load(out, weights_only=True)
    assert all(torch.equal(content["state_dict"][name], tensor) for name, tensor in STATE.items())
    (optimizer,) = content["optimizer_states"]
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert optimizer["state"].keys() == {1}
    assert torch.equal(optimizer["state"][1]["exp_avg"], MOMENTS["0/model.a/exp_avg"])
    assert content["callbacks"]["kept"].tolist() == [0, 1, 2]
    assert content["loops"]["fit_loop"]["state_dict"]["combined_loader"] == []
    # read as a checkpoint, a slice at a time, and gathered again
    stored = checkpoint.read(out)
    assert torch.equal(stored["model.a"][2:4, 1], STATE["model.a"][2:4, 1])
    assert stored.trainer_state()["global_step"] == 7
    assert checkpoint.inspect(out).global_step == 7
    assert checkpoint.verify(out).ok
    checkpoint.gather(out, tmp_path / "again.ckpt")
    again = torch.load(tmp_path / "again.ckpt", weights_only=True)
    assert torch.equal(again["optimizer_states"][0]["state"][1]["exp_avg"], MOMENTS["0/model.a/exp_avg"])
    assert again["optimizer_states"][0]["param_groups"] == optimizer["param_groups"]
    checkpoint.gather(out, tmp_path / "weights.ckpt", optimizer=False)
    assert not {"optimizer_states", "callbacks"} & torch.load(tmp_path / "weights.ckpt", weights_only=True).keys()


def test_torch_files_of_other_shapes(tmp_path):
    state = {
        "net": {"w": torch.randn(4, 3, 2, 2), "v": torch.randn(5, 6)[1:3]},
        "tied": torch.ones(3),
        "step": 3,
        "empty": torch.ones(0, 2),
    }
    state["same"] = state["tied"]
    torch.save(state, tmp_path / "s.pt")
    stored = checkpoint.read(tmp_path / "s.pt")
    assert set(stored) == {"net.w", "net.v", "tied", "same", "empty"}
    assert torch.equal(stored["net.w"].full(), state["net"]["w"])
    assert torch.equal(stored["net.v"][1:], state["net"]["v"][1:])
    assert stored.alias_of("same") == "tied"
    for tensor in (torch.randn(3, 5).t(), torch.randn(5, 6)[:, :3], torch.ones(1).expand(4)):
        torch.save({"w": tensor}, tmp_path / "t.pt")
        with pytest.raises(UnsupportedStateError, match="save it with contiguous tensors"):
            checkpoint.read(tmp_path / "t.pt")


class Custom:
    pass


def test_a_torch_file_runs_no_code(tmp_path):
    torch.save({"state_dict": {}, "x": Custom()}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match=r"without running code.*Custom"):
        checkpoint.read(tmp_path / "x.ckpt")
    torch.save({"w": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointNotFoundError, match="single file"):
        checkpoint.read(tmp_path / "old.pt")


def test_an_earlier_export_is_not_read_in_place_of_a_new_one(tmp_path):
    for number in (1, 2):
        state = {"a": torch.full((4,), float(number)), "b": torch.ones(4)}
        checkpoint.save(state, tmp_path / str(number), fsync=False)
    whole, several = tmp_path / "whole" / "model.safetensors", tmp_path / "several" / "model.safetensors"
    checkpoint.gather(tmp_path / "1", several, max_shard_bytes=16)
    checkpoint.gather(tmp_path / "2", several)  # what transformers reads is the one file
    assert torch.equal(checkpoint.read(several.parent)["a"].full(), torch.full((4,), 2.0))
    checkpoint.gather(tmp_path / "1", whole)
    with pytest.raises(CheckpointError, match="would be read in place"):
        checkpoint.gather(tmp_path / "2", whole, max_shard_bytes=16)
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


# -- safetensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["disk", "store"])
def test_an_export_of_several_files_that_fails_midway_is_no_mixture_with_an_earlier_one(tmp_path, monkeypatch, where):
    folder = str(tmp_path / "out") if where == "disk" else f"memory://{tmp_path}/out"
    for step in (1.0, 2.0):
        checkpoint.save({name: torch.full((100,), step) for name in "abcd"}, tmp_path / f"{step}")

    def gather(step):
        checkpoint.gather(tmp_path / f"{step}", f"{folder}/model.safetensors", max_shard_bytes=400)

    gather(1.0)
    appeared = []

    def failing(function):
        def call(*args, **kwargs):
            appeared.append(args)
            if len(appeared) == 3:
                raise OSError("the disk is gone")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for store in (LocalStore, RemoteStore):
            patch.setattr(store, "publish", failing(store.publish))
        with pytest.raises(CheckpointError, match="the disk is gone"):
            gather(2.0)
    with pytest.raises(CheckpointNotFoundError):
        checkpoint.read(folder)
    gather(2.0)
    assert all(torch.equal(stored.full(), torch.full((100,), 2.0)) for stored in checkpoint.read(folder).values())


def test_safetensors_files_and_folders_are_read(tmp_path):
    folder = tmp_path / "hf"
    folder.mkdir()
    state = {"a": torch.randn(6, 5), "b": torch.arange(3), "c": torch.randn(())}
    save_file({"a": state["a"]}, folder / "1.safetensors")
    save_file({"b": state["b"], "c": state["c"], "unlisted": torch.ones(1)}, folder / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for path in (folder, folder / "model.safetensors.index.json"):
        stored = checkpoint.read(path)
        assert stored.keys() == state.keys()
        assert all(torch.equal(stored[name].full(), tensor) for name, tensor in state.items())
    checkpoint.gather(folder, "memory://hf/model.safetensors")
    for path in ("memory://hf", "memory://hf/model.safetensors", f"file://{folder}"):
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        assert checkpoint.load(path, into) == ([], [])
        assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
        assert main(["inspect", path]) == 0
        assert main(["verify", path]) == 0
    tied = {"a": torch.zeros(6, 5)}
    tied["tied"] = tied["a"]
    assert checkpoint.load(folder / "1.safetensors", tied) == ([], [])

    (folder / "2.safetensors").write_bytes((folder / "2.safetensors").read_bytes()[:20])
    with pytest.raises(CorruptCheckpointError, match="header is beyond its end"):
        checkpoint.read(folder)
    (folder / "2.safetensors").unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        checkpoint.read(folder)
    data = (folder / "1.safetensors").read_bytes()
    (folder / "1.safetensors").write_bytes(data[:-10])
    with pytest.raises(CorruptCheckpointError):
        checkpoint.read(folder / "1.safetensors")["a"].full()
