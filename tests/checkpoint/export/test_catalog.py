"""What checkpoints a folder has, which is the newest, and which go: on the local disk and on an S3 server."""

from __future__ import annotations

import errno
import json
import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint import catalog
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.cli import main
from lightning_shard.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from tests.servers import let_servers_forget

STEPS = (9, 10, 11, 12)


def save(url: str, options: dict[str, Any] | None, step: int, key: str = "global_step") -> None:
    checkpoint.save({"w": torch.full((3,), float(step))}, url, trainer_state={key: step}, storage_options=options)


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, Any] | None]:
    """A folder's URL, the folder itself and the store's options; with four checkpoints, a torn one and a file."""
    if request.param == "local":
        url, folder, options = str(tmp_path / "run"), tmp_path / "run", None
    else:
        server = request.getfixturevalue("s3_server")
        name = request.node.name.replace("[", "-").replace("]", "")
        url, folder, options = f"{server.url}/{name}", server.folder / "bucket" / name, server.options
    for step in STEPS:
        save(f"{url}/step={step}", options, step)
    (folder / "torn" / "model").mkdir(parents=True)
    (folder / "torn" / "model" / "rank-00000-0123456789ab.safetensors").write_bytes(b"half")
    (folder / "notes.txt").write_text("mine")
    for index, step in enumerate(STEPS):  # the order of the commits, one in the same second as the one before
        at = 1_700_000_000 + index - (step == 10)
        os.utime(folder / f"step={step}" / "manifest.json", (at, at))
    let_servers_forget()
    return url, folder, options


def test_committed_checkpoints_are_listed_by_the_time_of_their_commits(place: Any) -> None:
    url, folder, options = place
    entries = checkpoint.list(url, storage_options=options)
    assert [entry.name for entry in entries] == [f"step={step}" for step in STEPS]
    assert [entry.step for entry in entries] == list(STEPS)
    assert entries[-1].committed == datetime.fromtimestamp(1_700_000_003, UTC)
    for entry in entries:
        assert entry.attempt == checkpoint.read(entry, storage_options=options).manifest.attempt
        assert entry.bytes == sum(f.stat().st_size for f in (folder / entry.name).rglob("*/*") if f.is_file())
    assert checkpoint.latest(url, storage_options=options) == entries[-1].path == f"{url}/step=12"
    assert checkpoint.latest(f"{url}/nothing", storage_options=options) is None
    assert checkpoint.list(f"{url}/nothing", storage_options=options) == []


def test_the_oldest_are_removed_and_nothing_else(place: Any) -> None:
    url, folder, options = place
    (folder / "step=9" / "mine.txt").write_text("not a checkpoint's")
    (folder / "step=13").mkdir()
    (folder / "step=13" / "manifest.json").write_text("{")
    let_servers_forget()
    with pytest.raises(CheckpointNotFoundError, match="step=77"):
        checkpoint.prune(url, keep=1, protect=[f"{url}/step=77"], storage_options=options)
    with pytest.raises(ConfigurationError, match="at least 1"):
        checkpoint.prune(url, keep=0, storage_options=options)
    assert len(checkpoint.list(url, storage_options=options)) == len(STEPS) + 1
    gone = checkpoint.prune(url, keep=2, protect=["step=10", f"{url}/step=12/"], storage_options=options)
    assert gone == [f"{url}/step=9"]
    assert checkpoint.prune(url, keep=1, protect=lambda entry: entry.step == 11, storage_options=options) == [
        f"{url}/step=10"
    ]
    let_servers_forget()
    assert (folder / "torn" / "model" / "rank-00000-0123456789ab.safetensors").exists()
    assert [path.name for path in (folder / "step=9").rglob("*") if path.is_file()] == ["mine.txt"]
    entries = checkpoint.list(url, storage_options=options)  # the damaged one isn't counted, and stays
    assert [(entry.name, bool(entry.fault)) for entry in entries] == [
        ("step=11", False),
        ("step=12", False),
        ("step=13", True),
    ]


def test_what_was_saved_anew_since_the_look_is_not_removed(tmp_path: Path) -> None:
    for step, name in enumerate(("last.ckpt", "middle", "newest")):
        save(str(tmp_path / name), None, step)

    def meanwhile(entry: checkpoint.Entry) -> bool:
        save(str(tmp_path / "last.ckpt"), None, 3)
        return False

    assert checkpoint.prune(tmp_path, keep=1, protect=meanwhile) == [str(tmp_path / "middle")]
    assert [entry.step for entry in checkpoint.list(tmp_path)] == [2, 3]


def test_where_the_store_tells_no_times_nothing_is_removed() -> None:
    class Timeless(MemoryFileSystem):
        protocol = "timeless"

        def modified(self, path: str) -> Any:
            raise NotImplementedError

    fsspec.register_implementation("timeless", Timeless, clobber=True)
    for step, name in enumerate(("z", "a")):
        save(f"timeless://run/{name}", None, step)
    with pytest.raises(CheckpointError, match="no modification times"):
        checkpoint.prune("timeless://run", keep=1)
    assert [entry.name for entry in checkpoint.list("timeless://run")] == ["a", "z"]
    assert checkpoint.prune("timeless://run", keep=2) == []
    fsspec.filesystem("memory").store.clear()


def test_what_is_removed_while_a_folder_is_listed_is_neither_listed_nor_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        save(str(tmp_path / name), None, 1)
    read = catalog.read

    def read_later(path: str, **options: Any) -> Any:
        if path.endswith("/a"):
            checkpoint.remove(path)
        opened = read(path, **options)
        if path.endswith("/b"):
            checkpoint.remove(path)
        return opened

    monkeypatch.setattr(catalog, "read", read_later)
    assert [(entry.name, entry.fault) for entry in checkpoint.list(tmp_path)] == [("c", None)]


def test_a_folder_that_may_not_be_looked_into_is_told_of_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("last.ckpt", "last-v1.ckpt", "lost+found"):
        save(str(tmp_path / name), None, 1)
    modified = LocalStore.modified

    def denied(self: LocalStore, name: str) -> float | None:
        if self.root.endswith(("last-v1.ckpt", "lost+found")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), self.root)
        return modified(self, name)

    monkeypatch.setattr(LocalStore, "modified", denied)
    with pytest.warns(UserWarning, match=r"last-v1\.ckpt can't be looked into") as told:
        assert [entry.name for entry in checkpoint.list(tmp_path)] == ["last.ckpt"]
    assert len(told) == 1
    # it may be the newest, from which a run would go on
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(checkpoint_io=ShardedCheckpointIO()))
    with pytest.raises(CheckpointError, match="PermissionError"):
        ModelCheckpoint(tmp_path)._find_last_checkpoints(trainer)


def test_a_link_is_not_a_checkpoint_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    for step in STEPS:
        save(str(tmp_path / f"step={step}"), None, step, key="step")
    (tmp_path / "best").symlink_to("step=9", target_is_directory=True)
    assert [entry.step for entry in checkpoint.list(tmp_path)] == list(STEPS)
    checkpoint.prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step=12", "step=9"]
    assert checkpoint.verify(tmp_path / "best").ok


def test_the_command_line_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(tmp_path)]) == 0
    assert "no committed checkpoint" in capsys.readouterr().out
    for step in (1, 2):
        save(str(tmp_path / f"step={step}"), None, step)
    assert main(["list", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["step=1", "1"], ["step=2", "2"]]
    assert main(["list", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(entry["name"], entry["step"], entry["fault"]) for entry in listed] == [
        ("step=1", 1, None),
        ("step=2", 2, None),
    ]
    assert datetime.fromisoformat(listed[0]["committed"]).tzinfo is not None
    assert checkpoint.list(tmp_path / "step=1") == []  # itself isn't in its folder
    (tmp_path / "step=1" / "manifest.json").write_text("{")
    assert main(["list", str(tmp_path)]) == 1
    assert "damaged" in capsys.readouterr().out
