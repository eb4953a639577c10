"""Damage of every byte and file: a load gives what was saved or refuses, and ``verify`` says where the damage is."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format import header
from lightning_shard.checkpoint.format.manifest import Manifest
from lightning_shard.checkpoint.memory import byte_view
from lightning_shard.errors import CheckpointError, CorruptCheckpointError
from tests.checkpoint.manifests import body_of, edit, edit_table, flip, put_table
from tests.paths import GOLDEN

GROUP = "Damage"
STATE = {"w": torch.arange(30.0).view(5, 6), "b": torch.arange(7).bfloat16(), "s": torch.tensor(3), "e": torch.ones(0)}
FLIPS = int(os.environ.get("DAMAGE_FLIPS", "1000"))
VERIFY_EVERY = int(os.environ.get("DAMAGE_VERIFY_EVERY", "5"))
"""Loads are tried after every change, and ``verify``, which takes longer, after one of so many."""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A checkpoint of every kind of file, with little padding, so that every byte of it can be tried."""
    monkeypatch.setattr(header, "ALIGNMENT_BYTES", 8)
    path = tmp_path / "small.ckpt"
    checkpoint.save(
        {**STATE, "tied": STATE["w"]},
        path,
        optimizer={"0/w/m": torch.ones(3)},
        trainer_state={"epoch": 2, "t": torch.arange(3), "deep": (1, {"x": {2}})},
        rank_state={"g": torch.arange(5, dtype=torch.uint8)},
        layout={"name": "one", "sizes": [1, 2]},
        fsync=False,
    )
    return path


def everything(path):
    """All that a checkpoint holds, as bytes and text that can be compared."""
    stored = checkpoint.read(path)
    state = stored.trainer_state(lenient=True)
    tensors = {"model": stored.full(), "optimizer": stored.optimizer.full()}
    tensors |= {str(rank): stored.rank_state(rank) for rank in stored.manifest.ranks}
    found = {(s, n): raw(tensor) for s, section in tensors.items() for n, tensor in section.items()}
    aliases = {name: stored.alias_of(name) for name in stored}
    return found, aliases, repr(state), repr(stored.manifest.layout), stored.manifest.world_size


def raw(tensor):
    return str(tensor.dtype), tuple(tensor.shape), bytes(byte_view(tensor.contiguous()))


def outcome(path, expected):
    """``refused``, ``right`` or ``WRONG``: what a load of everything comes to."""
    try:
        return "right" if everything(path) == expected else "WRONG"
    except CheckpointError:
        return "refused"


def files(path):
    found = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "manifest.json")
    assert found
    return found


def places(path):
    """Of each file the names of its tensors and where their bytes begin and end."""
    manifest = checkpoint.read(path).manifest
    found: dict[str, list[tuple[str, int, int]]] = {file.path: [] for file in manifest.files}
    found[manifest.table.path] = []
    for section in manifest.sections().values():
        for name, entry in section.own():
            for chunk in entry.chunks:
                found[manifest.files[chunk.file].path].append((name, chunk.begin, chunk.end))
    return found


@pytest.mark.parametrize("step", [13, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_every_byte_of_every_file_flipped_in_turn(small, ledger, step):
    expected = everything(small)
    where = places(small)
    tried = lost = 0
    outcomes = set()
    for file in files(small):
        data = file.read_bytes()
        name = str(file.relative_to(small))
        for at in range(0, len(data), step):
            file.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
            tensor = next((tensor for tensor, begin, end in where[name] if begin <= at < end), None)
            found = outcome(small, expected)
            named = at % VERIFY_EVERY or any(
                fault.file == name and (tensor is None or tensor in (fault.tensor or ""))
                for fault in checkpoint.verify(small).faults
            )
            # a header is for people and salvage: a load that doesn't need it isn't misled by it
            header = tensor is None and name.endswith(".safetensors") and not name.startswith("table-")
            sound = found == "refused" or (found == "right" and header)
            lost += not (sound and named)
            outcomes.add(found)
            tried += 1
        file.write_bytes(data)
    assert everything(small) == expected
    assert outcomes == {"refused", "right"}
    what = "every byte of every file of a small checkpoint flipped in turn"
    ledger(GROUP, what, tried=tried, lost=lost, sample=step > 1)


def refuses(path, data, count):
    """Whether a manifest is refused; now and then, from its file, by ``read`` and ``verify``."""
    try:
        Manifest.from_bytes(data)
    except CheckpointError:
        if count % (20 * VERIFY_EVERY):
            return True
    else:
        return False
    (path / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError):
        checkpoint.read(path)
    return [fault.file for fault in checkpoint.verify(path).faults] == ["manifest.json"]


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.long)], ids=["one of each byte", "all"])
def test_every_bit_of_the_manifest_flipped_in_turn(small, ledger, bits):
    path = small / "manifest.json"
    data = path.read_bytes()
    lost = 0
    for at, bit in itertools.product(range(len(data)), range(bits)):
        flipped = data[at] ^ 1 << (at + bit) % 8
        lost += not refuses(small, data[:at] + bytes([flipped]) + data[at + 1 :], 8 * at + bit)
    path.write_bytes(data)
    assert checkpoint.verify(small).ok
    ledger(GROUP, "every bit of the manifest flipped in turn", tried=bits * len(data), lost=lost, sample=bits < 8)


TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+|true|false|null|[{}\[\],:]')
WORDS = [b"", b"null", b"0", b"1", b'"x"', b"[]", b"{}", b"1e999", b"9007199254740993"]


def test_every_word_of_the_manifest_removed_and_replaced(small, ledger):
    path = small / "manifest.json"
    data = path.read_bytes()
    tried = lost = 0
    for token in TOKEN.finditer(data):
        for word in WORDS:
            if word != token[0]:
                lost += not refuses(small, data[: token.start()] + word + data[token.end() :], tried)
                tried += 1
    lines = data.splitlines(keepends=True)
    for index in range(len(lines)):
        for changed in (lines[:index] + lines[index + 1 :], lines[: index + 1] + lines[index:], lines[:index]):
            lost += not refuses(small, b"".join(changed), tried)
            tried += 1
    ledger(GROUP, "every word and line of the manifest removed, doubled and replaced", tried=tried, lost=lost)


@pytest.mark.parametrize("verb", ["read", "load", "gather", "diff", "inspect", "resume"])
def test_a_manifest_that_differs_from_its_digest_or_lost_it_is_refused_by_every_way(small, tmp_path, verb):
    from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO

    verbs = {
        "read": lambda path: checkpoint.read(path, verify=False),
        "load": lambda path: checkpoint.load(path, {"w": torch.zeros(5, 6)}, strict=False, verify=False),
        "gather": lambda path: checkpoint.gather(path, tmp_path / "m.safetensors", verify=False),
        "diff": lambda path: checkpoint.diff(path, path),
        "inspect": checkpoint.inspect,
        "resume": lambda path: ShardedCheckpointIO().open_checkpoint(path, together=True),
    }
    path = small / "manifest.json"
    data = path.read_bytes()
    verbs[verb](small)
    for changed in (
        data.replace(b'"state_file"', b'"state_fila"'),
        data.replace(b'"optimizer"', b'"optimizor"'),
        data.replace(b'"same_as":"w"', b'"same_as":"b"'),
        data.replace(b'"BF16"', b'"F16"'),
        body_of(data) + b"}\n",
        data.replace(b'"manifest_digest"', b'"manifest_digost"'),
    ):
        assert changed != data
        path.write_bytes(changed)
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            verbs[verb](small)


@pytest.fixture
def larger(tmp_path):
    path = tmp_path / "larger.ckpt"
    generator = torch.Generator().manual_seed(0)
    state = {f"w{i}": torch.randn(size, generator=generator) for i, size in enumerate((2**18, 3 * 2**19, 2**20))}
    state |= {f"small{i}": torch.randn(100, i, generator=generator) for i in range(20)}
    checkpoint.save(state, path, optimizer={"m": torch.randn(3000)}, fsync=False)
    return path


@pytest.mark.parametrize("flips", [FLIPS // 10, pytest.param(FLIPS, marks=pytest.mark.long)])
def test_random_flips_in_a_larger_checkpoint(larger, ledger, flips):
    """Of blocks of 4 MiB, some of them whole: the flipped tensor is refused, and all the others are right."""
    chooser = random.Random(0)
    stored = checkpoint.read(larger)
    expected = {name: tensor.full() for name, tensor in (*stored.items(), *stored.optimizer.items())}
    where = [(file, name, begin, end) for file, parts in places(larger).items() for name, begin, end in parts]
    weights = [end - begin for _, _, begin, end in where]
    lost = 0
    for count in range(flips):
        # half of them anywhere, half of them in any tensor, of which most are small
        file, name, begin, end = chooser.choices([w for w in where if w[3] > w[2]] if count % 2 else where,
                                                 None if count % 2 else weights)[0]  # fmt: skip
        at, mask = chooser.randrange(begin, end), chooser.randrange(1, 256)
        flip(larger / file, at, mask)
        section = stored if name in stored else stored.optimizer
        try:
            section[name].full()
            lost += 1
        except CorruptCheckpointError as error:
            lost += not (repr(name) in str(error) and file in str(error))
        other = f"small{count % 20}"
        lost += other != name and not torch.equal(stored[other].full(), expected[other])
        flip(larger / file, at, mask)
    what = "random flips in the tensors of a larger checkpoint"
    ledger(GROUP, what, tried=flips, lost=lost, sample=flips < FLIPS)


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.long)], ids=["boundaries", "all"])
def test_every_file_cut_at_every_boundary_and_extended(small, larger, ledger, everywhere):
    tried = lost = 0
    for path in (small, larger):
        expected = everything(path)
        where = places(path)
        for file in [path / "manifest.json", *files(path)]:
            data = file.read_bytes()
            name = str(file.relative_to(path))
            parts = where.get(name, [])
            header_bytes = 8 + int.from_bytes(data[:8], "little") if parts else 0
            edges = {0, 1, 7, 8, 9, header_bytes, len(data) - 1, len(data) // 2}
            for _, begin, end in parts:
                if path == small or end - begin > 2**20:
                    edges |= {begin, begin + 1, end - 1, end, *range(begin, end, 4 * 2**20)}
            edges |= set(range(len(data))) if everywhere and path == small else set()
            changed = [data[:edge] for edge in sorted(edges) if edge < len(data)]
            for content in [*changed, data + b"\0", data + bytes(5000), data * 2]:
                file.write_bytes(content)
                found = outcome(path, expected)
                report = checkpoint.verify(path)
                longer = len(content) > len(data) and name.endswith(".safetensors")
                lost += not (found == "refused" or (found == "right" and longer))
                lost += report.ok or not any(fault.file == name for fault in report.faults)
                tried += 1
            file.write_bytes(data)
        assert everything(path) == expected
    what = "every file cut at every boundary, of a small checkpoint at every byte, and extended"
    ledger(GROUP, what, tried=tried, lost=lost, sample=not everywhere)


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.long)], ids=["some", "all"])
def test_shards_swapped_missing_doubled_and_of_another_save(tmp_path, ledger, step):
    """The four ranks' files of one checkpoint, and those of another with the same names, shapes and layout."""
    path, other = (Path(shutil.copytree(GOLDEN / "sharded", tmp_path / name)) for name in ("one.ckpt", "other.ckpt"))
    expected = everything(path)
    content = {file: file.read_bytes() for file in files(path)}
    for file in files(other):  # the same but for other values
        flip(file, -1, 0x55)
    tried = lost = 0

    def attempt(changes):
        nonlocal tried, lost
        for file, data in changes.items():
            if data is None:
                file.unlink()
            else:
                file.write_bytes(data)
        wrong = {str(file.relative_to(path)) for file, data in changes.items() if data != content[file]}
        report = checkpoint.verify(path)
        lost += outcome(path, expected) != "refused" and bool(wrong)
        lost += {fault.file for fault in report.faults} != wrong
        tried += 1
        for file in changes:
            file.write_bytes(content[file])

    for a, b in [pair for pair in itertools.combinations(content, 2) if pair[0].parent == pair[1].parent][::step]:
        attempt({a: content[b], b: content[a]})
        attempt({a: content[b]})
    for file in content:
        attempt({file: None})
        attempt({file: (other / file.relative_to(path)).read_bytes()})
    assert everything(path) == expected
    ledger(GROUP, "shards swapped, missing, doubled, and of another save", tried=tried, lost=lost, sample=step > 1)


def damaged_covers(manifest, columns):
    """Ways in which the chunks of ``w`` may fail to make it up: (rows to take, what to add to their offsets)."""
    first, last = manifest["model"]["w"]["chunks"]
    rows = list(range(first, last))
    assert len(rows) == 4
    moved = np.zeros_like(columns["offsets"][first:last])
    moved[3] -= 1
    return [(rows[1:], 0), ([*rows, rows[0]], 0), ([rows[0]] * 4, 0), (rows[:3], 0), (rows, moved)]


def put_cover(manifest, columns, rows, add):
    """Give ``w`` these chunks; its span is moved to the table's end."""
    first, last = manifest["model"]["w"]["chunks"]
    for section in (manifest["model"], manifest["optimizer"], manifest["trainer"], *manifest["ranks"].values()):
        for tensor in section.values():
            if "chunks" in tensor and tensor["chunks"][0] >= last:
                tensor["chunks"] = [at - (last - first) for at in tensor["chunks"]]
    count = len(columns["file"])
    manifest["model"]["w"]["chunks"] = [count - (last - first), count - (last - first) + len(rows)]
    for name in ("file", "begin", "block", "offsets", "sizes"):
        own = columns[name][rows] + (add if name == "offsets" else 0)
        columns[name] = np.concatenate([np.delete(columns[name], slice(first, last), axis=0), own])


@pytest.mark.parametrize("which", range(5))
def test_chunks_that_do_not_make_up_a_tensor_are_refused_by_readers_of_any_part(tmp_path, which):
    """Also by one whose part is exactly a chunk, as on the layout that saved: others would read other values.

    ``diff`` looks at both sides: equal chunks on the other don't make them equal.
    """
    golden = GOLDEN / "sharded"
    path = Path(shutil.copytree(golden, tmp_path / "one.ckpt"))
    boxes = [(chunk.offsets, chunk.sizes) for chunk in checkpoint.read(golden).manifest.model["w"].chunks]
    edit_table(path, lambda m, columns: put_cover(m, columns, *damaged_covers(m, columns)[which]))
    for offsets, sizes in boxes:
        with pytest.raises(CorruptCheckpointError, match=r"don't make it up|isn't inside"):
            checkpoint.read(path)["w"][tuple(slice(at, at + size) for at, size in zip(offsets, sizes))]
    for pair in ((golden, path), (path, golden), (path, path)):
        with pytest.raises(CorruptCheckpointError, match=r"don't make it up|isn't inside"):
            checkpoint.diff(*pair, sections=["model"])
    assert [fault.tensor for fault in checkpoint.verify(path).faults] == ["w"]


def test_all_tensors_whose_chunks_are_wrong_are_named_and_the_others_are_read(tmp_path):
    state = {name: torch.arange(4.0) for name in "abcd"}
    checkpoint.save(state, tmp_path)

    def change(manifest, columns):
        row = {name: entry["chunks"][0] for name, entry in manifest["model"].items()}
        columns["file"][row["a"]], columns["begin"][row["b"]], columns["offsets"][row["c"]] = 9, 2**62, 1

    edit_table(tmp_path, change)
    assert {fault.tensor for fault in checkpoint.verify(tmp_path).faults} == {"a", "b", "c"}
    stored = checkpoint.read(tmp_path)
    for name, says in (("a", "refers to file 9 of 1"), ("b", "has a chunk of"), ("c", "isn't inside|don't make")):
        with pytest.raises(CorruptCheckpointError, match=f"model tensor '{name}'.*({says})"):
            stored[name].full()
    assert torch.equal(stored["d"].full(), state["d"])


def changed_number(column, row, value):
    def change(manifest, columns):
        numbers = columns[column].reshape(len(columns[column]), -1).copy()
        assert numbers[row, 0] != value
        numbers[row, 0] = value
        columns[column] = numbers.reshape(columns[column].shape)

    return change


NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 7, 2**31, 2**53, 2**63 - 4096, 2**63 - 1]


@pytest.mark.parametrize("numbers", [NUMBERS[::3], pytest.param(NUMBERS, marks=pytest.mark.long)], ids=["some", "all"])
def test_every_number_of_the_table_out_of_range_is_refused_or_changes_nothing(small, ledger, numbers):
    """With digests that fit, as a forger would make them: what is read is what was saved, or nothing is."""
    expected = everything(small)
    table = json.loads((small / "manifest.json").read_bytes())["table"]["path"]
    kept = {name: (small / name).read_bytes() for name in ("manifest.json", table)}
    rows = sum(entry.chunk_count for entry in checkpoint.read(small).manifest.chunks.entries)
    tried = lost = 0
    for column in ("file", "begin", "block", "offsets", "sizes"):
        for row, value in itertools.product(range(rows), numbers):
            for name, data in kept.items():
                (small / name).write_bytes(data)
            try:
                edit_table(small, changed_number(column, row, value))
            except AssertionError:
                continue  # it is the number that is there
            lost += outcome(small, expected) == "WRONG"
            lost += outcome(small, expected) == "right" and not checkpoint.verify(small).ok
            tried += 1
    assert tried > 30 * len(numbers)
    what = "every number of the table replaced by one out of range"
    ledger(GROUP, what, tried=tried, lost=lost, sample=numbers is not NUMBERS)


def without(name):
    return lambda manifest, columns: columns.pop(name)


COLUMNS = {
    **{f"no {name}": without(name) for name in ("file", "begin", "block", "offsets", "sizes", "digests")},
    "a column shorter": lambda m, c: c.update(begin=c["begin"][:-1]),
    "a row more": lambda m, c: c.update(
        {name: np.concatenate([c[name], c[name][:1]]) for name in c if name != "digests"}
    ),
    "a row less": lambda m, c: c.update({name: c[name][:-1] for name in c if name != "digests"}),
    "fewer dims": lambda m, c: c.update(offsets=c["offsets"][:, :1], sizes=c["sizes"][:, :1]),
    "dims that differ": lambda m, c: c.update(offsets=c["offsets"][:, :1]),
    "more padding, of other sizes": lambda m, c: c.update(
        offsets=np.pad(c["offsets"], ((0, 0), (0, 1))), sizes=np.pad(c["sizes"], ((0, 0), (0, 1)), constant_values=2)
    ),
    "numbers of 32 bits": lambda m, c: c.update(file=c["file"].astype(np.int32)),
    "numbers with a point": lambda m, c: c.update(begin=c["begin"].astype(np.float64)),
    "digests of 15 bytes": lambda m, c: c.update(digests=c["digests"][:, :15]),
    "digests cut off": lambda m, c: c.update(digests=c["digests"][:1]),
    "rows of another tensor": lambda m, c: m["model"]["w"].update(chunks=m["model"]["b"]["chunks"]),
    "rows beyond the table": lambda m, c: m["model"]["w"].update(chunks=[0, 2**53 - 1]),
    "rows backwards": lambda m, c: m["model"]["w"].update(chunks=m["model"]["w"]["chunks"][::-1]),
    "rows without an end": lambda m, c: m["model"]["w"].update(chunks=m["model"]["w"]["chunks"][:1]),
    "rows as text": lambda m, c: m["model"]["w"].update(chunks="01"),
}


HEADERS = {
    "huge counts": (b'"shape":[', b'"shape":[9'),
    "a column twice": (b'"begin"', b'"block"'),
    "a column over another": (b'"data_offsets":[0', b'"data_offsets":[8'),
    "no JSON": (b"{", b"["),
}


def lie_in_the_header(path, before, after):
    def change(manifest):
        data = (path / manifest["table"]["path"]).read_bytes()
        assert before in data
        changed = data.replace(before, after, 1)
        header = int.from_bytes(data[:8], "little") + len(changed) - len(data)
        put_table(path, manifest, header.to_bytes(8, "little") + changed[8:])

    edit(path, change)


@pytest.mark.parametrize("how", [*COLUMNS, *HEADERS])
def test_a_table_that_is_not_as_the_format_says_is_refused(small, how):
    expected = everything(small)
    edit_table(small, COLUMNS[how]) if how in COLUMNS else lie_in_the_header(small, *HEADERS[how])
    assert outcome(small, expected) == "refused"
    assert not checkpoint.verify(small).ok


def test_a_table_that_is_gone_elsewhere_or_of_another_save_is_refused(small, tmp_path):
    name = json.loads((small / "manifest.json").read_bytes())["table"]["path"]
    data = (small / name).read_bytes()
    other = tmp_path / "other.ckpt"
    checkpoint.save({"w": torch.ones(3)}, other, fsync=False)
    (theirs,) = other.glob("table-*")
    for put in (None, theirs.read_bytes(), data[:-1], b""):
        (small / name).unlink() if put is None else (small / name).write_bytes(put)
        with pytest.raises(CorruptCheckpointError, match="table-"):
            checkpoint.read(small).full()
        assert [fault.file for fault in checkpoint.verify(small).faults] == [name]
    for elsewhere in ("../other.ckpt/" + theirs.name, "/etc/passwd", "manifest.json"):
        edit(small, lambda manifest, path=elsewhere: manifest["table"].update(path=path))
        with pytest.raises(CorruptCheckpointError, match="not inside of the checkpoint"):
            checkpoint.read(small)
