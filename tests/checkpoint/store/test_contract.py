"""What a store must do for checkpoints to be safe in it. A new one is put through by a subclass with a ``place``."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import Store, open_store
from lightning_shard.checkpoint.store.remote import RemoteStore
from lightning_shard.errors import (
    CheckpointConflictError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from tests.servers import SECRET, serve

SMALL = b"0123456789" * 10
LARGE_BYTES = 20 * 2**20 + 3  # several parts of an upload, and a rest

Place = tuple[str, dict[str, Any]]
"""A path that is empty, and the storage options for it."""


class StoreContract:
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def place(self, root: Place) -> Place:
        return f"{root[0]}/{uuid.uuid4().hex[:8]}", root[1]

    @pytest.fixture
    def store(self, place: Place) -> Store:
        return open_store(*place)

    # -- the verbs ----------------------------------------------------------------------------------------------------

    def test_what_is_written_is_read(self, store: Store) -> None:
        store.write("model/a", [memoryview(SMALL[:30]), memoryview(SMALL[30:])], len(SMALL), durable=True)
        store.sync(["model/a"])
        assert store.read("model/a") == SMALL
        assert store.size("model/a") == len(SMALL)
        assert store.exists("model/a")

    def test_parts_are_read_into_memory(self, store: Store) -> None:
        store.write("model/a", [memoryview(SMALL)], len(SMALL), durable=False)
        parts = [(0, 3), (3, 8), (50, 51), (90, 100)]
        buffers = [memoryview(bytearray(stop - start)) for start, stop in parts]
        with store.reading("model/a") as read:
            read([(start, buffer) for (start, _), buffer in zip(parts, buffers)])
        assert [bytes(buffer) for buffer in buffers] == [SMALL[start:stop] for start, stop in parts]

    def test_a_mapping_if_there_is_one_shows_the_bytes_and_keeps_to_the_file(self, store: Store) -> None:
        content = bytes(range(256)) * 40  # several pages
        store.write("model/a", [memoryview(content)], len(content), durable=False)
        for begin, end in ((0, 1), (17, 5000), (4096, 8192), (9000, len(content))):
            memory = store.mapped("model/a", begin, end)
            assert memory is None or bytes(memory) == content[begin:end]
        if store.mapped("model/a", 0, 1) is not None:
            for length in (1, 10_000):
                with pytest.raises(CorruptCheckpointError, match="model/a is truncated"):
                    store.mapped("model/a", 17, len(content) + length)
            with pytest.raises(FileNotFoundError):
                store.mapped("model/b", 0, 1)

    def test_a_read_beyond_the_end_is_an_error(self, store: Store) -> None:
        store.write("model/a", [memoryview(SMALL)], len(SMALL), durable=False)
        with pytest.raises((CorruptCheckpointError, OSError)), store.reading("model/a") as read:
            read([(95, memoryview(bytearray(10)))])

    def test_what_is_not_there_is_told_as_such(self, store: Store) -> None:
        assert not store.exists("model/a")
        assert store.names() == []
        with pytest.raises(FileNotFoundError):
            store.read("manifest.json")
        with pytest.raises(FileNotFoundError):
            store.size("model/a")
        with pytest.raises(FileNotFoundError), store.reading("model/a") as read:
            read([(0, memoryview(bytearray(1)))])
        store.remove("model/a")
        store.remove_empty_folders()

    def test_publish_replaces(self, store: Store) -> None:
        for content in (SMALL, b"new"):
            store.publish("manifest.json", [memoryview(content)], len(content), durable=True)
            assert store.read("manifest.json") == content
        assert store.names() == ["manifest.json"]

    def test_only_what_was_seen_is_replaced_or_removed(self, store: Store) -> None:
        def publish(content: bytes, replaces: str | None) -> None:
            store.publish("manifest.json", [memoryview(content)], len(content), durable=False, replaces=replaces)

        assert store.stamp("manifest.json") is None
        publish(b"first", None)
        first = store.stamp("manifest.json")
        assert first is not None
        with pytest.raises(CheckpointConflictError):
            publish(b"late", None)
        publish(b"second", first)
        for stale in (None, first):
            with pytest.raises(CheckpointConflictError):
                publish(b"late", stale)
        with pytest.raises(CheckpointConflictError):
            store.remove("manifest.json", only=first)
        assert store.read("manifest.json") == b"second"
        second = store.stamp("manifest.json")
        assert second is not None
        store.remove("manifest.json", only=second)
        assert store.stamp("manifest.json") is None
        store.remove("manifest.json", only=second)
        publish(b"third", second)  # what has been removed is no hindrance
        assert store.names() == ["manifest.json"]

    def test_a_write_that_fails_half_way_publishes_nothing(self, store: Store) -> None:
        def torn() -> Iterator[memoryview]:
            yield memoryview(bytes(LARGE_BYTES - 5))
            raise RuntimeError("torn")

        store.publish("manifest.json", [memoryview(SMALL)], len(SMALL), durable=False)
        with pytest.raises(RuntimeError, match="torn"):
            store.publish("manifest.json", torn(), LARGE_BYTES, durable=False)
        assert store.read("manifest.json") == SMALL

    def test_large_files_and_buffers_that_are_used_again(self, store: Store) -> None:
        pattern = bytearray(2**20)

        def buffers() -> Iterator[memoryview]:
            for number in range(LARGE_BYTES // len(pattern)):
                pattern[:] = bytes([number]) * len(pattern)
                yield memoryview(pattern)
            yield memoryview(b"end")

        store.write("model/large", buffers(), LARGE_BYTES, durable=False)
        assert store.size("model/large") == LARGE_BYTES
        seen = [memoryview(bytearray(2**20)) for _ in range(20)]

        def fetch(number: int) -> None:
            with store.reading("model/large") as read:
                read([(number * 2**20, seen[number])])

        threads = [threading.Thread(target=fetch, args=(number,)) for number in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(bytes(part) == bytes([number]) * 2**20 for number, part in enumerate(seen))

    # -- a checkpoint -------------------------------------------------------------------------------------------------

    def test_a_checkpoint_from_save_to_removal(self, place: Place, tmp_path: Path) -> None:
        path, options = place
        state = {"w": torch.randn(700, 900), "b": torch.arange(5), "flag": torch.tensor(True)}
        with pytest.raises(CheckpointNotFoundError):
            checkpoint.read(path, storage_options=options)
        for step in (1, 2):
            saved = {name: tensor + step if name != "flag" else tensor for name, tensor in state.items()}
            checkpoint.save(saved, path, trainer_state={"step": step}, storage_options=options)
        assert checkpoint.exists(path, storage_options=options)
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpoint.load(path, into, storage_options=options)
        assert all(torch.equal(into[name], saved[name]) for name in state)
        stored = checkpoint.read(path, storage_options=options)
        assert stored.trainer_state() == {"step": 2}
        assert torch.equal(stored["w"][10:20], saved["w"][10:20])
        assert checkpoint.verify(path, storage_options=options).ok
        assert len(open_store(path, options).names()) == len(stored.manifest.files) + 2, "leftovers of the first save"
        checkpoint.gather(path, tmp_path / "local.safetensors", storage_options=options)
        checkpoint.gather(
            path, f"{path}-gathered/model.safetensors", storage_options=options, out_storage_options=options
        )
        gathered = open_store(f"{path}-gathered", options).read("model.safetensors")
        assert gathered == (tmp_path / "local.safetensors").read_bytes()
        checkpoint.remove(path, storage_options=options)
        assert not checkpoint.exists(path, storage_options=options)
        assert open_store(path, options).names() == []

    def test_a_damaged_byte_is_found(self, place: Place) -> None:
        path, options = place
        checkpoint.save({"w": torch.arange(100.0)}, path, storage_options=options)
        store = open_store(path, options)
        (name,) = (name for name in store.names() if name.startswith("model/"))
        data = bytearray(store.read(name))
        data[-1] ^= 1
        store.remove(name)
        store.write(name, [memoryview(data)], len(data), durable=False)
        assert not checkpoint.verify(path, storage_options=options).ok
        with pytest.raises(CorruptCheckpointError, match="differ from their digest"):
            checkpoint.load(path, {"w": torch.zeros(100)}, storage_options=options)


class TestLocalDisk(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory: pytest.TempPathFactory) -> Place:
        return str(tmp_path_factory.mktemp("local")), {}


class TestAnyFileSystem(TestLocalDisk):
    """What fsspec has beside object stores: no atomic puts, but moves."""

    @pytest.fixture
    def store(self, place: Place) -> Store:
        return RemoteStore(f"file://{place[0]}", {})


class TestMemory(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls) -> Place:
        return f"memory://{uuid.uuid4().hex}", {}


class TestS3(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with serve("s3", tmp_path_factory.mktemp("s3") / "data") as server:
            yield server.url, server.options

    @pytest.mark.parametrize("answer", [(501, "NotImplemented"), (400, "InvalidArgument")], ids=str)
    def test_a_server_without_conditional_calls_is_looked_at(
        self, store: Store, answer: tuple[int, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        once: Any = store._once  # type: ignore[attr-defined]

        def without_conditions(method: str, limit_s: float, **arguments: Any) -> Any:
            if not arguments.keys() & {"IfMatch", "IfNoneMatch"}:
                return once(method, limit_s, **arguments)
            error = OSError(method)
            error.response = {"ResponseMetadata": {"HTTPStatusCode": answer[0]}, "Error": {"Code": answer[1]}}  # type: ignore[attr-defined]
            raise error

        monkeypatch.setattr(store, "_once", without_conditions)
        self.test_only_what_was_seen_is_replaced_or_removed(store)

    def test_credentials_are_in_no_file_and_no_error(
        self, place: Place, root: Place, caplog: pytest.LogCaptureFixture, tmp_path: Path
    ) -> None:
        path, options = place
        checkpoint.save({"w": torch.ones(3)}, path, trainer_state={"a": 1}, storage_options=options)
        store = open_store(path, options)
        assert all(SECRET.encode() not in store.read(name) for name in store.names())
        wrong = {**options, "key": "ANOTHERKEY", "secret": "another-secret"}
        for work in (
            lambda: checkpoint.save({"w": torch.ones(3)}, path, storage_options=wrong),
            lambda: checkpoint.read(path, storage_options=wrong),
        ):
            with pytest.raises((OSError, CheckpointError)) as failure:
                work()
            assert "another-secret" not in f"{failure.value} {failure.value.__cause__} {caplog.text}"


class TestWebDav(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def root(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
        with serve("webdav", tmp_path_factory.mktemp("webdav") / "data") as server:
            yield server.url, server.options


def test_a_plain_web_server_can_be_read(tmp_path: Path) -> None:
    with serve("http", tmp_path / "data") as server:
        state = {"w": torch.randn(700, 900), "b": torch.arange(5)}
        checkpoint.save(state, server.folder / "bucket" / "c")
        path = f"{server.url}/c"
        assert checkpoint.inspect(path).parameters == 700 * 900 + 5
        assert checkpoint.verify(path).ok
        assert torch.equal(checkpoint.read(path)["w"][10:20], state["w"][10:20])
        into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        checkpoint.load(path, into)
        assert all(torch.equal(into[name], state[name]) for name in state)
        checkpoint.gather(path, tmp_path / "m.safetensors")
        with pytest.raises(CheckpointNotFoundError):
            checkpoint.read(f"{server.url}/nothing")
        with pytest.raises((CheckpointError, OSError)):
            checkpoint.save(state, f"{server.url}/d")


@pytest.mark.parametrize(
    "path", ["s3://key:secret-word@bucket/c", "webdav://u:secret-word@host/c", "simplecache::sftp://u:secret-word@h/c"]
)
def test_a_password_in_a_path_is_refused_and_not_repeated(path: str) -> None:
    with pytest.raises(CheckpointError, match="holds a password") as failure:
        checkpoint.read(path)
    assert "secret-word" not in str(failure.value)


@pytest.mark.parametrize(
    "path",
    [
        *("webdav://h/a%41", "webdav://h/50%", "dav://h/a#b", "webdav://h/./a", "webdav://h/a/..", "webdav://h/a /b"),
        "s3://b/a?versionId=3",
    ],
)
def test_a_name_that_would_be_taken_for_another_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError, match=r"holds '.*', which WebDAV|names a version"):
        checkpoint.read(path)


@pytest.mark.parametrize("path", ["nosuch://bucket/c", "ftps+x://a/b"])
def test_an_unknown_protocol_is_an_error_of_ours(path: str) -> None:
    with pytest.raises(CheckpointError, match="can't be opened"):
        checkpoint.read(path)
