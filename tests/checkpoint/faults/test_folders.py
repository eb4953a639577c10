"""What lies in a checkpoint's folder beside it: other programs' files, links, leftovers, torn manifests."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import LocalStore
from lightning_shard.errors import CheckpointError, CheckpointReplacedError
from lightning_shard.testing import ranks
from tests.checkpoint.faults.saves import age
from tests.checkpoint.manifests import edit

STATE = {"w": torch.arange(12.0)}
NEW = {"w": torch.zeros(5)}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(STATE, tmp_path / "c", optimizer=STATE)
    return tmp_path / "c"


def files(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("content", ['{"name": "an extension", "manifest_version": 3}', "no JSON", "[]"])
def test_another_program_s_manifest_is_neither_replaced_nor_removed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c"
    (path / "icons").mkdir(parents=True)
    (path / "manifest.json").write_text(content)
    for work in (lambda: checkpoint.save(NEW, path), lambda: checkpoint.remove(path)):
        with pytest.raises(CheckpointError, match="another program's"):
            work()
    assert files(path) == {"manifest.json"}
    assert (path / "manifest.json").read_text() == content


@pytest.mark.parametrize("torn", [b"", b"\0" * 4096, "half", "a digest"])
def test_a_torn_manifest_of_ours_is_replaced_and_removed(saved: Path, torn: bytes | str) -> None:
    manifest = saved / "manifest.json"
    data = manifest.read_bytes()
    halves = {"half": data[: data.index(b'"optimizer"')], "a digest": data[:-10] + b"0" + data[-9:]}
    content = torn if isinstance(torn, bytes) else halves[torn]
    named = files(saved) - {"manifest.json"}
    manifest.write_bytes(content)
    checkpoint.save(NEW, saved)
    assert torch.equal(checkpoint.read(saved)["w"].full(), NEW["w"])
    left = files(saved) & named  # all of which the torn one may have named, and doesn't any more
    assert left == (named if isinstance(torn, bytes) else set())
    manifest.write_bytes(content)
    age(saved)
    checkpoint.remove(saved)
    assert not saved.exists()


def test_a_removal_takes_what_the_manifest_names_and_what_is_old(saved: Path) -> None:
    young, old = saved / "model" / f"rank-00001-{'a' * 12}.safetensors", saved / "trainer" / f"state-{'b' * 12}.json"
    temporary = saved / "manifest.json.123-0123abcd.tmp"
    old.parent.mkdir()
    for file in (old, temporary):
        file.write_text("torn")
    age(saved)
    young.write_text("of a save under way")
    (saved / "mine").mkdir()
    checkpoint.remove(saved)
    assert files(saved) == {f"model/{young.name}"}
    assert sorted(entry.name for entry in saved.iterdir()) == ["mine", "model"], "an empty folder of someone else's"


def test_a_save_removes_leftovers_when_the_whole_attempt_is_old(saved: Path) -> None:
    attempt = "a" * 12
    parts = [saved / "model" / f"rank-{rank:05d}-{attempt}.safetensors" for rank in range(2)]
    temporary = saved / "manifest.json.123-0123abcd.tmp"
    for file in (*parts, temporary):
        file.write_text("torn")
    age(saved)
    os.utime(parts[1])  # the other rank still writes
    checkpoint.save(NEW, saved)
    assert all(part.exists() for part in parts)
    assert not temporary.exists()
    age(saved)
    checkpoint.save(NEW, saved)
    assert len(files(saved)) == 3


def test_files_that_are_gone_before_the_commit_are_missed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another program's cleaning, whatever it is."""
    sync = LocalStore.sync
    before = files(saved)

    def clean(self: LocalStore, names: object) -> None:
        sync(self, names)  # type: ignore[arg-type]
        for file in files(saved) - before:
            (saved / file).unlink()

    monkeypatch.setattr(LocalStore, "sync", clean)
    with pytest.raises(CheckpointError, match=r"missing or have another size \(model/rank-00000.* is gone\)"):
        checkpoint.save(NEW, saved)
    monkeypatch.setattr(LocalStore, "sync", sync)
    assert checkpoint.verify(saved).ok
    assert files(saved) == before


def test_a_link_to_a_checkpoint_is_not_written_through_and_only_the_link_is_removed(saved: Path) -> None:
    link = saved.with_name("last.ckpt")
    link.symlink_to(saved.name)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is a symbolic link to the checkpoint .*/c, which would be"):
        checkpoint.save(NEW, link)
    assert torch.equal(checkpoint.read(link)["w"].full(), STATE["w"])
    assert checkpoint.verify(saved).ok
    checkpoint.remove(f"{link}/manifest.json")
    assert not link.is_symlink()
    assert checkpoint.verify(saved).ok
    elsewhere = saved.with_name("elsewhere")
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    checkpoint.save(NEW, link)  # a place on another disk
    assert checkpoint.verify(elsewhere).ok
    checkpoint.remove(elsewhere)
    checkpoint.save(NEW, link)  # which leads nowhere
    assert checkpoint.verify(link).ok
    assert not link.is_symlink()


def test_what_could_not_be_read_through_a_link_is_not_saved_through_it(tmp_path: Path) -> None:
    for folder in ("elsewhere", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "c" / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="link that leads out"):
        checkpoint.save(STATE, tmp_path / "c")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_lazy_reader_is_told_that_its_checkpoint_was_replaced_or_removed(saved: Path) -> None:
    stored = checkpoint.read(saved)
    checkpoint.save(NEW, saved)
    with pytest.raises(
        CheckpointReplacedError, match=r"was replaced by attempt [0-9a-f]{12} while it was read: open it"
    ):
        stored["w"].full()
    stored = checkpoint.read(saved)
    checkpoint.remove(saved)
    with pytest.raises(CheckpointReplacedError, match="was removed while it was read"):
        stored["w"].full()


def test_a_load_starts_over_where_the_checkpoint_is_replaced(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch = checkpoint.Checkpoint.fetch

    def replaced_first(self: checkpoint.Checkpoint, *args: object, **kwargs: object) -> int:
        monkeypatch.setattr(checkpoint.Checkpoint, "fetch", fetch)
        checkpoint.save({"w": torch.ones(12)}, saved)
        return fetch(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint.Checkpoint, "fetch", replaced_first)
    into = {"w": torch.zeros(12)}
    checkpoint.load(saved, into)
    assert into["w"].tolist() == [1] * 12


def test_a_link_that_was_made_although_its_answer_was_lost_is_no_conflict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS asks once more then, and is told that the name is taken."""
    link = os.link

    def link_twice(source: str, target: str) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", link_twice)
    checkpoint.save({"w": torch.ones(2)}, tmp_path / "a")
    assert checkpoint.verify(tmp_path / "a").ok
    assert sorted(path.name for path in (tmp_path / "a").iterdir() if not path.name.startswith("table-")) == [
        "manifest.json",
        "model",
    ]


def test_only_our_own_leftovers_are_removed(saved: Path) -> None:
    model = saved / "model"
    keep = [saved / "notes.txt", model / "rank-00000.safetensors", model / "x-0123456789ab.safetensors"]
    for file in keep:
        file.write_text("mine")
    # an old manifest that names a file of someone else's
    edit(saved, lambda manifest: manifest["files"].append({"path": "notes.txt", "bytes": 4, "digest": "0" * 32}))
    age(saved)
    checkpoint.save(NEW, saved)
    assert all(file.read_text() == "mine" for file in keep)


def test_an_interruption_after_the_commit_takes_nothing_away(saved: Path) -> None:
    with mock.patch.object(LocalStore, "names", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        checkpoint.save(NEW, saved)
    assert checkpoint.verify(saved).ok
    assert torch.equal(checkpoint.read(saved)["w"].full(), NEW["w"])


def test_a_manifest_that_came_through_in_spite_of_an_error_keeps_its_files(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = os.replace

    def replaced(*paths: str) -> None:
        original(*paths)
        if os.path.basename(paths[1]) == "manifest.json":
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "replace", replaced)
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoint.save(NEW, saved)
    assert checkpoint.verify(saved).ok
    assert torch.equal(checkpoint.read(saved)["w"].full(), NEW["w"])


@ranks(2)
def test_a_failing_commit_raises_on_all(tmp_path: Path) -> None:
    fails = {"side_effect": PermissionError(13, "Permission denied")} if dist.get_rank() == 0 else {"wraps": os.link}
    with mock.patch.object(os, "link", **fails), pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.save({"w": torch.ones(6)}, tmp_path / "c")
    dist.barrier()
    assert not (tmp_path / "c").exists()
