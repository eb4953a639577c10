"""Gather from any store to any store, dealt over the ranks; and other programs' files read where they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed

from lightning_shard import checkpoint
from lightning_shard.errors import CorruptCheckpointError
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


LARGE = {"a": (5000, 1700), "b": (3, 7), "c": (2900, 3001)}  # 69 MB


def large_state() -> dict[str, Tensor]:
    return {name: torch.arange(rows * columns).view(rows, columns).float() for name, (rows, columns) in LARGE.items()}


def gather_one_file(source: str, url: str, options: dict[str, Any]) -> tuple[list[tuple[int, int]], str]:
    """Each rank's progress, and what it failed with."""
    seen: list[tuple[int, int]] = []
    try:
        checkpoint.gather(
            source, f"{url}/m.safetensors", out_storage_options=options, progress=lambda *counts: seen.append(counts)
        )
    except CorruptCheckpointError as error:
        return seen, str(error)
    return seen, ""


def test_ranks_put_one_large_file_on_s3_together(tmp_path: Path) -> None:
    source = tmp_path / "c"
    checkpoint.save(large_state(), source)
    checkpoint.gather(source, tmp_path / "here.safetensors")
    expected = (tmp_path / "here.safetensors").read_bytes()
    with serve("s3", tmp_path / "s3") as s3:
        served = s3.folder / "bucket"
        for ranks in (2, 4):  # of which no more take part than have 32 MiB each
            url = f"{s3.url}/{ranks}"
            told = run_ranks(gather_one_file, ranks, str(source), url, s3.options)
            assert (served / str(ranks) / "m.safetensors").read_bytes() == expected
            totals = [seen[-1] if seen else (0, 0) for seen, _ in told]
            assert all(done == total for done, total in totals)
            assert sum(total for _, total in totals) == len(expected)
            assert sum(total >= 25e6 for _, total in totals) == 2, totals

        last = next((source / "model").iterdir())
        data = bytearray(last.read_bytes())
        data[-1] ^= 1
        last.write_bytes(data)
        told = run_ranks(gather_one_file, 2, str(source), f"{s3.url}/damaged", s3.options)
        assert all("differ from their digest" in error for _, error in told)
        filesystem = fsspec.filesystem("s3", **s3.options)
        assert not filesystem.exists("bucket/damaged/m.safetensors")
        assert not filesystem.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")
