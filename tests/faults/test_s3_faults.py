"""S3 as it is on a bad day: errors, slow-downs, cut connections, a server that dies."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store import calls
from lightning_shard.errors import CheckpointError, CorruptCheckpointError
from tests.servers import let_servers_forget, serve

Fault = Callable[[int, str, str], int | str | None]
"""Of a request's number, method and path: a status to answer with, ``"cut"`` to break off the answer, or nothing."""


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on to a server, but for those that a fault is for."""

    daemon_threads = True

    def __init__(self, endpoint: str, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(endpoint).netloc
        self.fault = fault
        self.requests = self.faults = 0
        self.lock = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Proxy
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            self.server.requests += 1
            fault = self.server.fault(self.server.requests, self.command, self.path)
            self.server.faults += fault is not None
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        upstream = http.client.HTTPConnection(self.server.target)
        upstream.request(self.command, self.path, body, dict(self.headers))
        answer = upstream.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if fault == "cut":
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(data)
        upstream.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on


@contextlib.contextmanager
def behind(endpoint: str, fault: Fault) -> Iterator[Proxy]:
    with Proxy(endpoint, fault) as proxy:
        threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.shutdown()


def through(options: dict, endpoint: str) -> dict:
    return {**options, "client_kwargs": {**options["client_kwargs"], "endpoint_url": endpoint}}


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
        options = through(server.options, f"http://127.0.0.1:{proxy.server_port}")
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
        options = through(server.options, f"http://127.0.0.1:{proxy.server_port}")
        path = f"{server.url}/c"
        checkpoint.save(STATE, path, storage_options=options)
        failing.set()
        with pytest.raises(CheckpointError, match="could not be written"):
            checkpoint.save({name: tensor + 1 for name, tensor in STATE.items()}, path, storage_options=options)
        assert torch.equal(checkpoint.read(path, storage_options=options)["large"].full(), STATE["large"])
        assert sorted(file.name[:4] for file in (server.folder / "bucket" / "c").rglob("*.*")) == ["mani", "rank"]


def test_a_server_that_dies_in_mid_save_is_an_error_and_the_earlier_checkpoint_is_whole(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "data") as server:
        path = f"{server.url}/c"
        checkpoint.save(STATE, path, storage_options=server.options)

        def die(number: int, method: str, url: str) -> None:
            if "partNumber=2" in url:
                server.kill()

        with behind(server.endpoint, die) as proxy:
            options = through(server.options, f"http://127.0.0.1:{proxy.server_port}")
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
