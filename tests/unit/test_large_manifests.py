"""Large manifests: ranks are told an outline, and read of the file what they need. It is the same checkpoint.

What counts as large is set to nothing here, and the first rank's messages are pickled as they travel.
"""

import json
import pickle
import re

import pytest
import torch

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format import manifest as manifests
from lightning_shard.checkpoint.format import outline as outlines
from lightning_shard.checkpoint.format import text as texts
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from lightning_shard.checkpoint.format.text import signed
from lightning_shard.checkpoint.loading import outlined
from lightning_shard.checkpoint.loading.open import find, open_found, to_tell
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.store import open_store
from lightning_shard.errors import (
    CheckpointError,
    CheckpointReplacedError,
    CorruptCheckpointError,
    FormatVersionError,
)
from tests.manifests import edit_text, resigned

NAMES = ['":{', "\\", 'a"', "model", "ü", "\n}", '","chunks":[', "x" * 300]
BLOCK_BYTES = 64


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(manifests, "LARGE_BYTES", 0)
    for module in (outlines, outlined):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK_BYTES)


def save(path, add=0.0):
    tensor = torch.arange(6.0) + add
    return checkpoint.save(
        {name: tensor + number for number, name in enumerate(NAMES)}
        | {"tied": tensor, "also tied": tensor, "none": torch.empty(0, 3), "one": torch.tensor(7, dtype=torch.int8)},
        path,
        optimizer={"m": tensor.view(2, 3) * 2},
        trainer_state={"step": 3, "of": torch.ones(2)},
        rank_state={"seed": torch.tensor(5)},
        layout={"nested": {"model": {}}},
    )


def told(path):
    """What another rank is told."""
    return pickle.loads(pickle.dumps(to_tell(find(str(path), None), Ranks(0, (0, 1)))))


def opened(path):
    """A checkpoint as another rank opens it."""
    found = told(path)
    assert found.outline is not None
    assert not found.manifest
    return open_found(str(path), None, True, found)


def entries(manifest):
    return {
        (title, name): (entry.dtype, entry.shape, list(entry.chunks), section.alias_of(name))
        for title, section in manifest.sections().items()
        for name, entry in section.items()
    }


@pytest.mark.parametrize("few", [0, 8])
def test_chunks_of_some_files_are_those_of_all_that_lie_there(tmp_path, monkeypatch, few):
    """Whether they are searched for, or picked out of all."""
    monkeypatch.setattr(texts, "FEW_FILES", few)
    save(tmp_path)
    manifest = opened(tmp_path).manifest
    numbers = range(len(manifest.files))
    assert len(numbers) > 2
    found = 0
    for section in manifest.sections().values():
        for entry in section.values():
            for files in [{number} for number in numbers] + [{0, 1}, set(numbers), {len(numbers)}]:
                wanted = [chunk for chunk in entry.chunks if chunk.file in files]
                assert list(entry.in_files(files)) == wanted
                found += len(wanted)
    assert found


def test_an_outline_and_what_is_read_beside_it_are_the_manifest(tmp_path, monkeypatch):
    save(tmp_path)
    data = (tmp_path / MANIFEST_NAME).read_bytes()
    ours, large = opened(tmp_path), Manifest.from_bytes(data)
    monkeypatch.setattr(manifests, "LARGE_BYTES", len(data))
    assert told(tmp_path).outline is None  # it is small
    whole = Manifest.from_bytes(data)
    assert list(ours) == list(whole.model)
    assert entries(ours.manifest) == entries(large) == entries(whole)
    assert ours.manifest.to_bytes() == large.to_bytes() == whole.to_bytes() == data
    for field in ("attempt", "files", "layout", "world_size", "writer", "block_bytes", "state_file", "signed"):
        assert getattr(ours.manifest, field) == getattr(large, field) == getattr(whole, field)
    assert all(torch.equal(ours[name].full(), torch.arange(6.0) + number) for number, name in enumerate(NAMES))
    assert torch.equal(ours["one"].full(), torch.tensor(7, dtype=torch.int8))
    assert ours.rank_state(0) == {"seed": torch.tensor(5)}
    assert ours.rank_state(1) == {}
    assert torch.equal(ours.trainer_state()["of"], torch.ones(2))
    assert torch.equal(ours.optimizer["m"][1], torch.tensor([6.0, 8.0, 10.0]))
    assert checkpoint.verify(tmp_path).ok


def test_a_rank_reads_the_blocks_of_the_manifest_that_its_tensors_lie_in(tmp_path, monkeypatch):
    save(tmp_path)
    read, brought = [], outlined.Brought._read
    monkeypatch.setattr(
        outlined.Brought, "_read", lambda self, begin, end: read.append((begin, end)) or brought(self, begin, end)
    )
    data, ours = (tmp_path / MANIFEST_NAME).read_bytes(), opened(tmp_path)
    assert (ours["model"].shape, ours["tied"].dtype, ours.alias_of("also tied")) == ((6,), torch.float32, "tied")
    assert read == []
    for _ in range(2):
        ours["model"].full()
    line = re.search(rb'"model":\{"dtype".*?"chunks":\[(.*)\]\}', data)
    first, last = line.start(1) // BLOCK_BYTES, (line.end(1) - 1) // BLOCK_BYTES
    assert read == [(at * BLOCK_BYTES, (at + 1) * BLOCK_BYTES) for at in range(first, last + 1)]
    assert last - first < 5 < len(data) // BLOCK_BYTES


@pytest.mark.parametrize("how", ["flipped", "cut", "removed", "replaced"])
def test_a_manifest_that_has_changed_since_the_first_rank_read_it_is_told_as_such(tmp_path, how):
    save(tmp_path)
    path, ours = tmp_path / MANIFEST_NAME, opened(tmp_path)
    data = path.read_bytes()
    if how == "removed":
        path.unlink()
    elif how == "replaced":
        save(tmp_path, add=1.0)
    elif how == "cut":
        path.write_bytes(data[:1000])
    else:
        at = data.index(b'"chunks":[', data.index(b'"tied"')) + 30
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    error = CorruptCheckpointError if how == "flipped" else CheckpointReplacedError
    with pytest.raises(CheckpointError) as caught:
        [ours[name].full() for name in ours]
    assert type(caught.value) is error
    assert "aren't those that the first rank has read" in str(caught.value) or how != "flipped"


def test_a_disk_that_fails_is_told_as_such(tmp_path, monkeypatch):
    save(tmp_path)
    ours = opened(tmp_path)

    def fail(self, begin, end):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(outlined.Brought, "_read", fail)
    with pytest.raises(CheckpointError, match=r"manifest\.json can't be read: OSError: .*Input/output error"):
        ours["tied"].full()


DAMAGE = {
    "a field's kind": ('"file":0,"bytes"', '"file":"0","bytes"'),
    "another order": ('"offsets":[0],"sizes":[6]', '"sizes":[6],"offsets":[0]'),
    "not JSON": ('"offsets":[0],"sizes":[6]', '"offsets":[0,"sizes":[6]'),
    "two tensors to a line": ("},\n", "},"),
    "no chunk": ('{"file":0,"bytes"', '{"bytes"'),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_tensors_line_is_checked_before_it_is_believed(tmp_path, how):
    """A forged one: what was damaged differs from the manifest's own digest, and is refused at once."""
    tensor = torch.arange(6.0)
    checkpoint.save({"a": tensor, "b": tensor + 1, "c": torch.arange(5)}, tmp_path)
    before, after = DAMAGE[how]

    def change(text):
        at = text.index('"a":{')
        return text[:at] + text[at:].replace(before, after, 1)

    edit_text(tmp_path, change)
    for stored in (checkpoint.read(tmp_path), opened(tmp_path)):
        assert torch.equal(stored["c"].full(), torch.arange(5))
        with pytest.raises(CorruptCheckpointError, match="model tensor 'a' is damaged"):
            stored["a"].full()
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path, {"a": tensor.clone(), "b": tensor.clone(), "c": torch.arange(5)})
    assert not checkpoint.verify(tmp_path).ok


def test_what_is_not_a_tensors_line_is_refused_at_once(tmp_path):
    save(tmp_path)
    data = (tmp_path / MANIFEST_NAME).read_bytes()
    head = data[: data.rindex(b',\n"manifest_digest"')]
    for before, after in (
        (b'"tied":{"dtype"', b'"tied":["dtype"'),
        (b'"tied":{"dtype"', b'"model":{"dtype"'),  # a name twice
        (b'"one":{"dtype":"I8","shape":[]', b'"one":{"dtype":"I8","shape":[-]'),
        (b'"same_as":"tied"}', b'"same_as":"tied",}'),
        (b'"0":{"seed"', b'"00":{"seed"'),
        (b'"path":"model', b'"path":"../model'),
        (b'"files":[', b'"files":[1,'),
    ):
        (tmp_path / MANIFEST_NAME).write_bytes(signed(head.replace(before, after, 1)))
        assert head.replace(before, after, 1) != head, before
        for open_it in (checkpoint.read, opened):
            with pytest.raises(CorruptCheckpointError):
                open_it(tmp_path)
    for damaged in (data[:-9], data.replace(b'"offsets":[0]', b'"offsets":[1]', 1), data + b"\n"):
        (tmp_path / MANIFEST_NAME).write_bytes(damaged)
        for open_it in (checkpoint.read, opened):
            with pytest.raises(CorruptCheckpointError):
                open_it(tmp_path)
    (tmp_path / MANIFEST_NAME).write_bytes(signed(head.replace(b'"format_version":1', b'"format_version":2')))
    with pytest.raises(FormatVersionError):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"), [('"dtype":"I64"', '"dtype":I64'), ('"seed":', '"__metadata__":'), ('"seed":', '"seed"')]
)
def test_a_ranks_line_is_checked_before_it_is_believed(tmp_path, before, after):
    save(tmp_path)

    def change(text):
        at = text.index('"ranks":')
        return text[:at] + text[at:].replace(before, after)

    edit_text(tmp_path, change)
    for stored in (checkpoint.read(tmp_path), opened(tmp_path)):
        assert torch.equal(stored["tied"].full(), torch.arange(6.0))
        with pytest.raises(CorruptCheckpointError, match="the section of rank 0 is damaged"):
            stored.rank_state(0)
    assert not checkpoint.verify(tmp_path).ok


def test_other_writers_and_layouts_are_looked_at_as_a_whole(tmp_path):
    save(tmp_path)
    path = tmp_path / MANIFEST_NAME
    data = path.read_bytes()
    whole = json.loads(data)
    for changed in (
        signed(
            data[: data.rindex(b',\n"manifest_digest"')].replace(b'"writer":"lightning_shard ', b'"writer":"other ')
        ),
        resigned(whole),
        resigned(whole, indent=1),
    ):
        path.write_bytes(changed)
        assert changed != data
        found = told(tmp_path)
        assert (found.outline, found.manifest) == (None, changed)
        stored = open_found(str(tmp_path), None, True, found)
        assert list(stored) == list(whole["model"])
        assert torch.equal(stored["tied"].full(), torch.arange(6.0))
    # one process, and other programs' files
    assert to_tell(find(str(tmp_path), None), Ranks()).outline is None
    checkpoint.gather(tmp_path, tmp_path / "out.safetensors")
    assert told(tmp_path / "out.safetensors").outline is None


def test_a_rank_that_sees_another_manifest_or_none_says_so(tmp_path):
    for name, add in (("here", 0.0), ("other", 0.0)):
        save(tmp_path / name, add)
    (tmp_path / "nothing").mkdir()
    outline = told(tmp_path / "here").outline
    seen = {path.name: outlined.Brought(open_store(path), outline).is_there() for path in tmp_path.iterdir()}
    assert seen == {"here": True, "other": False, "nothing": False}
