"""Checkpoints for tests to damage, and manifests and tables to change: these fit their digests again."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

from lightning_shard.checkpoint.format.manifest import OWN_DIGEST, signed
from lightning_shard.checkpoint.format.table import table_file

NAME = "manifest.json"
Columns = dict[str, Any]


def body_of(manifest: bytes) -> bytes:
    """A manifest's bytes before its own digest: an object without its closing brace."""
    body, mark, _ = manifest.rpartition(f',\n"{OWN_DIGEST}":'.encode())
    assert mark
    return body


def edit_text(checkpoint: Path, change: Callable[[str], str]) -> None:
    """Change the text of a checkpoint's manifest, but for its own digest, which is made to fit."""
    path = checkpoint / NAME
    before = body_of(path.read_bytes()).decode()
    after = change(before)
    assert after != before
    path.write_bytes(signed(after.encode()))


def edit(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a checkpoint's manifest as JSON, and make its own digest fit."""
    path = checkpoint / NAME
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(resigned(manifest))


def edit_table(checkpoint: Path, change: Callable[[dict[str, Any], Columns], Any]) -> None:
    """Change a checkpoint's manifest and the columns of its table, and make all digests fit."""

    def both(manifest: dict[str, Any]) -> None:
        path = checkpoint / manifest["table"]["path"]
        columns: Columns = load_file(path)
        change(manifest, columns)
        put_table(checkpoint, manifest, save({name: np.ascontiguousarray(column) for name, column in columns.items()}))

    edit(checkpoint, both)


def put_table(checkpoint: Path, manifest: dict[str, Any], data: bytes) -> None:
    """Write a table's bytes, and name them in the manifest."""
    path = manifest["table"]["path"]
    (checkpoint / path).write_bytes(data)
    file = table_file(path, data)
    manifest["table"] = {"path": file.path, "bytes": file.bytes, "digests": file.digests}


def resigned(manifest: dict[str, Any], **layout: Any) -> bytes:
    """A manifest's bytes, laid out as ``json.dumps`` does, its own digest last."""
    without = {key: value for key, value in manifest.items() if key != OWN_DIGEST}
    return signed(json.dumps(without, **layout).encode()[:-1])


def flip(path: Path, at: int = -1, mask: int = 1) -> None:
    """Flip bits of one byte of a file, by default of its last one."""
    with open(path, "r+b", buffering=0) as file:
        at = file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))
