"""What stores promise beyond their verbs: no wait without end, nothing published cut, one winner, no secrets shown."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import fsspec
import lightning as L
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_shard import ModelCheckpoint, ShardedCheckpointIO, checkpoint
from lightning_shard.checkpoint.saving.save import Order
from lightning_shard.checkpoint.store import calls, open_store, remote
from lightning_shard.checkpoint.store.calls import Calls
from lightning_shard.checkpoint.store.paths import redact
from lightning_shard.checkpoint.store.remote import RemoteStore
from lightning_shard.checkpoint.store.s3 import S3Store
from lightning_shard.cli import main
from lightning_shard.errors import CheckpointConflictError, CheckpointError
from tests.parity import QUIET
from tests.proxy import Proxy, behind, no_fault, once, through
from tests.servers import BUCKET, KEY, SECRET, Server, serve


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_WAIT_S", 0.02)
    monkeypatch.setattr(calls, "ATTEMPTS", 4)


def view(data: bytes) -> list[memoryview]:
    return [memoryview(data)]


# -- no wait without end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["s3", pytest.param("webdav", marks=pytest.mark.long)])
def test_a_server_that_never_answers_is_not_waited_for(kind: str) -> None:
    """It takes the connection, and not even says that a body may be sent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options: dict[str, Any] = {
            "s3": {
                "key": KEY,
                "secret": SECRET,
                "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
            },
            "webdav": {"base_url": endpoint},
        }[kind]
        path, options = f"{kind}://{BUCKET}/c", {**options, "stall_s": 0.3}
        begun = time.monotonic()
        with pytest.raises((CheckpointError, OSError)) as failure:
            checkpoint.save({"w": torch.ones(3)}, path, storage_options=options)
        assert time.monotonic() - begun < 60
        assert SECRET not in str(failure.value)
        with pytest.raises(OSError, match=r"doesn't answer|[Tt]ime"):
            open_store(path, options).read("manifest.json")


def fit_at(url: str, options: dict[str, Any]) -> None:
    """A new run, which looks into the folder before it trains."""
    trainer = L.Trainer(
        devices=1,
        max_steps=1,
        callbacks=[ModelCheckpoint(url)],
        plugins=[ShardedCheckpointIO(storage_options=options)],
        **{**QUIET, "enable_checkpointing": True},
    )
    trainer.fit(BoringModel(), DataLoader(torch.randn(2, 32)))


LOOK_UPS: dict[str, Callable[[str, dict[str, Any]], Any]] = {
    "latest": lambda url, options: checkpoint.latest(url, storage_options=options),
    "remove": lambda url, options: checkpoint.remove(url, storage_options=options),
    "fit": fit_at,
}


@pytest.mark.parametrize("fault", ["gone", "wrong secret"])
@pytest.mark.parametrize("look_up", LOOK_UPS)
def test_a_store_that_cannot_be_asked_is_named(look_up: str, fault: str, s3_server: Server) -> None:
    options = {**s3_server.options, "stall_s": 2, "secret": "x" * 12}
    if fault == "gone":
        with socket.create_server(("127.0.0.1", 0)) as taken:  # then closed: nobody listens there
            endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        options["client_kwargs"] = {**options["client_kwargs"], "endpoint_url": endpoint}
    url = f"{s3_server.url}/run"
    with pytest.raises(CheckpointError, match=f"^{url}.* can't be (looked up|removed): ") as failure:
        LOOK_UPS[look_up](url, options)
    assert "x" * 12 not in str(failure.value)


class Hanging(MemoryFileSystem):
    """A file system of plain functions, whose reads hang."""

    protocol = "hanging"
    released = threading.Event()

    def cat_file(self, path: str, **_: Any) -> bytes:
        self.released.wait(60)
        raise OSError("too late")


def test_a_file_system_without_a_loop_is_not_waited_for_either() -> None:
    try:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"hanging://c doesn't answer: cat_file took more than"):
            Calls(Hanging(), "hanging://c", stall_s=0.2)("cat_file", "x")
        assert time.monotonic() - begun < 30
    finally:
        Hanging.released.set()


@pytest.mark.parametrize(("word", "attempts"), [("slow down", 4), ("expired", 1), (403, 1)])
def test_what_a_server_says_decides_how_often_it_is_asked(word: Any, attempts: int, s3_server: Server) -> None:
    with behind(s3_server.endpoint, lambda *_: word) as proxy:
        store = open_store(f"{s3_server.url}/c", through(s3_server.options, proxy))
        with pytest.raises(OSError):
            store.write("a", view(b"abc"), 3, durable=False)
        assert proxy.requests == attempts


# -- nothing is published cut ------------------------------------------------------------------------------------------


class LateFile(AbstractBufferedFile):
    """As adlfs': opening removes what was there, discarding does nothing, and what was written is put when it is
    collected.
    """

    def _initiate_upload(self) -> None:
        self.fs.store.pop(self.path, None)
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.store[self.path] = b"".join(self.parts)
        return True

    def discard(self) -> None:
        pass


class LateStore(fsspec.AbstractFileSystem):
    """An object store of whole puts, copies, and :class:`LateFile`."""

    protocol = "gs"
    cachable = False
    store: ClassVar[dict[str, bytes]] = {}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> LateFile:
        return LateFile(self, self._strip_protocol(path), mode, block_size=2**16)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in self.store:
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.store[path]), "type": "file"}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.info(path)
        return self.store[self._strip_protocol(path)][start:end]

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.store[self._strip_protocol(path)] = bytes(value)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.store[self._strip_protocol(path2)] = self.cat_file(path1)

    def rm_file(self, path: str) -> None:
        self.info(path)
        del self.store[self._strip_protocol(path)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> RemoteStore:
    monkeypatch.setattr(remote, "PUT_BYTES", 2**16)
    store = RemoteStore("memory://late", {})
    store.fs = store._calls.fs = LateStore()
    store.base, store._put_bytes = "late", 2**16
    LateStore.store = {}
    return store


def test_a_stream_that_fails_leaves_what_was_there_on_a_store_that_cannot_discard(late: RemoteStore) -> None:
    good = bytes(range(256)) * 2**11
    late.publish("m", view(good), len(good), durable=False)
    assert LateStore.store == {"late/m": good}

    def torn() -> Iterator[memoryview]:
        yield memoryview(bytes(3 * 2**16))
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        late.publish("m", torn(), len(good), durable=False)
    assert LateStore.store == {"late/m": good}
    with pytest.raises(RuntimeError, match="torn"):
        late.write("fresh", torn(), len(good), durable=False)
    assert LateStore.store == {"late/m": good}  # files that nobody holds any more have been collected


@pytest.mark.parametrize("method", ["pipe_file", "cp_file", "rm_file", "info"])
def test_a_stream_is_moved_whole_or_not_at_all(method: str, late: RemoteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = bytes(2**18), bytes([1]) * 2**18
    late.publish("m", view(old), len(old), durable=False)

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("broken")

    monkeypatch.setattr(late.fs, method, broken)
    try:
        late.publish("m", view(new), len(new), durable=False)
    except OSError:
        assert LateStore.store["late/m"] in (old, new)
    else:
        assert LateStore.store["late/m"] == new


# -- one winner, told apart --------------------------------------------------------------------------------------------


@pytest.fixture
def behind_proxy(s3_server: Server, tmp_path: Path) -> Iterator[tuple[S3Store, Proxy]]:
    with behind(s3_server.endpoint, conditions=s3_server.folder) as proxy:
        store = open_store(f"{s3_server.url}/{tmp_path.name}", through(s3_server.options, proxy))
        assert isinstance(store, S3Store)
        yield store, proxy


@pytest.mark.parametrize("fault", ["lost", 503])
def test_a_conditional_put_whose_answer_is_lost_is_no_conflict(fault: Any, behind_proxy: tuple[S3Store, Proxy]) -> None:
    store, proxy = behind_proxy
    store.publish("m", view(b"first"), 5, durable=False, replaces=None)
    for number in range(1, 5):
        stamp, content = store.stamp("m"), b"next %d" % number
        proxy.arm(once(number, fault))
        store.publish("m", view(content), len(content), durable=False, replaces=stamp)
        assert store.read("m") == content


def test_another_stamp_of_the_same_bytes_is_no_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server gave another ETag when it was asked than at the put: then the new checkpoint's files were removed."""

    def put_over(self: RemoteStore, name: str, data: bytes, _: object) -> str:
        self.write(name, view(data), len(data), durable=False)
        return "another"

    monkeypatch.setattr(RemoteStore, "_put_over", put_over)
    path, tensor = "memory://another-stamp/c", torch.arange(4.0)
    checkpoint.save({"w": tensor}, path)
    assert torch.equal(checkpoint.read(path)["w"].full(), tensor)


def test_a_save_that_is_told_of_a_conflict_with_itself_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = RemoteStore.publish

    def put_and_deny(self: RemoteStore, name: str, *args: Any, **kwargs: Any) -> None:
        publish(self, name, *args, **kwargs)
        if name == "manifest.json":
            raise CheckpointConflictError("another save was committed")

    monkeypatch.setattr(RemoteStore, "publish", put_and_deny)
    path, tensor = "memory://own-conflict/c", torch.arange(4.0)
    with pytest.raises(CheckpointConflictError):
        checkpoint.save({"w": tensor}, path)
    assert torch.equal(checkpoint.read(path)["w"].full(), tensor)


@pytest.mark.parametrize("kept", [True, False])
def test_of_two_puts_that_saw_the_same_one_wins(kept: bool, s3_server: Server, tmp_path: Path) -> None:
    """The other one comes between the look and the put; or, where a server has no conditions, before the look."""
    other = open_store(f"{s3_server.url}/{tmp_path.name}", s3_server.options)

    def intrude(number: int, method: str, path: str) -> None:
        if method == "PUT" and kept:
            other.write("m", view(b"other"), 5, durable=False)

    other.write("m", view(b"first"), 5, durable=False)
    with behind(s3_server.endpoint, conditions=s3_server.folder if kept else None) as proxy:
        store = open_store(f"{s3_server.url}/{tmp_path.name}", through(s3_server.options, proxy))
        stamp = store.stamp("m")
        proxy.arm(intrude)
        if not kept:
            other.write("m", view(b"other"), 5, durable=False)
        with pytest.raises(CheckpointConflictError):
            store.publish("m", view(b"mine!"), 5, durable=False, replaces=stamp)
        assert other.read("m") == b"other"
        proxy.arm(no_fault)
        store.publish("m", view(b"after"), 5, durable=False, replaces=store.stamp("m"))
        store.remove("m", only=store.stamp("m"))
        store.publish("m", view(b"again"), 5, durable=False, replaces=stamp)  # what is gone is no hindrance
        assert other.read("m") == b"again"


def begun(store: S3Store, name: str) -> dict[str, str]:
    where = store._where(name)
    return {**where, "UploadId": store._call("create_multipart_upload", **where)["UploadId"]}


def test_an_old_file_of_equal_size_is_not_taken_for_the_upload_that_is_lost(
    behind_proxy: tuple[S3Store, Proxy],
) -> None:
    store, proxy = behind_proxy
    store.write("m", view(bytes(100)), 100, durable=False)
    upload = begun(store, "m")
    tags = store._put_parts(upload, [bytearray(100)])
    store._abort(upload)
    proxy.arm(once(1, "reset"))
    with pytest.raises(OSError, match=r"answer to its completion was lost|upload"):
        store._complete(upload, "mark", tags, 100)
    assert store.read("m") == bytes(100)


def test_uploads_that_a_crash_left_are_found_and_freed(behind_proxy: tuple[S3Store, Proxy]) -> None:
    store, _ = behind_proxy
    for _ in range(2):
        begun(store, "model/rank-00000-abc.safetensors")
    assert store.names() == ["model/rank-00000-abc.safetensors"]
    assert abs((store.modified("model/rank-00000-abc.safetensors") or 0) - time.time()) < 3600
    store.remove("model/rank-00000-abc.safetensors")
    assert store.names() == []


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_options_are_in_no_error_no_text_and_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"key": "AKIA", "secret": "s3cret-1", "base_url": "https://me:s3cret-2@host/", "auth": ["me", "s3cret-3"]}
    shown = redact("AKIA s3cret-1 https://me:s3cret-2@host/ s3cret-3 endpoint", options)
    assert "s3cret" not in shown
    assert "endpoint" in shown
    assert "s3cret" not in repr(Order("s3://b/c", options, None, True, True))
    failing = mock.Mock(async_impl=False)
    failing.cat_file.side_effect = PermissionError("s3cret-1 is wrong")
    del failing._cat_file
    with pytest.raises(PermissionError, match="… is wrong") as failure:
        Calls(failing, "s3://b/c", options)("cat_file", "x")
    assert failure.value.__cause__ is None
    assert main(["inspect", "s3://b/c", "--storage-option", "s3cret-4"]) == 2
    assert "s3cret" not in "".join(capsys.readouterr())


def test_an_io_that_is_pickled_works_in_another_process() -> None:
    from lightning_shard import ShardedCheckpointIO

    io = ShardedCheckpointIO({"secret": "s3cret"})
    assert "s3cret" not in repr(io)
    assert pickle.loads(pickle.dumps(io)).storage_options == {"secret": "s3cret"}


# -- names -------------------------------------------------------------------------------------------------------------


NAMES = ["model/epoch=1:loss=2.safetensors", "model/a%2e%2e", "model/[x]*#?y=1.safetensors"]


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_name_means_what_it_says(kind: str, tmp_path: Path) -> None:
    root = tmp_path / "data" / BUCKET / "c"
    (root / "model").mkdir(parents=True)
    for name in NAMES:
        (root / name).write_bytes(name.encode())
    with serve(kind, tmp_path / "data") as server:
        for store in (open_store(str(root), {}), open_store(f"{server.url}/c", server.options)):
            for name in NAMES:
                assert store.read(name) == name.encode()
                assert store.size(name) == len(name)
                assert store.exists(name)


def test_a_percent_escape_does_not_leave_the_folder_of_a_web_server(tmp_path: Path) -> None:
    (tmp_path / "data" / BUCKET / "c").mkdir(parents=True)
    (tmp_path / "data" / BUCKET / "private").write_bytes(b"private")
    with serve("http", tmp_path / "data") as server:
        store = open_store(f"{server.url}/c", {})
        for name in ("%2e%2e/private", "model/%2e%2e/%2e%2e/private"):
            with pytest.raises(FileNotFoundError):
                store.read(name)
