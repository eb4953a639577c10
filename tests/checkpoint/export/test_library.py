"""The checkpoint as a library: no Trainer, no process group, plain and nested state dicts, slices."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_shard import checkpoint
from lightning_shard.errors import CheckpointError, ConfigurationError, UnsupportedStateError


def test_modules_nested_and_flat_states_are_one(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    flat = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    nested = {
        "0": {"weight": flat["0.weight"], "bias": flat["0.bias"]},
        "1": {name.removeprefix("1."): tensor for name, tensor in flat.items() if name.startswith("1.")},
    }
    states = {"module": model, "flat": flat, "nested": nested}
    assert not torch.distributed.is_initialized()
    for source, state in states.items():
        checkpoint.save(state, tmp_path / source, fsync=False)
        assert checkpoint.diff(tmp_path / source, tmp_path / "module"), source
    for source in states:
        for tensor in (*model.state_dict().values(), *flat.values()):
            tensor.detach().zero_()
        for target, state in states.items():
            assert checkpoint.load(tmp_path / source, state) == ([], [])
            checkpoint.save(state, tmp_path / "again", fsync=False)
            assert checkpoint.diff(tmp_path / "again", tmp_path / source), (source, target)


def test_without_a_state_to_fill_the_tensors_are_returned_by_name(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    checkpoint.save(model, tmp_path / "c", fsync=False)
    torch.testing.assert_close(checkpoint.load(tmp_path / "c"), dict(model.state_dict()))
    assert checkpoint.load(tmp_path / "c", strip_prefix="0.", rename={"1.": "norm."}).keys() >= {"weight", "norm.bias"}
    with pytest.raises(ConfigurationError, match="optimizer needs into="):
        checkpoint.load(tmp_path / "c", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("compiled", ["saved", "loaded"])
def test_a_part_that_was_compiled_on_one_side_only_is_matched(tmp_path, compiled):
    def made(side):
        parts = {"net": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), "head": nn.Linear(3, 2)}
        if side == compiled:
            parts["net"] = torch.compile(parts["net"], backend="eager")
        model = nn.ModuleDict(parts)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model["head"](model["net"](torch.randn(4, 3))).square().sum().backward()
        optimizer.step()
        return model, optimizer

    (first, optimizer), (second, again) = made("saved"), made("loaded")
    checkpoint.save(first, tmp_path / "c", optimizer=optimizer, fsync=False)
    assert checkpoint.load(tmp_path / "c", second, optimizer=again) == ([], [])
    for one, other in zip((*first.parameters(), *first.buffers()), (*second.parameters(), *second.buffers())):
        assert torch.equal(one, other)
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict())
    renamed = checkpoint.load(
        tmp_path / "c", {"body": second["net"].state_dict()}, rename={"net.": "body."}, strict=False
    )
    assert renamed.missing == []


ROW_BYTES = 2000
TABLE = torch.arange(10_000 * 500, dtype=torch.int32).view(10_000, 500)


@pytest.fixture(scope="module", params=[True, False], ids=["digests", "no digests"])
def table(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "c"
    checkpoint.save({"w": TABLE}, path, digests=request.param, fsync=False)
    return path, request.param


@pytest.mark.parametrize(
    ("index", "rows", "blocks"),
    [
        (slice(10, 20), 10, 1),
        (slice(-1, None), 1, 1),
        ((7, slice(3, 5)), 2 * 4 / ROW_BYTES, 1),
        (slice(2090, 2100), 10, 2),  # the first block ends within row 2097
        (slice(5, 5), 0, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("maps", [True, False])
def test_rows_are_read_alone_and_with_digests_out_to_whole_blocks(table, index, rows, blocks, maps):
    path, digests = table
    stored = checkpoint.read(path)
    assert stored.manifest.chunks.table.data
    asked = []
    reading, mapped = stored.store.reading, stored.store.mapped

    def counted_map(name, begin, end):
        asked.append(end - begin if maps else 0)
        return mapped(name, begin, end) if maps else None

    @contextlib.contextmanager
    def counted(name):
        def read(segments):
            asked.append(sum(buffer.nbytes for _, buffer in segments))
            inner(segments)

        with reading(name) as inner:
            yield read

    stored.store.reading, stored.store.mapped = counted, counted_map
    assert torch.equal(stored["w"][index], TABLE[index])
    block = stored.manifest.block_bytes
    last = TABLE.nbytes % block if digests and index == slice(-1, None) else block * blocks
    assert sum(asked) == (last if digests else rows * ROW_BYTES)


def test_tied_memory_takes_the_last_of_two_tensors_that_were_saved_untied_as_torchs_own_loading_does(tmp_path):
    checkpoint.save({"a": torch.zeros(3), "b": torch.ones(3)}, tmp_path / "c")
    memory = torch.empty(3)
    checkpoint.load(tmp_path / "c", {"a": memory, "b": memory})
    assert torch.equal(memory, torch.ones(3))


@pytest.mark.parametrize("name", ["__metadata__", "lone \ud800"])
def test_names_that_safetensors_has_no_place_for_are_refused(tmp_path, name):
    with pytest.raises(UnsupportedStateError, match="rename it"):
        checkpoint.save({name: torch.ones(1)}, tmp_path / "c")


@pytest.mark.parametrize("url", ["s3://bucket/run", "file:///run"])
def test_a_url_that_was_made_a_path_is_no_local_folder(tmp_path, monkeypatch, url):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="as a str"):
        checkpoint.save({"w": torch.ones(1)}, Path(url))
    with pytest.raises(CheckpointError, match="as a str"):
        checkpoint.exists(str(Path(url)))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="control character"):
        checkpoint.save({"w": torch.ones(1)}, "memory://a\tb")
