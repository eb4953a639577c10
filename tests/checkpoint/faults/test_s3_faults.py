"""S3 as it is on a bad day: errors, slow-downs, cut connections, a server that dies."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import calls
from lightning_shard.errors import CheckpointError, CorruptCheckpointError
from tests.proxy import behind, through
from tests.servers import let_servers_forget, serve

STATE = {"large": torch.arange(5 * 2**20, dtype=torch.int32), "small": torch.arange(10.0)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_WAIT_S", 0.3)


@pytest.mark.parametrize(("fault", "every"), [(500, 3), (503, 3), ("cut", 2)])
def test_faults_that_pass_are_outlasted(fault: int | str, every: int, tmp_path: Path) -> None:
    asked = itertools.count()

    def now_and_then(number: int, method: str, path: str) -> int | str | None:
        return fault if (fault != "cut" or method == "GET") and next(asked) % every == 0 else None

    with serve("s3", tmp_path / "data") as server, behind(server.endpoint, now_and_then) as proxy:
        options = through(server.options, proxy)
        path = f"{server.url}/c"
        checkpoint.save(STATE, path, storage_options=options)
        into = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
        checkpoint.load(path, into, storage_options=options)
        assert all(torch.equal(into[name], STATE[name]) for name in STATE)
        assert proxy.faults > 1
        assert checkpoint.verify(path, storage_options=server.options).ok


def test_a_save_that_a_lasting_fault_stops_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    failing = threading.Event()

    def refuse_parts(number: int, method: str, path: str) -> int | None:
        return 500 if failing.is_set() and "partNumber" in path else None

    with serve("s3", tmp_path / "data") as server, behind(server.endpoint, refuse_parts) as proxy:
        options = through(server.options, proxy)
        path = f"{server.url}/c"
        checkpoint.save(STATE, path, storage_options=options)
        failing.set()
        with pytest.raises(CheckpointError, match="could not be written"):
            checkpoint.save({name: tensor + 1 for name, tensor in STATE.items()}, path, storage_options=options)
        assert torch.equal(checkpoint.read(path, storage_options=options)["large"].full(), STATE["large"])
        left = sorted(file.name[:5] for file in (server.folder / "bucket" / "c").rglob("*.*"))
        assert left == ["manif", "rank-", "table"]


def test_a_server_that_dies_in_mid_save_is_an_error_and_the_earlier_checkpoint_is_whole(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "data") as server:
        path = f"{server.url}/c"
        checkpoint.save(STATE, path, storage_options=server.options)

        def die(number: int, method: str, url: str) -> None:
            if "partNumber=2" in url:
                server.kill()

        with behind(server.endpoint, die) as proxy:
            options = through(server.options, proxy)
            with pytest.raises((CheckpointError, OSError)):
                checkpoint.save({name: tensor + 1 for name, tensor in STATE.items()}, path, storage_options=options)
    with serve("s3", tmp_path / "data") as server:
        stored = checkpoint.read(path, storage_options=server.options)
        assert torch.equal(stored["large"].full(), STATE["large"])
        assert checkpoint.verify(path, storage_options=server.options).ok


def test_a_file_that_is_gone_is_told_by_its_name(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "data") as server:
        path = f"{server.url}/c"
        checkpoint.save(STATE, path, storage_options=server.options)
        (file,) = (server.folder / "bucket" / "c" / "model").iterdir()
        file.unlink()
        let_servers_forget()
        with pytest.raises(CorruptCheckpointError, match=r"model/rank-00000.*is missing"):
            checkpoint.load(path, {**STATE}, storage_options=server.options)
