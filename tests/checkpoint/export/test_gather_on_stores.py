"""Gather from any store to any store, dealt over the ranks; other programs' files, DCP and diff where they lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, distributed

from lightning_shard import checkpoint
from lightning_shard.checkpoint.store.s3 import PART_BYTES, S3Store
from lightning_shard.cli import main
from lightning_shard.testing import run_ranks
from tests.servers import serve


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(50, 40, generator=generator) for i in range(5)}


def gather_on_ranks(url: str, options: dict[str, Any]) -> list[tuple[int, int]]:
    at = {"storage_options": options, "out_storage_options": options}
    checkpoint.save(state(), f"{url}/c", storage_options=options)
    seen: list[tuple[int, int]] = []
    out = f"{url}/hf/model.safetensors"
    checkpoint.gather(f"{url}/c", out, max_shard_bytes=9000, progress=lambda *counts: seen.append(counts), **at)
    checkpoint.gather(f"{url}/c", f"{url}/one.ckpt", **at)
    into = {name: torch.zeros_like(tensor) for name, tensor in state().items() if name != f"w{distributed.get_rank()}"}
    for path in ("hf", "one.ckpt"):
        # each rank asks for some of the names, and all together for all
        assert checkpoint.load(f"{url}/{path}", into, storage_options=options) == ([], [])
        assert all(torch.equal(into[name], state()[name]) for name in into)
    return seen


def test_ranks_gather_from_s3_to_s3_and_a_web_server_shows_it(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "s3") as s3, serve("http", tmp_path / "s3") as http:
        for rank, seen in enumerate(run_ranks(gather_on_ranks, 2, s3.url, s3.options)):
            done, total = seen[-1]
            assert done == total > 8000 * (3, 2)[rank]  # five files: three of one rank's, two of the other's
        for path in ("hf", "hf/model-00002-of-00005.safetensors", "one.ckpt"):
            stored = checkpoint.read(f"{http.url}/{path}")
            assert all(torch.equal(tensor.full(), state()[name]) for name, tensor in stored.items())
        checkpoint.gather(f"{http.url}/one.ckpt", tmp_path / "m.safetensors")
        assert all(torch.equal(tensor, state()[name]) for name, tensor in load_file(tmp_path / "m.safetensors").items())


LARGE = {"a": (2600, 1700), "b": (3, 7)}  # 18 MB
Parts = list[tuple[int, int]]
"""Their numbers and sizes."""


def large_state() -> dict[str, Tensor]:
    return {name: torch.arange(rows * columns).view(rows, columns).float() for name, (rows, columns) in LARGE.items()}


def put_parts(work: Callable[[], object]) -> Parts:
    """Which parts were put."""
    parts: Parts = []
    call = S3Store._call

    def recording(self: S3Store, method: str, **arguments: Any) -> Any:
        if method == "upload_part":
            parts.append((arguments["PartNumber"], len(arguments["Body"])))
        return call(self, method, **arguments)

    with mock.patch.object(S3Store, "_call", recording):
        work()
    return sorted(parts)


def assert_uniform(parts: Parts, nbytes: int) -> None:
    """As the strictest of stores want them: all of one length, and none after a shorter one."""
    assert [number for number, _ in parts] == list(range(1, len(parts) + 1))
    assert {size for _, size in parts[:-1]} == {PART_BYTES}
    assert 0 < parts[-1][1] <= PART_BYTES
    assert sum(size for _, size in parts) == nbytes


def test_a_save_to_s3_puts_parts_of_one_length(tmp_path: Path) -> None:
    with serve("s3", tmp_path / "s3") as s3:
        parts = put_parts(lambda: checkpoint.save(large_state(), f"{s3.url}/c", storage_options=s3.options))
        (file,) = (s3.folder / "bucket" / "c" / "model").iterdir()
        assert_uniform(parts, file.stat().st_size)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_and_diff_across_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state: dict[str, Any] = {"w": torch.randn(300, 400), "optimizer": {"m": torch.ones(5)}, "step": 4}
    with serve("s3", tmp_path / "s3") as s3, serve("http", tmp_path / "s3") as http:
        url = f"{s3.url}/runs/step=4.ckpt"
        dcp.save(state, storage_writer=checkpoint.DcpWriter(url, storage_options=s3.options))
        for reader in (
            checkpoint.DcpReader(url, storage_options=s3.options),
            checkpoint.DcpReader(f"{http.url}/runs/step=4.ckpt"),
        ):
            into: dict[str, Any] = {"w": torch.zeros(300, 400), "optimizer": {"m": torch.zeros(5)}, "step": 0}
            dcp.load(into, storage_reader=reader)
            assert torch.equal(into["w"], state["w"])
            assert torch.equal(into["optimizer"]["m"], torch.ones(5))
            assert into["step"] == 4
        local = tmp_path / "local"
        checkpoint.save({"w": state["w"]}, local, optimizer=state["optimizer"], trainer_state={"step": 5})
        options = [f"{key}={json.dumps(value)}" for key, value in s3.options.items()]
        flags = [part for option in options for part in ("--other-storage-option", option)]
        assert main(["diff", str(local), url, *flags, "--only", "model", "--only", "optimizer"]) == 0
        assert main(["diff", str(local), url, *flags]) == 1
        assert "5 in a, 4 in b" in capsys.readouterr().out
