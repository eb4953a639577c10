"""What is of a wrong kind is refused by the argument's name, in words of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.errors import ShardError

STATE = {"w": torch.arange(6.0)}
CALLS: dict[str, Callable[[str, Any], Any]] = {
    "keep": lambda path, value: checkpoint.prune(f"{path}/..", keep=value),
    "protect": lambda path, value: checkpoint.prune(f"{path}/..", keep=1, protect=value),
    "biggest": lambda path, value: checkpoint.inspect(path, biggest=value),
    "rtol": lambda path, value: checkpoint.diff(path, path, rtol=value),
    "atol": lambda path, value: checkpoint.diff(path, path, atol=value),
    "sections": lambda path, value: checkpoint.diff(path, path, sections=value),
    "dtype": lambda path, value: checkpoint.gather(path, f"{path}.safetensors", dtype=value),
    "max_shard_bytes": lambda path, value: checkpoint.gather(path, f"{path}.safetensors", max_shard_bytes=value),
    "strip_prefix": lambda path, value: checkpoint.load(path, STATE, strip_prefix=value),
    "rename": lambda path, value: checkpoint.load(path, STATE, rename=value),
    "mesh": lambda path, value: checkpoint.save(STATE, path, mesh=value),
    "storage_options": lambda path, value: checkpoint.list(path, storage_options=value),
    "state": lambda path, value: checkpoint.save(value, path),
}
WRONG: dict[str, list[Any]] = {
    "keep": [None, 0, -1, 1.5, True, "1", [1], torch.ones(2)],
    "protect": [None, 5],
    "biggest": [None, -1, "1", 1.5],
    "rtol": [None, -1, "1", float("nan"), torch.ones(2)],
    "atol": [None, "1"],
    "sections": [None, "model", ["weights"], [5], 5],
    "dtype": ["float32", 5, torch.int8],
    "max_shard_bytes": ["5GB", 0, -1, 1.5],
    "strip_prefix": [5, b"w", ["w"]],
    "rename": [5, ["w"], "w", {"w": 5}, {5: "w"}, lambda name: 5],
    "mesh": [5, "mesh", [0]],
    "storage_options": ["key", 5, ["key"]],
    "state": [None, 5, "w"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_wrong_kinds_are_refused_by_name(name: str, value: Any, tmp_path: Any) -> None:
    checkpoint.save(STATE, tmp_path / "a")
    with pytest.raises(ShardError, match=rf"(?i){name}.*( must | has |not a tensor)"):
        CALLS[name](str(tmp_path / "a"), value)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_codec_is_for_a_class() -> None:
    with pytest.raises(ValueError, match="must be a class"):
        checkpoint.register_codec("Point", str, str)  # type: ignore[arg-type]


def test_storage_options_are_not_shown() -> None:
    with pytest.raises(ShardError) as caught:
        checkpoint.exists("memory://a", storage_options="hidden-secret")  # type: ignore[arg-type]
    assert "hidden-secret" not in str(caught.value)
