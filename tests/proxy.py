"""A server's bad days: a proxy before it that answers wrongly, late, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import http.server
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

Fault = int | str
"""A status to answer with, or one of :data:`FAULTS`."""
FaultOf = Callable[[int, str, str], Fault | None]
"""Of a request's number (from 1), method and path: what goes wrong with it, if anything."""
FAULTS = {
    "slow down": "503 with S3's word for it; nothing is done",
    "expired": "400 with S3's word for credentials that have expired; nothing is done",
    "reset": "the connection is reset; nothing is done",
    "stall": "no answer; nothing is done",
    "lost": "it is done, and the connection reset instead of an answer",
    "late": "it is done, and no answer comes",
    "half sent": "the server gets the first half of what is sent; the connection is reset",
    "cut": "half of the answer's body, then the connection is reset",
    "cut stall": "half of the answer's body, then nothing",
    "short": "the first half of the answer's body, as if it were whole",
    "shifted": "other bytes than those that were asked for, as many",
}
_WORDS = {"slow down": (503, "SlowDown", "Reduce your rate."), "expired": (400, "ExpiredToken", "It has expired.")}
_HELD_S = 60.0


def no_fault(number: int, method: str, path: str) -> None:
    """All goes well."""


class Proxy(http.server.ThreadingHTTPServer):
    """Hands requests on to a server, but for those that a fault is for.

    Args:
        conditions: What becomes of ``If-Match`` and ``If-None-Match`` of S3's puts and removals, which rclone ignores:
            with the folder that it serves they are carried out, None leaves it at that.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, endpoint: str, fault: FaultOf = no_fault, *, conditions: Path | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = urlsplit(endpoint).netloc
        self.fault = fault
        self.conditions = conditions
        self.requests = 0
        self.lock = threading.Lock()
        self.conditional = threading.Lock()
        self.released = threading.Event()
        """Ends the waits of those that are held."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def arm(self, fault: FaultOf) -> None:
        """Begin anew, with another fault; those that are held are let go."""
        self.released.set()
        self.released = threading.Event()
        with self.lock:
            self.fault = fault
            self.requests = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this is for."""


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

    def handle_expect_100(self) -> bool:
        """Which body is awaited is decided with the request: a stalled one doesn't even get this far."""
        return True

    def _answer(self) -> None:
        with self.server.lock:
            self.server.requests += 1
            fault = self.server.fault(self.server.requests, self.command, self.path)
        if fault == "stall":
            self._hold()
            return
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if fault == "reset":
            self._reset()
        elif isinstance(fault, int):
            self._refuse(fault)
        elif fault in _WORDS:
            self._refuse(*_WORDS[fault])
        elif fault == "half sent":
            self._send_half(body)
            self._reset()
        else:
            self._pass_on(body, fault)

    def _pass_on(self, body: bytes, fault: str | None) -> None:
        with self.server.conditional:  # looked at and done as one step
            refused = self._refused_condition()
            if refused is None:
                status, headers, data = self._ask(body)
        if fault == "lost":
            self._reset()
            return
        if fault == "late":
            self._hold()
            return
        if refused is not None:
            self._refuse(*refused)
            return
        if self.command != "HEAD":
            if fault == "short":
                data = data[: len(data) // 2]
            elif fault == "shifted":
                data = data[1:] + data[:1]
            headers["Content-Length"] = str(len(data))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("cut", "cut stall"):
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self._reset() if fault == "cut" else self._hold()
        else:
            self.wfile.write(data)

    def _ask(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        upstream = http.client.HTTPConnection(self.server.target, timeout=_HELD_S)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        try:
            upstream.request(self.command, self.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
        finally:
            upstream.close()
        dropped = ("transfer-encoding", "connection", "date", "server")
        return answer.status, {n: v for n, v in answer.getheaders() if n.lower() not in dropped}, data

    def _refused_condition(self) -> tuple[int, str, str] | None:
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        conditions = self.server.conditions
        if conditions is None or self.command not in ("PUT", "DELETE") or (match is None and none_match is None):
            return None
        file = conditions / unquote(urlsplit(self.path).path).lstrip("/")
        there = f'"{hashlib.md5(file.read_bytes()).hexdigest()}"' if file.is_file() else None
        if match is not None and there is None:
            return 404, "NoSuchKey", "The specified key does not exist."
        if (there is not None) if none_match is not None else (there != match):
            return 412, "PreconditionFailed", "At least one of the preconditions you specified did not hold."
        return None

    def _refuse(self, status: int, code: str = "", text: str = "") -> None:
        data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>".encode()
        data = data if code and self.command != "HEAD" else b""
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Type", "application/xml")
        self.end_headers()
        self.wfile.write(data)

    def _send_half(self, body: bytes) -> None:
        lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{n}: {v}" for n, v in self.headers.items())]
        lines = [line for line in lines if not line.lower().startswith("expect:")]
        host, _, port = self.server.target.partition(":")
        with socket.create_connection((host, int(port))) as upstream:
            upstream.sendall("\r\n".join([*lines, "", ""]).encode() + body[: len(body) // 2])

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.rfile.close()
        self.connection.close()

    def _hold(self) -> None:
        self.server.released.wait(_HELD_S)
        self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer
    do_PROPFIND = do_MKCOL = do_MOVE = do_COPY = do_OPTIONS = _answer


@contextlib.contextmanager
def behind(endpoint: str, fault: FaultOf = no_fault, *, conditions: Path | None = None) -> Iterator[Proxy]:
    """A proxy before a server, for as long as the block runs."""
    with Proxy(endpoint, fault, conditions=conditions) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            proxy.released.set()
            proxy.shutdown()
            thread.join()


def through(options: dict[str, Any], proxy: Proxy) -> dict[str, Any]:
    """A server's storage options, by way of a proxy."""
    if "base_url" in options:
        return {**options, "base_url": proxy.endpoint}
    return {**options, "client_kwargs": {**options["client_kwargs"], "endpoint_url": proxy.endpoint}}


def once(number: int, fault: Fault) -> FaultOf:
    """At one request."""
    return lambda asked, method, path: fault if asked == number else None


def from_then_on(number: int, fault: Fault) -> FaultOf:
    """At one request and all that follow."""
    return lambda asked, method, path: fault if asked >= number else None
