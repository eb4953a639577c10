"""A reader of checkpoints by ``docs/format.md`` alone: numpy, json and struct, and xxhash for the digests.

It shares no code with the package, and says by its length how much a reader in another language would need.
Elements of dtypes that numpy lacks are given as unsigned integers of their width.
"""

from __future__ import annotations

import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "C64": "<c8", "C128": "<c16", "BOOL": "u1"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1"},
    **{"BF16": "<u2", "C32": "<u4", "F8_E8M0": "u1"},
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), "u1"),
}
CARRIERS = {"F8_E8M0": ("U8", []), "C128": ("F64", [2]), "C32": ("F16", [2])}
FIELDS = ("writer", "attempt", "world_size", "layout", "digest", "files", "table", "state_file", "model", "optimizer")


class Damaged(Exception):
    pass


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Damaged(what)


def hash_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


class PlainReader:
    """One checkpoint: ``tensor(section, name)``, ``names(section)`` and ``state()``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        data = (folder / "manifest.json").read_bytes()
        self.manifest = json.loads(data)
        check(self.manifest["format"] == "lightning_shard", "no manifest")
        if "manifest_digest" in self.manifest:
            body, _, tail = data.rpartition(b',\n"manifest_digest":')
            check(tail == f'"{hash_of(body)}"}}\n'.encode(), "the manifest differs from its digest")
        check(self.manifest["format_version"] == 2, "another version")
        check(all(field in self.manifest for field in (*FIELDS, "trainer", "ranks")), "a field is missing")
        self.block = self.manifest["digest"]["block_bytes"] if self.manifest["digest"] else 0
        for file in self.manifest["files"]:
            parts = file["path"].split("/")
            check(not re.search(r"[\\:?#*\[\]%\x00-\x1f\x7f]", file["path"]), "a path that isn't one")
            check(all(part not in ("", ".", "..") for part in parts), "a path to elsewhere")
            check((folder / file["path"]).stat().st_size == file["bytes"], f"{file['path']} has another size")
            if self.block:
                covered = self._bytes(file, 0, file.get("header_bytes", file["bytes"]))
                check(hash_of(covered) == file["digest"], f"{file['path']} differs from its digest")
        self.table = self._table(self.manifest["table"])

    def names(self, section: str) -> list[str]:
        return list(self._section(section))

    def tensor(self, section: str, name: str) -> np.ndarray:
        tensors = self._section(section)
        entry = tensors[tensors[name].get("same_as", name)]
        dtype = np.dtype(DTYPES[entry["dtype"]])
        whole = np.zeros(entry["shape"], dtype)
        filled = np.zeros(entry["shape"], np.uint8)
        dims = len(entry["shape"])
        for row in range(*entry["chunks"]):
            file = self.manifest["files"][self.table["file"][row]]
            offsets, sizes = (self.table[name][row, :dims].tolist() for name in ("offsets", "sizes"))
            begin = int(self.table["begin"][row])
            data = self._bytes(file, begin, begin + math.prod(sizes) * dtype.itemsize)
            if self.block:
                found = b"".join(
                    xxhash.xxh3_128_digest(data[at : at + self.block]) for at in range(0, len(data), self.block)
                )
                expected = self.table["digests"].tobytes()[16 * self.table["block"][row] :]
                check(expected.startswith(found), f"a chunk of {name} differs from its digests")
            if data:
                self._check_header(file, begin, len(data), sizes, entry["dtype"])
            place = tuple(slice(at, at + size) for at, size in zip(offsets, sizes))
            whole[place] = np.frombuffer(data, dtype).reshape(sizes)
            filled[place] += 1
        check(bool((filled == 1).all()), f"the chunks of {name} don't make it up")
        return whole

    def state(self) -> Any:
        """The trainer state; what Python has no plain value for stays as it is written."""
        number = self.manifest["state_file"]
        if number is None:
            return None
        file = self.manifest["files"][number]
        return self._value(json.loads(self._bytes(file, 0, file["bytes"])))

    def _section(self, section: str) -> dict[str, Any]:
        kind, _, rank = section.partition(" ")
        return self.manifest["ranks"][rank] if kind == "rank" else self.manifest[kind]

    def _bytes(self, file: dict[str, Any], begin: int, end: int) -> bytes:
        with (self.folder / file["path"]).open("rb") as opened:
            opened.seek(begin)
            data = opened.read(end - begin)
        check(len(data) == end - begin, f"{file['path']} is too short")
        return data

    def _table(self, entry: dict[str, Any]) -> dict[str, np.ndarray]:
        data = (self.folder / entry["path"]).read_bytes()
        check(len(data) == entry["bytes"], "the table has another size")
        digests = "".join(hash_of(data[at : at + 2**22]) for at in range(0, len(data), 2**22))
        check(digests == entry["digests"], "the table differs from its digests")
        (length,) = struct.unpack("<Q", data[:8])
        columns = {}
        header = json.loads(data[8 : 8 + length])
        for name in ("file", "begin", "block", "offsets", "sizes", "digests"):
            column = header[name]
            begin, end = (8 + length + at for at in column["data_offsets"])
            columns[name] = np.frombuffer(data[begin:end], {"I64": "<i8", "U8": "u1"}[column["dtype"]])
            columns[name] = columns[name].reshape(column["shape"])
        return columns

    def _check_header(self, file: dict[str, Any], begin: int, nbytes: int, sizes: list[int], dtype: str) -> None:
        (length,) = struct.unpack("<Q", self._bytes(file, 0, 8))
        check(8 + length == file["header_bytes"], f"the header of {file['path']} has another length")
        table = json.loads(self._bytes(file, 8, 8 + length))
        carrier, last = CARRIERS.get(dtype, (dtype, []))
        start = begin - 8 - length
        expected = {"dtype": carrier, "shape": [*sizes, *last], "data_offsets": [start, start + nbytes]}
        check(expected in [entry for key, entry in table.items() if key != "__metadata__"], "the header has no such")

    def _value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self._value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if "$" not in tree:
            return {key: self._value(item) for key, item in tree.items()}
        tag, v = tree["$"], tree["v"]
        if tag in ("int", "float"):
            return int(v, 16) if tag == "int" else float(v)
        if tag == "complex":
            return complex(*map(float, v))
        if tag in ("tuple", "set", "frozenset", "deque"):
            make: Any = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": list}[tag]
            return make(self._value(v))
        if tag in ("dict", "ordered_dict", "counter", "defaultdict"):
            return {self._value(key): self._value(item) for key, item in v}
        if tag in ("namespace", "simple_namespace", "enum"):
            return self._value(v)
        if tag == "tensor":
            return self.tensor("trainer", v)
        if tag == "stored":
            return self.tensor("optimizer", v)
        return {key: item for key, item in tree.items() if key != "$"} | {"tag": tag}
