"""Golden checkpoints, kept for ever: our reader and one written from docs/format.md alone give what was put in, and
what is saved today is the same to the byte.
"""

from __future__ import annotations

import base64
import importlib.metadata
import json
import re
import shutil
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.format.manifest import FORMAT_VERSION
from lightning_shard.checkpoint.format.typed_json import Reference, by_name, by_type
from lightning_shard.checkpoint.memory import byte_view
from lightning_shard.checkpoint.saving import save as saving
from lightning_shard.errors import FormatVersionError
from lightning_shard.testing import run_ranks
from tests.checkpoint.golden.values import OPTIMIZER, OTHER, PLAIN, RANK, SHARDED, Color, Point, data_of, trainer_state
from tests.checkpoint.manifests import body_of, flip
from tests.checkpoint.plain_reader import Damaged, PlainReader
from tests.paths import GOLDEN

ALL = SHARDED | PLAIN
MODELS = {
    "sharded": ALL | {"tied": PLAIN["plain.F32"], "tied.w": SHARDED["w"]},
    "without-digests": ALL,
    "other-writer": OTHER | {"again": OTHER["pinwheel"]},
}
SAME = {"tied": "plain.F32", "tied.w": "w", "again": "pinwheel"}
OPTIMIZERS = {"sharded": OPTIMIZER, "other-writer": {}}
ALONE = {"m": ("F32", (3,))}
SMALL_STATE = {"epoch": 3, "t": (1,)}


def tensor(name, dtype, shape):
    data = bytearray(data_of(name, dtype, shape))
    return torch.frombuffer(data, dtype=DTYPES[dtype]).view(shape) if data else torch.empty(shape, dtype=DTYPES[dtype])


def register():
    checkpoint.register_codec(Color, name="golden.Color")
    checkpoint.register_codec(Point, lambda point: [point.x, point.y], lambda v: Point(*v), name="golden.Point")


def save(path, name, attempts):
    """As the golden checkpoint of this name was saved: on four ranks, or on one without digests."""
    register()
    with mock.patch.object(saving, "new_attempt", return_value=attempts[dist.get_rank()]):
        save_sharded(path) if name == "sharded" else save_without_digests(path)


def save_sharded(path):
    mesh = init_device_mesh("cpu", (2, 2))
    placements = {"w": [Shard(0), Shard(1)], "v": [Shard(0), Replicate()], "rows": [Shard(0)] * 2}
    placements["few"] = [Shard(1), Shard(0)]

    def sharded(name, kind, like):
        return distribute_tensor(tensor(name, *kind), mesh, placements[like], src_data_rank=None)

    state = {name: sharded(name, kind, like=name) for name, kind in SHARDED.items()}
    state |= {name: tensor(name, *kind) for name, kind in PLAIN.items()}
    checkpoint.save(
        state | {"tied": state["plain.F32"], "tied.w": state["w"]},
        path,
        optimizer={name: sharded(name, kind, like="w") for name, kind in OPTIMIZER.items()},
        trainer_state=trainer_state(tensor, Reference),
        rank_state={name: tensor(f"{name} {dist.get_rank()}", *kind) for name, kind in RANK.items()},
        layout={"name": "golden", "sizes": [2, 2]},
    )


def save_without_digests(path):
    state = {name: tensor(name, *kind) for name, kind in ALL.items()}
    moments = {name: tensor(name, *kind) for name, kind in ALONE.items()}
    checkpoint.save(state, path, optimizer=moments, trainer_state=SMALL_STATE, digests=False)


def opened(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "other-writer" else "error")
        return checkpoint.read(GOLDEN / name)


def raw(tensor):
    return bytes(byte_view(tensor.contiguous()))


@pytest.fixture
def codecs():
    with mock.patch.dict(by_name), mock.patch.dict(by_type):
        register()
        yield


def test_every_golden_checkpoint_is_looked_at_and_is_of_this_version():
    assert {path.name for path in GOLDEN.iterdir()} == set(MODELS)
    assert FORMAT_VERSION == 2, "keep these, and add golden checkpoints of the new version"


@pytest.mark.parametrize(("name", "world_size"), [("sharded", 4), ("without-digests", 1)])
def test_what_is_saved_today_is_byte_for_byte_what_was_saved_then(tmp_path, name, world_size):
    attempts = [file.stem.rpartition("-")[2] for file in sorted((GOLDEN / name / "model").iterdir())]  # by rank
    run_ranks(save, world_size, tmp_path, name, attempts)
    then, now = (
        {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        for path in (GOLDEN / name, tmp_path)
    )
    written, ours = (body_of(files.pop("manifest.json")) for files in (then, now))
    assert now == then
    assert json.loads(ours + b"}")["writer"] == f"lightning_shard {importlib.metadata.version('lightning-shard')}"
    assert re.sub(b'"writer":".*"', b"", ours) == re.sub(b'"writer":".*"', b"", written)


@pytest.mark.parametrize(("version", "remedy"), [(1, "save it anew with this program"), (3, "upgrade lightning-shard")])
def test_another_version_is_refused_in_one_sentence_that_names_it(tmp_path, version, remedy):
    text = '{"format":"lightning_shard","format_version":%d,"writer":"lightning_shard 0.1.0","model":{}}'
    (tmp_path / "manifest.json").write_text(text % version)
    expected = rf"manifest.json has format version {version}, and this program reads version 2: {remedy} \(it was"
    for verb in (checkpoint.read, checkpoint.load, checkpoint.inspect, checkpoint.verify):
        with pytest.raises(FormatVersionError, match=expected):
            verb(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_our_reader_gives_what_was_put_in(name):
    stored = opened(name)
    sections = [(stored, MODELS[name]), (stored.optimizer, OPTIMIZERS.get(name, ALONE))]
    for section, expected in sections:
        assert set(section) == set(expected)
        for key, tensor in section.full().items():
            dtype, shape = expected[key]
            assert tuple(tensor.shape) == shape
            assert raw(tensor) == data_of(SAME.get(key, key), dtype, shape), key
    for alias in set(SAME) & set(stored):
        assert stored.alias_of(alias) == SAME[alias]
    assert checkpoint.inspect(GOLDEN / name).manifest_digest == (name != "other-writer")


@pytest.mark.parametrize("name", MODELS)
def test_the_plain_reader_gives_what_was_put_in(name):
    reader = PlainReader(GOLDEN / name)
    for section, expected in (("model", MODELS[name]), ("optimizer", OPTIMIZERS.get(name, ALONE))):
        assert set(reader.names(section)) == set(expected)
        for key, (dtype, shape) in expected.items():
            tensor = reader.tensor(section, key)
            assert tensor.shape == shape
            assert tensor.tobytes() == data_of(SAME.get(key, key), dtype, shape), key
    if name == "sharded":
        for rank in range(4):
            for key, kind in RANK.items():
                assert reader.tensor(f"rank {rank}", key).tobytes() == data_of(f"{key} {rank}", *kind)


@pytest.mark.parametrize("name", MODELS)
def test_they_are_sound(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = checkpoint.verify(GOLDEN / name)
    assert report.ok, report
    assert report.digests == (name != "without-digests")
    assert report.manifest_digest == (name != "other-writer")


def test_a_manifest_without_a_digest_of_its_own_says_so():
    with pytest.warns(UserWarning, match="no digest of its own .*a program of a few lines"):
        checkpoint.read(GOLDEN / "other-writer")


def test_every_value_of_the_trainer_state(codecs):
    stored = opened("sharded")
    found = stored.trainer_state()
    expected = trainer_state(tensor, lambda name: name)
    assert found.keys() == expected.keys()
    assert found["stored"].name == expected["stored"]
    assert raw(found["stored"].full()) == data_of("state/ema/w", *OPTIMIZER["state/ema/w"])
    assert found["tensor"][0] is found["tensor"][1]
    assert [raw(t) for t in found["tensor"]] == [raw(t) for t in expected["tensor"]]
    assert vars(found["custom"]) == vars(expected["custom"])
    assert found["ndarray"].dtype == expected["ndarray"].dtype
    assert (found["ndarray"] == expected["ndarray"]).all()
    for key in expected.keys() - {"stored", "tensor", "custom", "ndarray"}:
        assert type(found[key]) is type(expected[key]), key
        assert found[key] == expected[key], key
        assert repr(found[key]) == repr(expected[key]), key
    assert opened("without-digests").trainer_state() == SMALL_STATE
    assert opened("other-writer").trainer_state() is None
    for rank in range(4):
        assert raw(stored.rank_state(rank)["generator"]) == data_of(f"generator {rank}", *RANK["generator"])
    assert stored.rank_state(7) == {}


def test_the_plain_reader_knows_every_tag():
    found = PlainReader(GOLDEN / "sharded").state()

    def array(name, dtype, shape):
        kind = {"I16": "<i2", "F64": "<f8"}[dtype]
        return np.frombuffer(data_of(name, dtype, shape), kind).reshape(shape)

    expected = trainer_state(array, lambda name: name)
    assert found.keys() == expected.keys()
    plain = ("plain", "int", "float", "complex", "tuple", "set", "frozenset", "dict", "counter", "defaultdict")
    for key in plain:
        assert found[key] == expected[key]
    for got, wanted in zip(found["tensor"], expected["tensor"], strict=True):
        assert got.tobytes() == wanted.tobytes()
    assert found["stored"].tobytes() == data_of("state/ema/w", *OPTIMIZER["state/ema/w"])
    assert base64.b64decode(found["bytes"]["v"]) == expected["bytes"]
    assert (found["enum"], found["custom"]["v"]) == (3, [3, 4])
    array = np.frombuffer(base64.b64decode(found["ndarray"]["v"]), found["ndarray"]["dtype"])
    assert array.reshape(found["ndarray"]["shape"]).tolist() == expected["ndarray"].tolist()
    assert found["datetime"]["v"] == "2024-05-06T07:08:09.000010+00:00"
    assert found["timedelta"]["v"] == [-1, 0, 3]


def test_the_plain_reader_finds_damage(tmp_path):
    """So that its agreement means something."""
    shutil.copytree(GOLDEN / "sharded", tmp_path, dirs_exist_ok=True)
    (damaged,) = (tmp_path / "model").glob("rank-00001-*")
    flip(damaged)
    with pytest.raises(Damaged, match="differs from its digests"):
        [PlainReader(tmp_path).tensor("model", name) for name in SHARDED]
