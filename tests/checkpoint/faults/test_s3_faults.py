"""S3 as it is on a bad day: errors, slow-downs, cut connections, a server that dies."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import calls
from lightning_shard.errors import CheckpointError
from tests.proxy import behind, through
from tests.servers import serve

STATE = {"large": torch.arange(5 * 2**20, dtype=torch.int32), "small": torch.arange(10.0)}


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_WAIT_S", 0.3)


@pytest.mark.parametrize(("fault", "every"), [(503, 3)])
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
