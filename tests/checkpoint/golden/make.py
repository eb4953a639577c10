"""How the golden checkpoints were made. They are kept: run it for those of a new format version only.

``python -m tests.checkpoint.golden.make FOLDER``
"""

from __future__ import annotations

import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format.encode import Reference
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.testing import run_ranks
from tests.checkpoint.golden.values import (
    OPTIMIZER,
    OTHER,
    PINWHEEL,
    PLAIN,
    RANK,
    SHARDED,
    Color,
    Point,
    data_of,
    trainer_state,
)


def tensor(name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    data = bytearray(data_of(name, dtype, shape))
    return torch.frombuffer(data, dtype=DTYPES[dtype]).view(shape) if data else torch.empty(shape, dtype=DTYPES[dtype])


def register() -> None:
    checkpoint.register_codec(Color, name="golden.Color")
    checkpoint.register_codec(Point, lambda point: [point.x, point.y], lambda v: Point(*v), name="golden.Point")


PLACEMENTS: dict[str, Any] = {
    "w": [Shard(0), Shard(1)],
    "v": [Shard(0), Replicate()],
    "rows": [Shard(0), Shard(0)],
    "few": [Shard(1), Shard(0)],
}


def save_sharded(path: Path) -> None:
    register()
    mesh = init_device_mesh("cpu", (2, 2))

    def sharded(name: str, dtype: str, shape: tuple[int, ...], like: str) -> DTensor:
        return distribute_tensor(tensor(name, dtype, shape), mesh, PLACEMENTS[like], src_data_rank=None)

    state: dict[str, Any] = {name: sharded(name, *kind, like=name) for name, kind in SHARDED.items()}
    state |= {name: tensor(name, *kind) for name, kind in PLAIN.items()}
    state["tied"] = state["plain.F32"]
    state["tied.w"] = state["w"]
    checkpoint.save(
        state,
        path,
        optimizer={name: sharded(name, *kind, like="w") for name, kind in OPTIMIZER.items()},
        trainer_state=trainer_state(tensor, Reference),
        rank_state={name: tensor(f"{name} {dist.get_rank()}", *kind) for name, kind in RANK.items()},
        layout={"name": "golden", "sizes": [2, 2]},
    )


def save_without_digests(path: Path) -> None:
    register()
    state = {name: tensor(name, *kind) for name, kind in (SHARDED | PLAIN).items()}
    checkpoint.save(
        state, path, optimizer={"m": tensor("m", "F32", (3,))}, trainer_state={"epoch": 3, "t": (1,)}, digests=False
    )


def write_otherwise(path: Path) -> None:
    """Written from ``docs/format.md``, with nothing of the package; the manifest has no digest of its own."""

    def sums(data: bytes) -> bytes:
        return b"".join(xxhash.xxh3_128_digest(data[at : at + 64]) for at in range(0, len(data), 64))

    wheel = np.frombuffer(data_of("pinwheel", *OTHER["pinwheel"]), "<i4").reshape(9, 9)
    parts = [wheel[tuple(slice(a, a + n) for a, n in zip(offsets, sizes))].tobytes() for offsets, sizes in PINWHEEL]
    one = data_of("one", *OTHER["one"])
    header_table: dict[str, Any] = {}
    at = 0
    shapes = [("I32", sizes) for _, sizes in PINWHEEL] + [("F32", (20,))]
    for index, (data, (dtype, shape)) in enumerate(zip([*parts, one], shapes)):
        assert len(data) == 4 * math.prod(shape)
        header_table[f"part{index}"] = {"data_offsets": [at, at + len(data)], "shape": shape, "dtype": dtype}
        at += len(data)
    text = json.dumps(header_table).encode()
    header = struct.pack("<Q", len(text)) + text
    content = header + b"".join(parts) + one
    (path / "data").mkdir(parents=True)
    (path / "data" / "all.st").write_bytes(content)
    rows, digests, begin = [], b"", len(header)
    for (offsets, sizes), chunk in zip([*PINWHEEL, ((0,), (20,))], [*parts, one]):
        pad = 2 - len(sizes)
        rows.append((0, begin, len(digests) // 16, *offsets, *(0,) * pad, *sizes, *(1,) * pad))
        digests += sums(chunk)
        begin += len(chunk)
    rows.reverse()  # the last tensor first, and the pinwheel's chunks in another order than in the file
    columns = np.array(rows, "<i8")
    table = {
        "digests": np.frombuffer(digests, np.uint8).reshape(-1, 16),
        "sizes": columns[:, 5:7],
        "offsets": columns[:, 3:5],
        "block": columns[:, 2],
        "begin": columns[:, 1],
        "file": columns[:, 0],
    }
    header_of_table: dict[str, Any] = {"__metadata__": {"written": "by hand"}}
    at = 0
    for name, column in table.items():
        kind = "U8" if column.dtype == np.uint8 else "I64"
        header_of_table[name] = {"dtype": kind, "shape": column.shape, "data_offsets": [at, at + column.nbytes]}
        at += column.nbytes
    text = json.dumps(header_of_table).encode()
    whole = struct.pack("<Q", len(text)) + text + b"".join(column.tobytes() for column in table.values())
    (path / "data" / "chunks").write_bytes(whole)
    manifest = {
        "format_version": 2,
        "format": "lightning_shard",
        "comment": {"written": "by hand"},
        "writer": "a program of a few lines",
        "attempt": "",
        "world_size": 3,
        "layout": ["any", 1.5],
        "digest": {"algorithm": "xxh3_128", "block_bytes": 64},
        "files": [
            {
                "path": "data/all.st",
                "bytes": len(content),
                "header_bytes": len(header),
                "digest": xxhash.xxh3_128_hexdigest(header),
                "kind": "safetensors",
            }
        ],
        "table": {"bytes": len(whole), "path": "data/chunks", "digests": xxhash.xxh3_128_hexdigest(whole), "more": 1},
        "state_file": None,
        "optimizer": {},
        "trainer": {},
        "ranks": {"2": {}},
        "model": {
            "again": {"same_as": "pinwheel"},
            "pinwheel": {"dtype": "I32", "chunks": [1, 6], "shape": [9, 9], "more": None},
            "one": {"dtype": "F32", "shape": [20], "chunks": [0, 1]},
        },
    }
    (path / "manifest.json").write_text(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_ranks(save_sharded, 4, folder / "sharded")
    save_without_digests(folder / "without-digests")
    write_otherwise(folder / "other-writer")
