"""Manifests for tests to change: what was changed on purpose fits its own digest again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.format.text import OWN_DIGEST, signed

NAME = "manifest.json"


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


def resigned(manifest: dict[str, Any], **layout: Any) -> bytes:
    """A manifest's bytes, laid out as ``json.dumps`` does, its own digest last."""
    without = {key: value for key, value in manifest.items() if key != OWN_DIGEST}
    return signed(json.dumps(without, **layout).encode()[:-1])
