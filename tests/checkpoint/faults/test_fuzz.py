"""Fuzzing of all that is parsed: whatever the bytes, values come out or an error of ours, and soon.

``FUZZ_SEED`` chooses other inputs, ``FUZZ_FACTOR`` how many times as many.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.foreign.files import _indexed
from lightning_shard.checkpoint.foreign.torchfile import read_archive
from lightning_shard.checkpoint.format.header import header_of, layout_fault, parse_header, tensor_table
from lightning_shard.checkpoint.format.manifest import Manifest, signed
from lightning_shard.checkpoint.format.table import Table, table_file
from lightning_shard.checkpoint.format.typed_json import decode, parse
from lightning_shard.errors import CheckpointError
from tests.checkpoint.manifests import body_of
from tests.paths import GOLDEN

GROUP = "Malicious checkpoints"
SEED = int(os.environ.get("FUZZ_SEED", "0"))
FACTOR = float(os.environ.get("FUZZ_FACTOR", "1"))
SLOWEST_S = 20

WORDS = [
    b"", b"null", b"true", b"0", b"-1", b"1", b"1.0", b"1e999", b"-0", b"9007199254740993", b"1180591620717411303424",
    b'""', b'"x"', b'"$"', b'"\\ud800"', b'"../x"', b'"a\\u0000"', b"[]", b"{}", b"[[]]", b'{"$":1}', b"NaN",
    b"1" * 5000, b"[" * 2000,
    b'{"a":1,"a":2}', b'{"$":"range","v":[0,1000000000]}', b'{"$":"set","v":"abc"}', b'"dtype"', b'"U8"',
    b'"<U0"', b'{"same_as":"w"}', b"\xff", b'"tuple"', b'"ndarray"', b'"dict"', b'"deque"',
]  # fmt: skip
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?|true|false|null|[{}\[\],:]')


def mutated(data: bytes, chooser: random.Random, tokens: list[tuple[int, int]]) -> bytes:
    """Change some bytes, or some words of JSON: removed, replaced by others of the text or by awkward ones, doubled."""
    for _ in range(chooser.choice((1, 1, 1, 2, 4))):
        if tokens and chooser.random() < 0.75:
            begin, end = chooser.choice(tokens)
            other = chooser.choice(tokens)
            word = chooser.choice((chooser.choice(WORDS), data[other[0] : other[1]], data[begin:end] * 2))
            data = data[:begin] + word + data[end:]
        else:
            at = chooser.randrange(len(data) + 1)
            length = chooser.choice((0, 1, 1, 2, 8))
            data = data[:at] + chooser.randbytes(chooser.choice((0, 1, 1, 4))) + data[at + length :]
    return data


def fuzz(seeds: list[bytes], count: int, run: Callable[[bytes], Any], *, words: bool = True) -> tuple[int, int, int]:
    """How many inputs were tried, how many of them failed with an error of ours, and how many with another or late."""
    chooser = random.Random(SEED)
    tokens = [[match.span() for match in TOKEN.finditer(seed)] if words else [] for seed in seeds]
    for seed in seeds:
        run(seed)
    refused = lost = 0
    count = int(count * FACTOR)
    for _ in range(count):
        which = chooser.randrange(len(seeds))
        data = mutated(seeds[which], chooser, tokens[which])
        started = time.monotonic()
        try:
            run(data)
        except CheckpointError:
            refused += 1
        except Exception as error:
            lost += 1
            print(f"{type(error).__name__}: {error} of {data!r:.2000}")
        lost += time.monotonic() - started > SLOWEST_S
    assert refused > count // 20, "the inputs are too tame"
    return count, refused, lost


def look_into(manifest: Manifest, table: bytes) -> None:
    """With a table whose digests fit."""
    manifest.take_table(Table(table_file(manifest.table.path, table), "table", lambda: table))
    for section in manifest.sections().values():
        for name in section:
            section.alias_of(name)
            list(section[name].chunks)
    manifest.to_bytes()


def seeds(tmp_path: Path) -> list[tuple[bytes, bytes]]:
    """Manifests without their own digests, and their tables: a small one of ours, and another writer's."""
    path = tmp_path / "c"
    state = {"a": torch.ones(2, 3), "tied": torch.ones(4), "b": torch.zeros((), dtype=torch.int8)}
    checkpoint.save(
        state | {"again": state["tied"]}, path, rank_state={"g": torch.ones(2)}, trainer_state=[1], fsync=False
    )
    found = []
    for folder in (path, GOLDEN / "other-writer"):
        data = (folder / "manifest.json").read_bytes()
        table = (folder / json.loads(data)["table"]["path"]).read_bytes()
        found.append((body_of(data) if b"manifest_digest" in data else data[:-1], table))
    return found


IN_PART = pytest.mark.parametrize("share", [0.1, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])


@IN_PART
def test_manifests(tmp_path, ledger, share) -> None:
    (ours, our_table), (others, other_table) = seeds(tmp_path)

    def run(body: bytes) -> None:
        manifest = Manifest.from_bytes(signed(body))
        look_into(manifest, other_table if manifest.writer.startswith("a ") else our_table)

    tried, _, lost = fuzz([ours, others], int(20_000 * share), run)
    ledger(GROUP, "fuzzing of manifests whose own digest fits", tried=tried, lost=lost, sample=share < 1)


@IN_PART
def test_tables(tmp_path, ledger, share) -> None:
    tried = lost = 0
    for body, table in seeds(tmp_path):
        manifest = Manifest.from_bytes(signed(body))
        length = 8 + int.from_bytes(table[:8], "little")

        def run(data: bytes, manifest: Manifest = manifest) -> None:
            look_into(manifest, data)

        def with_length(text: bytes, rest: bytes = table[length:], run: Callable[[bytes], Any] = run) -> None:
            run(len(text).to_bytes(8, "little") + text + rest)

        for seed, words, each in ((table[8:length], True, with_length), (table, False, run)):
            more, _, also = fuzz([seed], int(5_000 * share), each, words=words)
            tried, lost = tried + more, lost + also
    ledger(GROUP, "fuzzing of tables whose digests fit", tried=tried, lost=lost, sample=share < 1)


def test_safetensors_headers(ledger) -> None:
    tensors: list[tuple[str, str, tuple[int, ...]]] = [("a", "F32", (2, 3)), ("b", "C128", (2,)), ("ü\n", "U8", ())]
    header = header_of(tensor_table(tensors)[0], {"format": "pt"})

    def run(data: bytes) -> None:
        entries, _ = parse_header(data, "f")
        layout_fault(entries.values(), len(data), len(data) + 57)

    def with_length(text: bytes) -> None:
        run(len(text).to_bytes(8, "little") + text)

    tried, _, lost = fuzz([header.rstrip()[8:]], 20_000, with_length)
    more, _, also = fuzz([header], 5_000, run, words=False)
    ledger(GROUP, "fuzzing of safetensors headers", tried=tried + more, lost=lost + also)


def test_trainer_states(ledger) -> None:
    (state,) = (GOLDEN / "sharded" / "trainer").glob("*.json")
    tree = json.loads(state.read_bytes())
    seeds = [json.dumps({key: value}).encode() for key, value in tree.items()]

    def run(data: bytes) -> None:
        decode(parse(data, "state"), {"t": torch.ones(1)}.get, str, lenient=True)

    tried, _, lost = fuzz(seeds, 50_000, run)
    ledger(GROUP, "fuzzing of trainer states", tried=tried, lost=lost)


def test_indexes(ledger) -> None:
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    seed = json.dumps({"metadata": {"total_size": 3}, "weight_map": files}).encode()
    opened = []

    def run(data: bytes) -> None:
        opened.extend(_indexed(data, "index"))

    tried, _, lost = fuzz([seed], 15_000, run)
    lost += sum(os.path.isabs(name) or ".." in name.split("/") or "\0" in name for name in opened)
    ledger(GROUP, "fuzzing of indexes of safetensors files", tried=tried, lost=lost)


@pytest.mark.filterwarnings("ignore")
def test_torch_zips(ledger) -> None:
    """Changed where zips, their directories and the pickle have their say; the tensors' bytes are but bytes."""
    buffer = io.BytesIO()
    torch.save({"state_dict": {"w": torch.arange(6.0).view(2, 3), "h": torch.ones(2).half()}, "epoch": 1}, buffer)

    def run(data: bytes) -> None:
        archive = read_archive(io.BytesIO(data), "f")
        for name, tensor in archive.content["state_dict"].items() if isinstance(archive.content, dict) else ():
            archive.stored_as(name, tensor)

    def tolerant(data: bytes) -> None:
        try:
            run(data)
        except (KeyError, AttributeError):  # of this test's own way through the dict
            return

    tried, _, lost = fuzz([buffer.getvalue()], 1_500, tolerant, words=False)
    ledger(GROUP, "fuzzing of torch's zips", tried=tried, lost=lost)
