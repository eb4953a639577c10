"""Two tiers without Lightning: local copies are carried whole, kept apart, and read when they are the newest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec
import pytest
import torch
from s3fs import S3FileSystem

from lightning_shard import ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint import carry as carry_module
from lightning_shard.checkpoint.carry import carry as carry_files
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.store import LocalStore, open_store
from lightning_shard.checkpoint.tiers import CARRIED, LocalTier, Source
from lightning_shard.errors import (
    CheckpointConflictError,
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
)

ALONE = Ranks()


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier.at(tmp_path / "disk", {})


def save(path: str | Path, step: int, rows: int = 7, **options: Any) -> None:
    tensors = {"w": torch.full((rows, 1000), float(step)), "small": torch.arange(5), "none": torch.empty(0, 3)}
    tensors["tied"] = tensors["w"]
    state = {"global_step": step, "kept": torch.ones(3)}
    checkpoint.save(tensors, path, optimizer={"w.m": torch.ones(3)}, trainer_state=state, fsync=False, **options)


def carry(tier: LocalTier, path: str) -> None:
    tier.carry(path, ALONE, fsync=False)


def contents(folder: str | Path) -> dict[str, bytes]:
    root = Path(folder)
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def damages(folder: str | Path) -> Iterator[tuple[str, bytes | None]]:
    """Damage each file in turn: bits of it are flipped, it is cut off, it is gone. Then it is as it was."""
    files = contents(folder)
    assert len(files) >= 4
    for name, data in files.items():
        file = Path(folder) / name
        then = file.stat().st_mtime
        flipped = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, len(data) // 2, len(data) - 1)]
        for damaged in (*flipped, data[:-1], None):
            file.unlink() if damaged is None else file.write_bytes(damaged)
            yield name, damaged
            file.write_bytes(data)
            os.utime(file, (then, then))


def put_back(folder: str | Path, before: dict[str, bytes]) -> None:
    """Remove what a carrying that failed has brought; nothing else may have changed."""
    for name in contents(folder).keys() - before.keys():
        (Path(folder) / name).unlink()
    assert contents(folder) == before


def step_of(path: str | Path) -> int:
    return int(checkpoint.read(path)["w"].full()[0, 0])


def aged(path: str | Path, seconds: float) -> None:
    """Move a commit's time."""
    manifest = Path(path) / "manifest.json"
    at = manifest.stat().st_mtime + seconds
    os.utime(manifest, (at, at))


@pytest.mark.parametrize("digests", [True, False])
def test_what_is_carried_is_the_same_file_by_file(tmp_path: Path, tier: LocalTier, digests: bool) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    save(path, 1)
    save(tier.copy_of(path), 2, rows=1100, rank_state={"generator": torch.ones(8)}, digests=digests)
    carry(tier, path)
    assert contents(path) == contents(tier.copy_of(path))
    assert checkpoint.verify(path).ok
    assert step_of(path) == 2
    carry(tier, path)  # nothing is left to do
    assert contents(path) == contents(tier.copy_of(path))


def test_every_damaged_block_of_a_copy_is_found_on_the_way_and_nothing_is_committed(
    tmp_path: Path, tier: LocalTier
) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    save(path, 1)
    before = contents(path)
    save(tier.copy_of(path), 2)
    for _ in damages(tier.copy_of(path)):
        with pytest.raises(CheckpointError):
            carry(tier, path)
        put_back(path, before)
    carry(tier, path)
    assert step_of(path) == 2


def test_a_store_that_fails_leaves_the_earlier_checkpoint_and_the_copy(tmp_path: Path, tier: LocalTier) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    save(path, 1)
    before = contents(path)
    save(tier.copy_of(path), 2)

    def full(self: LocalStore, name: str, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    for call in ("write", "publish"):
        with mock.patch.object(LocalStore, call, full), pytest.raises(CheckpointError, match="No space left"):
            carry(tier, path)
        assert before.items() <= contents(path).items()
        assert step_of(path) == 1
        assert step_of(tier.copy_of(path)) == 2


def test_another_save_that_came_first_stays(tmp_path: Path, tier: LocalTier) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    save(path, 1)
    save(tier.copy_of(path), 2)
    original = LocalStore.sync

    def meanwhile(self: LocalStore, names: Any) -> None:
        with mock.patch.object(LocalStore, "sync", original):
            save(path, 3)
        original(self, names)

    with mock.patch.object(LocalStore, "sync", meanwhile), pytest.raises(CheckpointConflictError):
        tier.carry(path, ALONE, fsync=True)
    assert step_of(path) == 3
    assert checkpoint.verify(path).ok


def names_of_copies(tier: LocalTier, tmp_path: Path) -> list[str]:
    folder = tier.folder(str(tmp_path / "store"))
    copies = sorted(name for name in os.listdir(folder) if name != CARRIED)
    assert {note.name for note in Path(folder, CARRIED).glob("*")} <= set(copies)
    return copies


def source(tier: LocalTier, path: str) -> Source:
    return tier.source(path, ALONE, fsync=False)


def save_and_carry(tier: LocalTier, tmp_path: Path, *steps: int) -> None:
    for step in steps:
        path = str(tmp_path / "store" / f"step={step}.ckpt")
        save(tier.copy_of(path), step)
        aged(tier.copy_of(path), step)
        carry(tier, path)


def test_a_copy_that_was_never_carried_stays_until_it_is_or_another_takes_its_place(
    tmp_path: Path, tier: LocalTier
) -> None:
    path = str(tmp_path / "store" / "step=2.ckpt")
    save(tier.copy_of(path), 2)
    save_and_carry(tier, tmp_path, 3, 4, 5)
    assert names_of_copies(tier, tmp_path) == ["step=2.ckpt", "step=4.ckpt", "step=5.ckpt"]
    save(path, 1)
    aged(path, 60)
    save_and_carry(tier, tmp_path, 6)
    assert "step=2.ckpt" in names_of_copies(tier, tmp_path)  # of a later step: a clock may be behind
    save(path, 2)
    aged(path, 60)
    save_and_carry(tier, tmp_path, 7)
    assert names_of_copies(tier, tmp_path) == ["step=6.ckpt", "step=7.ckpt"]


def test_a_copy_that_is_resumed_from_is_carried_first_or_that_is_warned_of(tmp_path: Path, tier: LocalTier) -> None:
    path = str(tmp_path / "store" / "step=2.ckpt")
    save(tier.copy_of(path), 2)
    with mock.patch.object(LocalStore, "write", side_effect=PermissionError(13, "Permission denied")):
        found = source(tier, path)
    assert (found.local, found.worse) == (True, True)
    assert "couldn't be carried there" in found.why
    assert "Permission denied" in found.why
    with mock.patch.object(LocalStore, "write", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        source(tier, path)
    found = source(tier, path)
    assert (found.local, found.worse) == (True, False)
    assert step_of(path) == 2


def test_a_copy_without_digests_is_taken_only_where_the_store_has_none(tmp_path: Path, tier: LocalTier) -> None:
    with pytest.raises(ConfigurationError, match="digests"):
        ShardedCheckpointIO(local=tmp_path / "disk", digests=False)
    path = str(tmp_path / "store" / "last.ckpt")
    copy = Path(tier.copy_of(path))
    save(copy, 5, digests=False)
    assert source(tier, path).local
    (file,) = copy.glob("model/*")
    file.write_bytes(file.read_bytes()[:-1000] + bytes(1000))
    assert source(tier, path) == Source(path, False, mock.ANY)  # one attempt: the store's is whole
    save(path, 4)
    aged(copy, 10)
    found = source(tier, path)
    assert (found.path, found.worse) == (path, True)
    assert tier.newest(str(tmp_path / "store"), "another.ckpt", lambda name: True, lambda commit: commit) is not None
    save(f"{tmp_path}/store/another.ckpt", 3)
    assert tier.newest(str(tmp_path / "store"), "another.ckpt", lambda name: True, lambda commit: commit) is None


def test_the_copy_is_read_where_it_is_the_same_the_only_one_or_newer(tmp_path: Path, tier: LocalTier) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    copy = tier.copy_of(path)

    def chosen(worse: bool = False) -> str:
        found = source(tier, path)
        assert found.local == (found.path == copy)
        assert found.worse == worse
        return found.path

    assert chosen() == path  # neither is there
    assert source(tier, path).why == "it has no local copy"
    save(copy, 5)
    assert chosen() == copy  # the only one
    assert step_of(path) == 5  # it no longer is
    assert chosen() == copy  # the same
    save(path, 6)
    aged(path, 10)
    assert chosen() == path
    save(copy, 7)
    aged(copy, 20)
    assert chosen() == copy  # newer in both
    assert step_of(path) == 7
    save(path, 6)
    aged(path, 30)
    assert chosen(worse=True) == path  # of a later step, but an earlier commit: of an earlier run, or a clock is behind
    assert "clock" in source(tier, path).why
    save(copy, 4)
    aged(copy, 40)
    assert chosen() == path  # committed later, but of an earlier step
    (Path(path) / "manifest.json").write_bytes(b"")  # torn
    assert chosen() == copy
    assert step_of(path) == 4
    shutil.rmtree(tier.root)  # the machine is gone
    save(path, 7)
    assert chosen() == path


@pytest.mark.parametrize("another", [True, False])
def test_a_newer_copy_with_any_damage_is_passed_over_and_that_is_said(
    tmp_path: Path, tier: LocalTier, another: bool
) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    copy = Path(tier.copy_of(path))
    if another:
        save(path, 1)
    save(copy, 5)
    aged(copy, 10)
    for name, damaged in damages(copy):
        if another or name == "manifest.json":
            found = source(tier, path)
            assert (found.path, found.local) == (path, False)
            assert found.worse == ((name, damaged) != ("manifest.json", None))
        else:
            with pytest.raises(CorruptCheckpointError, match="remove the copy"):
                source(tier, path)
            assert not Path(path).exists()
    assert source(tier, path).path == str(copy)


def test_the_newest_copy_is_found_where_it_is_newer_than_what_the_store_has(tmp_path: Path, tier: LocalTier) -> None:
    store = str(tmp_path / "store")

    def newest(found: str | None) -> str | None:
        commit = tier.newest(store, found, lambda name: name.startswith("last"), lambda commit: commit)
        return commit[1] if commit else None

    assert newest(None) is None
    save(tier.copy_of(f"{store}/step=9.ckpt"), 9)
    save(tier.copy_of(f"{store}/last.ckpt"), 5)
    assert newest(None) == "last.ckpt"
    carry(tier, f"{store}/last.ckpt")
    assert newest("last.ckpt") is None
    save(tier.copy_of(f"{store}/last-v1.ckpt"), 6)
    aged(tier.copy_of(f"{store}/last-v1.ckpt"), 10)
    assert newest("last.ckpt") == "last-v1.ckpt"
    (file,) = (Path(tier.copy_of(f"{store}/last-v1.ckpt")) / "model").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert newest("last.ckpt") == "last-v1.ckpt"  # it isn't read before the ranks share that
    with pytest.raises(CorruptCheckpointError, match="remove the copy"):
        source(tier, f"{store}/last-v1.ckpt")
    file.write_bytes(whole[:-1])
    assert newest("last.ckpt") is None
    file.write_bytes(whole)
    save(tier.copy_of(f"{store}/last.ckpt"), 8)
    aged(tier.copy_of(f"{store}/last.ckpt"), 30)
    assert newest("last.ckpt") is None  # where to read it is decided later
    save(tier.copy_of(f"{store}/last.ckpt"), 5)
    save(f"{store}/last-v2.ckpt", 7)
    assert newest("last-v2.ckpt") is None
    (Path(tier.copy_of(f"{store}/last-v1.ckpt")) / "manifest.json").write_bytes(b"torn")
    assert newest("last.ckpt") is None


@pytest.mark.long
def test_copies_of_several_folders_and_stores_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def copy_of(path: str, **options: Any) -> str:
        S3FileSystem.clear_instance_cache()
        return LocalTier.at(tmp_path, options).copy_of(path)

    one, other = {"endpoint_url": "http://one"}, {"client_kwargs": {"endpoint_url": "http://other"}}
    copies = {
        copy_of("s3://bucket/run/last.ckpt"),
        copy_of("s3://bucket/run/last.ckpt", **one),
        copy_of("s3://bucket/run/last.ckpt", **other),
        copy_of("s3://bucket/b/run/last.ckpt"),
        copy_of("/data/run/last.ckpt"),
    }
    assert len(copies) == 5
    assert all(copy.startswith(f"{tmp_path}/run-") and copy.endswith("/last.ckpt") for copy in copies)
    tier = LocalTier.at(tmp_path, {})
    assert tier.copy_of("s3://bucket/run/last.ckpt/") == tier.copy_of("s3://bucket/run/last.ckpt")
    assert os.path.dirname(tier.copy_of("s3://bucket/run/last.ckpt")) == tier.folder("s3://bucket/run")

    # one endpoint is one store, however it was named
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    assert copy_of("s3://bucket/run/last.ckpt") in copies
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://third")
    assert copy_of("s3://bucket/run/last.ckpt") not in copies
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": "http://one"})
    assert copy_of("s3://bucket/run/last.ckpt", key="k" * 9, secret="s" * 9) in copies


def test_places_are_told_apart_by_all_texts_and_ports_but_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(**options: Any) -> tuple[str, ...]:
        return open_store("memory://bucket/run", options).place()

    secrets = {"account_key": "hidden", "stall_s": 5, "auth": ["me", "hidden"], "nested": {"password": "hidden"}}
    texts = "AccountName=one;AccountKey=hidden;SharedAccessSignature=hidden"
    places = {
        place(),
        place(account_name="one"),
        place(account_name="other"),
        place(host="one", port=22),
        place(host="one", port=23),
        place(client_kwargs={"endpoint": "http://me:hidden@one"}),
        place(connection_string=texts),
        place(connection_string=texts.replace("one", "other")),
    }
    assert len(places) == 8
    assert "hidden" not in repr(places)
    assert place(**secrets) == place()
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "another")
    assert place() not in places


def test_a_local_tier_must_be_on_the_local_disk_and_shows_no_secrets(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="local disk"):
        ShardedCheckpointIO(local="memory://disk")
    io = ShardedCheckpointIO({"secret": "never to be seen"}, local=tmp_path)
    assert "never" not in repr(io.local)


def test_without_a_strategy_saves_are_carried_before_they_return_and_removed_in_both_tiers(tmp_path: Path) -> None:
    io = ShardedCheckpointIO(local=tmp_path / "disk", fsync=False)
    path = str(tmp_path / "store" / "one.ckpt")
    io.save_checkpoint({"state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2.6"}, path)
    assert contents(path) == contents(io.local.copy_of(path)) != {}
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["w"], torch.ones(3))
    io.remove_checkpoint(path)
    assert not checkpoint.exists(path)
    assert not checkpoint.exists(io.local.copy_of(path))


def test_a_carrying_that_was_cut_off_is_taken_up_and_what_another_has_carried_meanwhile_stays(
    tmp_path: Path, tier: LocalTier
) -> None:
    path = str(tmp_path / "store" / "last.ckpt")
    save(tier.copy_of(path), 2)
    copy = checkpoint.read(tier.copy_of(path))
    everything = contents(tier.copy_of(path))
    for file in copy.manifest.files[:2]:
        (Path(path) / file.path).parent.mkdir(parents=True, exist_ok=True)
        (Path(path) / file.path).write_bytes(b"cut off")

    def remove(self: LocalStore, name: str, *args: Any, original: Any = LocalStore.remove, **kwargs: Any) -> None:
        assert name not in everything, "whoever carried it may be about to commit it"
        original(self, name, *args, **kwargs)

    with mock.patch.object(LocalStore, "remove", remove):
        carry_files(copy, path, copy.manifest.files, ALONE, storage_options={}, fsync=False)
    assert contents(path) == everything

    # two processes at the same time: the second finds its checkpoint committed, or fails, and takes nothing away
    original = LocalStore.publish
    for fails in (False, True):
        shutil.rmtree(path)

        def publish(self: LocalStore, name: str, *args: Any, fails: bool = fails, **kwargs: Any) -> None:
            original(self, name, *args, **kwargs)
            if fails and name == "manifest.json":
                raise OSError(5, "Input/output error")
            original(self, name, *args, **kwargs)

        with mock.patch.object(LocalStore, "publish", publish):
            if fails:
                with pytest.raises(CheckpointError, match="Input/output"):
                    carry(tier, path)
            else:
                carry(tier, path)
        assert contents(path) == everything


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_carrying_that_fails_takes_nothing_from_one_that_counts_on_it(
    tmp_path: Path, tier: LocalTier, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A stalled run fails just when its successor, which carries the same copy, has looked at its files."""
    path = str(tmp_path / "store") if where == "disk" else "memory://carried/one"
    save(tier.copy_of(path), 2)
    copy = checkpoint.read(tier.copy_of(path))
    files, options = copy.manifest.files, {"storage_options": {}, "fsync": False}
    stalled = ["run"]
    check = carry_module.check_files

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    def check_files(*arguments: Any) -> None:
        check(*arguments)
        if stalled:
            stalled.pop()
            kind = type(open_store(path))
            with mock.patch.object(kind, "write", fail), pytest.raises(CheckpointError, match="Input/output"):
                carry_files(copy, path, files, ALONE, **options)

    monkeypatch.setattr(carry_module, "check_files", check_files)
    carry_files(copy, path, files, ALONE, **options)
    assert not stalled
    assert checkpoint.verify(path).ok
    checkpoint.remove(path)
