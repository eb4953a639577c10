"""Checkpoints from a stranger: nothing they name is run, nothing outside of them is opened, memory is bounded.

All are made here, and opened by ``malicious.py`` in one process of its own, since an audit hook can't be taken away.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format.blocks import digest
from tests.checkpoint.manifests import edit, edit_table, edit_text, put_table
from tests.paths import ROOT

GROUP = "Malicious checkpoints"
MOST_GROWTH_BYTES = 700 * 2**20
"""Of the process, most of it for JSON and reports of long manifests; each of the attacks asked for far more."""
MOST_SECONDS = 100
Make = Callable[[Path], None]
CASES: dict[str, Make] = {}
HARMLESS = {
    *("sound", "sound.ckpt", "names-that-terminals-obey", "tensors-of-nothing", "aliases-of-one", "enum-of-evil"),
    "ranks-of-a-billion",
}


def sound(path: Path) -> None:
    checkpoint.save(
        {"w": torch.arange(12.0).view(3, 4), "b": torch.ones(3)},
        path,
        optimizer={"m": torch.ones(2)},
        trainer_state={"epoch": 1, "t": torch.ones(2)},
        rank_state={"g": torch.ones(2)},
        fsync=False,
    )


CASES["sound"] = sound


def sound_but(change: Callable[[Path], Any]) -> Make:
    """A sound one of ours, of which something is changed."""

    def make(path: Path) -> None:
        sound(path)
        change(path)

    return make


def add(kind: str, cases: dict[str, Make]) -> None:
    CASES.update({name if name in HARMLESS else f"{kind}-{name}": make for name, make in cases.items()})


# -- the trainer state ------------------------------------------------------------------------------------------------

BILLION = '{"$":"range","v":[0,1000000000]}'
STATES = {
    **{f"range-in-{tag}": f'{{"$":"{tag}","v":{BILLION}}}' for tag in ("set", "tuple", "frozenset")},
    "range-in-deque": f'{{"$":"deque","maxlen":null,"v":{BILLION}}}',
    "range-in-dict": f'{{"$":"dict","v":{BILLION}}}',
    "range-in-counter": f'{{"$":"counter","v":{BILLION}}}',
    "range-in-size": f'{{"$":"torch.Size","v":{BILLION}}}',
    "ndarray-of-nothing": '{"$":"ndarray","dtype":"<U0","shape":[1000000000000],"v":""}',
    "ndarray-of-no-bytes": '{"$":"ndarray","dtype":"|S0","shape":[1000000000000],"v":""}',
    "ndarray-of-void": '{"$":"ndarray","dtype":"|V0","shape":[1000000000000],"v":""}',
    "ndarray-of-objects": '{"$":"ndarray","dtype":"|O","shape":[1],"v":"AAAAAAAAAAA="}',
    "ndarray-of-records": '{"$":"ndarray","dtype":"(99999,99999)f8,f8","shape":[1],"v":""}',
    "ndarray-of-long-items": '{"$":"ndarray","dtype":"<U2147483647","shape":[100],"v":""}',
    "ndarray-of-huge-shape": '{"$":"ndarray","dtype":"<f4","shape":[0,4611686018427387904,8],"v":""}',
    "ndarray-of-no-size": '{"$":"ndarray","dtype":"<f4","shape":[-1],"v":"AAAA"}',
    "uuid-of-5": '{"$":"uuid","v":5}',
    "device-evil": '{"$":"torch.device","v":"evil"}',
    "device-of-many": '{"$":"torch.device","v":"cuda:999999999999999999999"}',
    "dtype-that-imports": '{"$":"torch.dtype","v":"_inductor"}',
    "dtype-evil": '{"$":"torch.dtype","v":"evil"}',
    "size-of-2-70": '{"$":"torch.Size","v":[1180591620717411303424]}',
    "overflow": '{"a":1e999}',
    "nan": '{"a":NaN}',
    "long-integer": '{"a":' + "9" * 5000 + "}",
    "integer-of-70-bits": '{"a":1180591620717411303424}',
    "twice-the-key": '{"a":1,"a":2}',
    "deep-arrays": "[" * 100_000 + "]" * 100_000,
    "deep-objects": '{"a":' * 50_000 + "1" + "}" * 50_000,
    "deep-tags": '{"$":"tuple","v":[' * 900 + "]}" * 900,
    "unhashable": '{"$":"set","v":[[1]]}',
    "tag-that-is-none": '{"$":{},"v":1}',
    "factory-eval": '{"$":"defaultdict","v":[],"factory":"eval"}',
    "timedelta": '{"$":"timedelta","v":[1e308,0,0]}',
    "timezone": '{"$":"timezone","v":[1e300,"x"]}',
    "date": '{"$":"date","v":20240101}',
    "decimal": '{"$":"decimal","v":[0,[1],"x"]}',
    "path": '{"$":"path","v":["a"]}',
    "complex": '{"$":"complex","v":["1_0","0"]}',
    "namespace": '{"$":"namespace","v":{"$":"dict","v":[[1,2]]}}',
    "maxlen": '{"$":"deque","v":[],"maxlen":-1}',
    "tensor-that-is-none": '{"$":"tensor","v":["t"]}',
    "stored-that-is-none": '{"$":"stored","v":"nothing"}',
    "custom-evil": '{"$":"custom","type":"evil.Evil","v":1}',
    "enum-of-evil": '{"$":"enum","type":"evil.Evil","name":"X","v":3}',
    "no-json": "{",
    "not-utf-8": "\udcff",
}


def put_state(path: Path, text: str) -> None:
    data = text.encode("utf-8", "surrogateescape")

    def change(manifest: dict[str, Any]) -> None:
        file = manifest["files"][manifest["state_file"]]
        (path / file["path"]).write_bytes(data)
        file.update(bytes=len(data), digest=digest(data))

    edit(path, change)


add("state", {name: sound_but(partial(put_state, text=text)) for name, text in STATES.items()})


# -- manifests --------------------------------------------------------------------------------------------------------


Columns = dict[str, Any]


def huge_tensor(manifest: dict[str, Any], columns: Columns) -> None:
    """Covered by a chunk of a file that is said to be huge, and isn't."""
    row = manifest["model"]["w"]["chunks"][0]
    file, size = manifest["files"][columns["file"][row]], 2**44
    file["bytes"] = int(columns["begin"][row]) + size
    manifest["digest"] = None
    for each in manifest["files"]:
        del each["digest"]
    columns["digests"] = columns["digests"][:0]
    columns["block"][:] = 0
    columns["offsets"][row] = (0, 0)
    columns["sizes"][row] = (size // 4, 1)
    manifest["model"]["w"]["shape"] = [size // 4]


def instead_of_w(manifest: dict[str, Any], columns: Columns, shape: list[int], sizes: list[int], offsets: Any) -> None:
    """A checkpoint of one tensor, of which each chunk has the bytes of the first."""
    first, count, dims = manifest["model"]["w"]["chunks"][0], len(offsets), len(shape)
    for name in ("file", "begin", "block"):
        columns[name] = np.full(count, columns[name][first])
    columns["offsets"] = np.array(offsets, np.int64).reshape(count, dims)
    columns["sizes"] = np.full((count, dims), sizes, np.int64)
    manifest.update(
        model={"w": {"dtype": "F32", "shape": shape, "chunks": [0, count]}}, optimizer={}, trainer={}, ranks={}
    )
    manifest["state_file"] = None


def almost_a_grid(manifest: dict[str, Any], columns: Columns) -> None:
    """2^11 boxes of one element in 11 dims, two of which are the same: an exhaustive search would take for ever."""
    dims = 11
    places = [[number >> dim & 1 for dim in range(dims)] for number in range(2**dims)]
    places[-1] = places[0]
    instead_of_w(manifest, columns, [2] * dims, [1] * dims, places)


def tensors_of_the_same_bytes(manifest: dict[str, Any], columns: Columns) -> None:
    instead_of_w(manifest, columns, [3, 4], [3, 4], [[0, 0]] * 10_000)
    manifest["model"] = {f"w{i}": {"dtype": "F32", "shape": [3, 4], "chunks": [i, i + 1]} for i in range(10_000)}


def boxes_that_overflow(manifest: dict[str, Any], columns: Columns) -> None:
    row = manifest["model"]["w"]["chunks"][0]
    columns["offsets"][row] = (2**63 - 1, 1)
    columns["sizes"][row] = (2, 2**63 - 1)


def bytes_that_overflow(manifest: dict[str, Any], columns: Columns) -> None:
    columns["begin"][manifest["model"]["w"]["chunks"][0]] = 2**63 - 8


TABLES: dict[str, Callable[[dict[str, Any], Columns], Any]] = {
    "huge-tensor-in-a-small-file": huge_tensor,
    "equal-chunks": lambda m, c: instead_of_w(m, c, [3, 4], [3, 4], [[0, 0]] * 20_000),
    "almost-a-grid": almost_a_grid,
    "tensors-of-the-same-bytes": tensors_of_the_same_bytes,
    "boxes-that-overflow": boxes_that_overflow,
    "bytes-that-overflow": bytes_that_overflow,
    "many-dims-of-boxes": lambda m, c: instead_of_w(m, c, [1] * 64, [1] * 64, [[0] * 64] * 10_000),
    "of-no-dims-and-many-rows": lambda m, c: instead_of_w(m, c, [], [], [[]] * 100_000),
}
add("table", {name: sound_but(partial(edit_table, change=change)) for name, change in TABLES.items()})


def huge_counts(path: Path) -> None:
    """Columns of no dims may have any length without a byte."""
    header = json.dumps(
        {name: {"dtype": "I64", "shape": [2**50], "data_offsets": [0, 0]} for name in ("file", "begin", "block")}
        | {name: {"dtype": "I64", "shape": [2**50, 0], "data_offsets": [0, 0]} for name in ("offsets", "sizes")}
        | {"digests": {"dtype": "U8", "shape": [0, 16], "data_offsets": [0, 0]}}
    )
    edit(path, lambda manifest: put_table(path, manifest, safetensors(header)))


CASES["table-of-huge-counts"] = sound_but(huge_counts)
MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "tensor-beyond-its-chunks": lambda m: m["model"]["w"].update(shape=[2**40]),
    "tensor-of-2-70": lambda m: m["model"]["w"].update(shape=[2**70]),
    "shape-as-text": lambda m: m["model"]["w"].update(shape="12"),
    "shape-of-floats": lambda m: m["model"]["w"].update(shape=[3.0, 4.0]),
    "shape-of-bools": lambda m: m["model"]["w"].update(shape=[True, True]),
    "many-dims": lambda m: m["model"]["w"].update(shape=[1] * 100_000),
    "shape-without-elements": lambda m: m["model"]["w"].update(shape=[0, 2**50, 2**50], chunks=[0, 0]),
    "tensors-of-nothing": lambda m: m["model"].update(
        {f"t{i}": {"dtype": "F32", "shape": [0], "chunks": [0, 0]} for i in range(20_000)}
    ),
    "table-beyond-2-53": lambda m: m["table"].update(bytes=2**53),
    "table-of-a-petabyte": lambda m: m["table"].update(bytes=2**50, digests="0" * 32 * 2**20),
    "table-without-digests": lambda m: m["table"].update(digests=""),
    "table-is-a-shard": lambda m: m["table"].update(path=m["files"][1]["path"]),
    "table-elsewhere": lambda m: m["table"].update(path="../outside/x.safetensors"),
    "aliases-of-one": lambda m: m["model"].update({f"a{i}": {"same_as": "w"} for i in range(10_000)}),
    "alias-of-itself": lambda m: m["model"].update(w={"same_as": "w"}),
    "alias-of-a-list": lambda m: m["model"].update(w={"same_as": ["b"]}),
    "blocks-of-a-terabyte": lambda m: m["digest"].update(block_bytes=2**40),
    "blocks-of-nothing": lambda m: m["digest"].update(block_bytes=0),
    "ranks-of-evil": lambda m: m["ranks"].update({"1_0": {}}),
    "section-twice": lambda m: m.update(optimizor=m["optimizer"]),
    "file-beyond-2-53": lambda m: m["files"][0].update(bytes=2**53),
    "file-twice": lambda m: m["files"].append(m["files"][0]),
    "state-file-minus-1": lambda m: m.update(state_file=-1),
    "ranks-of-a-billion": lambda m: m.update(world_size=10**9),
    "metadata-as-a-tensor": lambda m: m["model"].update({"__metadata__": m["model"]["w"]}),
    "surrogate": lambda m: m["model"].update({"\ud800": m["model"]["w"]}),
    **{
        f"path-{index}": lambda m, path=path: m["files"][0].update(path=path)
        for index, path in enumerate(
            ["../outside/x.safetensors", "/etc/passwd", "%2e%2e/outside/x.safetensors", "a/../../x", "x" * 5000, "a\0b",
             "y" * 300, "\ud800", "model", "s3://a/b", "memory://x", "a\\..\\b", "file:///etc/passwd", "a\x1bb"]
        )
    },
}  # fmt: skip
add("manifest", {name: sound_but(partial(edit, change=change)) for name, change in MANIFESTS.items()})


def obeyed(path: Path) -> None:
    checkpoint.save({"\x1b]0;evil\x07[/red][link=evil]": torch.ones(1)}, path, layout="[bold]\x1b[2J", fsync=False)


CASES["names-that-terminals-obey"] = obeyed


def nested(text: str) -> str:
    inner = '{"layout":{\n"model":{\n"w":{"same_as":"evil"}\n},\n"x":1}\n}'
    return text.replace('"layout":null', f'"layout":{inner}').replace('"shape":[3,4]', '"shape":[9]')


CASES["manifest-model-within-the-layout"] = sound_but(partial(edit_text, change=nested))
TEXTS = {
    "deep": '{"format":"lightning_shard","layout":' + "[" * 100_000 + "]" * 100_000 + "}",
    "empty": "",
    "array": "[1]",
    "long-integer": '{"format":"lightning_shard","format_version":' + "1" * 5000 + "}",
}
for name, text in TEXTS.items():
    CASES[f"manifest-text-{name}"] = sound_but(lambda path, text=text: (path / "manifest.json").write_text(text))


# -- what is no file --------------------------------------------------------------------------------------------------


def in_place_of(path: Path, pattern: str, put: Callable[[Path], Any]) -> None:
    (file,) = path.glob(pattern)
    file.unlink()
    put(file)


PLACES = {"manifest": "manifest.json", "table": "table-*", "shard": "model/*.safetensors", "state": "trainer/*.json"}
PUTS: dict[str, Callable[[Path], Any]] = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link-to-a-device": lambda file: file.symlink_to("/dev/zero"),
    "link-to-elsewhere": lambda file: file.symlink_to("/etc/passwd"),
    "link-to-itself": lambda file: file.symlink_to(file),
}
for (name, pattern), (what, put) in itertools.product(PLACES.items(), PUTS.items()):
    CASES[f"{name}-is-a-{what}"] = sound_but(partial(in_place_of, pattern=pattern, put=put))


def folder_link(path: Path) -> None:
    shutil.move(path / "model", path.parent.parent / "outside" / "model")
    (path / "model").symlink_to(path.parent.parent / "outside" / "model")


CASES["folder-is-a-link-to-elsewhere"] = sound_but(folder_link)


# -- other programs' files --------------------------------------------------------------------------------------------

INDEXED = [
    "../../outside/x.safetensors", "/etc/passwd", "a\0b", "x" * 5000, "", "..", "%2e%2e/%2e%2e/outside/x.safetensors",
    3, None, ["a"], "\ud800",
]  # fmt: skip


def indexed(path: Path, text: str) -> None:
    path.mkdir()
    (path / "model.safetensors.index.json").write_text(text)


for index, file in enumerate(INDEXED):
    CASES[f"index-{index}"] = partial(indexed, text=json.dumps({"weight_map": {"w": file}}))
CASES["index-deep"] = partial(indexed, text="[" * 100_000)


def safetensors(header: str, data: bytes = b"", length: int | None = None) -> bytes:
    text = header.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(text) if length is None else length) + text + data


HEADERS = {
    "deep": safetensors('{"a":' * 50_000),
    "long": safetensors("{}", length=2**63),
    "beyond": safetensors("{}", length=10**8),
    "huge": safetensors('{"w":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}'),
    "negative": safetensors('{"w":{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}}'),
    "of-2-70": safetensors('{"w":{"dtype":"U8","shape":[1180591620717411303424],"data_offsets":[0,4]}}', b"1234"),
    "of-text": safetensors('{"w":{"dtype":"U8","shape":"4","data_offsets":[0,4]}}', b"1234"),
    "twice": safetensors('{"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},' * 2 + '"x":1}', b"1234"),
    "overlapping": safetensors(
        '{"v":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "in-the-header": safetensors('{"w":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}}'),
    "of-another-size": safetensors('{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "of-surrogates": safetensors('{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"),
    "of-metadata": safetensors(
        '{"__metadata__":{"a":{}},"w":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', b"1234"
    ),
}
for name, content in HEADERS.items():
    CASES[f"header-{name}.safetensors"] = lambda path, content=content: path.write_bytes(content)

REAL = {"state_dict": {"w": torch.arange(12.0), "v": torch.ones(3, 4)}, "epoch": 1}


def sound_torch(path: Path) -> None:
    torch.save(REAL, path)


CASES["sound.ckpt"] = sound_torch


def rewritten(
    path: Path, record: Callable[[str, bytes], tuple[str, bytes] | None], compression: int = zipfile.ZIP_STORED
) -> None:
    """torch's own file with its records changed."""
    buffer = io.BytesIO()
    torch.save(REAL, buffer)
    with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(path, "w", compression) as new:
        for info in old.infolist():
            changed = record(info.filename, old.read(info))
            if changed is not None:
                new.writestr(*changed)


def pickled(value: bytes) -> Make:
    return lambda path: rewritten(path, lambda name, data: (name, value if name.endswith("data.pkl") else data))


def patched(change: Callable[[bytearray], Any]) -> Make:
    def make(path: Path) -> None:
        sound_torch(path)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return make


def lie(data: bytearray, field: int, value: int, local: bool = False) -> None:
    """Change a number of the first tensor's record, in the directory or in its own header."""
    at = data.index(b"data/0") if local else data.rindex(b"data/0")
    start = data.rindex(b"PK\x03\x04" if local else b"PK\x01\x02", 0, at)
    data[start + field : start + field + 4] = struct.pack("<I", value)


class Evil:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


def nested_lists(depth: int) -> list[Any]:
    inner: list[Any] = [0]
    for _ in range(depth):
        inner = [inner] * 10
    return inner


LOOP: list[Any] = []
LOOP.append(LOOP)
BYTEARRAY = b"\x80\x02}X\x01\x00\x00\x00ac__builtin__\nbytearray\n\x8a\x06\x00\x00\x00\x00\x64\x00\x85Rs."
ARCHIVES: dict[str, Make] = {
    "deflated": lambda path: rewritten(path, lambda *record: record, zipfile.ZIP_DEFLATED),
    "big-endian": lambda path: rewritten(path, lambda n, data: (n, b"big" if n.endswith("byteorder") else data)),
    "shorter-records": lambda path: rewritten(path, lambda n, data: (n, data[:4] if "/data/" in n else data)),
    "missing-record": lambda path: rewritten(path, lambda n, data: None if n.endswith("data/0") else (n, data)),
    "record-twice": lambda path: rewritten(path, lambda n, data: (n.replace("data/1", "DATA/0"), data)),
    "names-of-elsewhere": lambda path: rewritten(path, lambda n, data: (f"../../outside/{n}", data)),
    "no-pickle": lambda path: rewritten(path, lambda n, data: None if n.endswith(".pkl") else (n, data)),
    "encrypted": patched(lambda data: lie(data, 8, 1)),
    "longer-in-the-directory": patched(lambda data: (lie(data, 20, 10**6), lie(data, 24, 10**6))),
    "zip64-sizes": patched(lambda data: (lie(data, 20, 2**32 - 1), lie(data, 24, 2**32 - 1))),
    "elsewhere": patched(lambda data: lie(data, 42, 10)),
    "beyond-the-end": patched(lambda data: lie(data, 42, 10**9)),
    "over-another": patched(lambda data: lie(data, 42, 0)),
    "name-too-long": patched(lambda data: lie(data, 26, 0xFFFFFFFF, local=True)),
    "cut": lambda path: (sound_torch(path), path.write_bytes(path.read_bytes()[:-30])),
    "that-runs-code": pickled(pickle.dumps({"a": Evil(os.system, ("echo evil",))}, 2)),
    "that-imports": pickled(b"\x80\x02}X\x01\x00\x00\x00aCevil.module\nEvil\ns."),
    "that-imports-a-module": pickled(b"\x80\x02cevil.module\nEvil\n."),
    "that-opens": pickled(pickle.dumps({"a": Evil(open, ("/etc/passwd",))}, 2)),
    "that-evaluates": pickled(pickle.dumps({"a": Evil(eval, ("evil",))}, 2)),
    "of-a-bytearray": pickled(BYTEARRAY),
    "of-lists-in-lists": pickled(pickle.dumps({"a": nested_lists(30), "state_dict": {}}, 2)),
    "of-itself": pickled(pickle.dumps({"a": LOOP, "state_dict": {}}, 2)),
    "of-deep-lists": pickled(b"\x80\x02" + b"]" * 5000 + b"a" * 4999 + b"."),
    "of-numbers": pickled(pickle.dumps({"state_dict": {3: 4}, "optimizer_states": 5}, 2)),
    "of-states": pickled(pickle.dumps({"state_dict": {}, "optimizer_states": [{"state": 1}]}, 2)),
    "of-nothing": pickled(b""),
    "of-a-list": lambda path: torch.save([torch.ones(2)], path),
    "expanded": lambda path: torch.save({"w": torch.ones(2**20).expand(2**14, 2**20)}, path),
    "names-alike": lambda path: torch.save({"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}, path),
    "names-of-numbers": lambda path: torch.save({"state_dict": {1: torch.ones(1)}}, path),
}
add("torch", {f"{name}.ckpt": make for name, make in ARCHIVES.items()})


# -- what comes of them -----------------------------------------------------------------------------------------------


LENGTHY = {
    "aliases-of-one",
    "tensors-of-nothing",
    "table-almost-a-grid",
    "table-equal-chunks",
    "table-many-dims-of-boxes",
    "table-of-no-dims-and-many-rows",
    "table-tensors-of-the-same-bytes",
}
"""Of ten thousand entries and more: these take most of the time, and are opened in the long run alone."""


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["most", "all"])
def cases(request: pytest.FixtureRequest) -> dict[str, Make]:
    return {name: make for name, make in CASES.items() if request.param or name not in LENGTHY}


@pytest.fixture(scope="module")
def opened(cases: dict[str, Make], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("strangers")
    outside, folder = root / "outside", root / "in"
    outside.mkdir()
    folder.mkdir()
    save_file({"w": torch.ones(3)}, outside / "x.safetensors")
    for name, make in cases.items():
        make(folder / name)
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*") if not file.is_symlink()}
    run = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.faults.malicious", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*") if not file.is_symlink()} == before
    return json.loads(run.stdout)


def faults(found: dict[str, Any], harmless: bool) -> list[str]:
    wrong = [f"raised {found['error']}"] if found["error"] else []
    wrong += [f"did {what}" for what in found["seen"]]
    if not found["refusals"] and not harmless:
        wrong.append("was not refused")
    if found["refusals"] and harmless:
        wrong.append(f"was refused: {found['refusals'][0]}")
    if found["grown"] > MOST_GROWTH_BYTES or found["seconds"] > MOST_SECONDS:
        wrong.append(f"took {found['grown']:,} bytes and {found['seconds']:.0f} s")
    return wrong


def test_a_stranger_gets_no_code_run_no_file_opened_and_no_memory(cases, opened, ledger) -> None:
    assert opened.keys() == cases.keys()
    assert CASES.keys() >= HARMLESS | LENGTHY
    assert len(cases) > 150
    found = {name: wrong for name in cases if (wrong := faults(opened[name], name in HARMLESS))}
    for name, wrong in found.items():
        print(name, wrong)
    fault = "checkpoints made to run code, to read elsewhere, to exhaust memory or to hang, ours and other programs'"
    ledger(GROUP, fault, tried=len(cases), lost=len(found), sample=len(cases) < len(CASES))
