"""Which spellings are local paths and which are URLs, and that every name is a place of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.errors import CheckpointError

NAMES = ["A::A", "run::B", "epoch=1::loss", "x::memory", "5²", "①", "ü #%3f?&*[1]", "a\\b", "line\nfeed", "[bold]", "~"]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_on_the_local_disk_is_a_place_of_its_own(name: str, tmp_path: Path) -> None:
    others = [f"{name}::C", name.partition("::")[0] + "-", f"{name} "]
    for number, each in enumerate([name, *others]):
        checkpoint.save({"t": torch.tensor(number)}, tmp_path / "folder" / each)
    assert {entry.name for entry in checkpoint.list(tmp_path / "folder")} == {name, *others}
    assert set(os.listdir(tmp_path / "folder")) == {name, *others}
    path = str(tmp_path / "folder" / name)
    assert checkpoint.read(path)["t"].full() == 0
    assert checkpoint.read(f"file://{path}/")["t"].full() == 0
    assert checkpoint.verify(path).ok
    checkpoint.gather(path, f"{path}.safetensors")
    assert checkpoint.diff(path, f"{path}.safetensors", sections=["model"]).ok
    assert checkpoint.prune(tmp_path / "folder", keep=1, protect=[name])
    assert {entry.name for entry in checkpoint.list(tmp_path / "folder")} == {name, others[-1]}
    checkpoint.remove(path)
    assert [entry.name for entry in checkpoint.list(tmp_path / "folder")] == [others[-1]]


KINDS = [
    *("plain", "deep/er", Path("as") / "path", "slash/", "slashes//", "run::1", "a/b::c"),
    *("local://HERE/own", "file://HERE/url", "local://beside", "memory://box/a.ckpt"),
]


@pytest.mark.parametrize("path", KINDS, ids=str)
def test_a_path_of_any_kind_is_saved_to_read_and_removed(
    path: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = path.replace("HERE", str(tmp_path)) if isinstance(path, str) else path
    for step in (1, 2):
        checkpoint.save({"t": torch.arange(4 + step)}, path, trainer_state={"x": step})
    plain = os.fspath(path).rstrip("/")
    for where in (path, f"{plain}/manifest.json"):
        stored = checkpoint.read(where)
        assert checkpoint.exists(where)
        assert torch.equal(stored["t"].full(), torch.arange(6))
        assert stored["t"][2:4].tolist() == [2, 3]
        assert stored.trainer_state() == {"x": 2}
    assert checkpoint.verify(path).ok
    assert len(stored.store.names()) == 4, "leftovers of the first save"
    checkpoint.gather(path, f"{plain}.safetensors")
    for _ in range(2):
        checkpoint.remove(path)
        assert not checkpoint.exists(path)
        assert stored.store.names() == []
    if "memory:" not in plain:
        local = plain.rpartition("://")[2]
        assert (tmp_path / f"{local}.safetensors").exists()
        assert not (tmp_path / local).exists()


def test_a_manifest_in_the_working_directory_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save({"t": torch.ones(2)}, tmp_path / "c")
    monkeypatch.chdir(tmp_path / "c")
    assert checkpoint.read("manifest.json")["t"].full().tolist() == [1, 1]
    assert [entry.name for entry in checkpoint.list("..")] == ["c"]
    assert checkpoint.exists("local://../c")


@pytest.mark.parametrize(
    "path", ["s3://bucket/run::A", "memory://a::b", "/tmp/s3://bucket/a", "a::b://c", "a/b::s3://c"]
)
def test_a_url_that_fsspec_would_cut_is_refused(path: str) -> None:
    with pytest.raises(
        CheckpointError, match=r"'::', which joins URLs|'://' in its middle|joins the local disk|can't be opened"
    ):
        checkpoint.save({"t": torch.ones(1)}, path)


def test_a_leading_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for path in ("~/a", "file://~/b"):
        checkpoint.save({"t": torch.ones(2)}, path)
        assert checkpoint.read(path)["t"].full().tolist() == [1, 1]
        checkpoint.gather(path, "~/c.safetensors")
    assert [entry.name for entry in checkpoint.list("~")] == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "home")) == ["a", "b", "c.safetensors"]
    checkpoint.save({"t": torch.ones(2)}, "./~/a")
    assert sorted(os.listdir(tmp_path)) == ["home", "~"]
    checkpoint.remove("~/a")
    assert [entry.name for entry in checkpoint.list("~")] == ["b"]


@pytest.mark.parametrize("path", [None, 5, 1.5, True, b"a", ["a"], {"a": 1}, torch.ones(2)])
def test_what_is_no_path_is_refused_by_name(path: Any, tmp_path: Path) -> None:
    state = {"t": torch.ones(1)}
    checkpoint.save(state, tmp_path / "a")
    with checkpoint.AsyncSaver() as saver:
        for call in (
            lambda: checkpoint.save(state, path),
            lambda: saver.save(state, path),
            lambda: checkpoint.load(path, state),
            lambda: checkpoint.read(path),
            lambda: checkpoint.list(path),
            lambda: checkpoint.remove(path),
            lambda: checkpoint.diff(tmp_path / "a", path),
            lambda: checkpoint.prune(path, keep=1),
        ):
            with pytest.raises(CheckpointError, match=r"path \(.*\) must be a str"):
                call()
    (tmp_path / "file").write_text("a plain checkpoint")
    with pytest.raises(CheckpointError, match="is a single file, and a checkpoint is a directory"):
        checkpoint.save(state, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "a plain checkpoint"
    for name, says in (("a\0b", "holds a NUL"), ("a\ud800", "holds half a character")):
        for place in (tmp_path, "memory:/"):
            with pytest.raises(CheckpointError, match=says):
                checkpoint.save(state, f"{place}/{name}")
    with pytest.raises(CheckpointError, match="a byte that is no UTF-8"):
        checkpoint.save(state, "memory://a\udc80")
    checkpoint.save(state, tmp_path / "a\udc80")  # a name of any bytes, as Python has it
    assert len(checkpoint.list(tmp_path)) == 2
    with pytest.raises(CheckpointError, match=r"out \(.*\) must be a str"):
        checkpoint.gather(tmp_path / "a", path)


def test_what_answers_from_copies_is_read_and_not_saved_to() -> None:
    """A save over another one saw that one's manifest after its commit, and removed its own files."""
    plain = "memory://kept-copies/a"
    checkpoint.save({"w": torch.ones(2)}, plain)
    for url in (f"simplecache::{plain}", f"filecache::{plain}"):
        assert torch.equal(checkpoint.read(url)["w"].full(), torch.ones(2))
        for change in (
            lambda url=url: checkpoint.save({"w": torch.zeros(2)}, url),
            lambda url=url: checkpoint.remove(url),
        ):
            with pytest.raises(CheckpointError, match=f"goes through a cache.*{plain} can be saved to"):
                change()
    assert torch.equal(checkpoint.read(plain)["w"].full(), torch.ones(2))


def test_two_places_of_the_local_disk_are_not_joined(tmp_path: Path) -> None:
    """The path would have been left out: what was saved was in the working directory."""
    with pytest.raises(CheckpointError, match="joins the local disk"):
        checkpoint.save({"w": torch.ones(2)}, f"local::file://{tmp_path}/a")
