"""Values of all kinds through typed JSON and back; what can't be held is refused by its key; nothing is imported."""

import argparse
import collections
import datetime
import decimal
import enum
import json
import math
import pathlib
import types
import uuid
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import OmegaConf

from lightning_shard.checkpoint import register_codec
from lightning_shard.checkpoint.format.typed_json import Reference, by_name, by_type, decode, encode, parse
from lightning_shard.errors import CheckpointError, UnsupportedStateError


@pytest.fixture
def no_codecs_stay():
    with mock.patch.dict(by_name), mock.patch.dict(by_type):
        yield


def there_and_back(value):
    tree, tensors = encode(value)
    data = json.dumps(tree, allow_nan=False).encode()
    return decode(parse(data, "state"), tensors.__getitem__)


class Color(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    ALL = 3


class Level(enum.IntEnum):
    LOW = 2


@dataclass
class Point:
    x: int
    y: torch.Tensor


utc = datetime.UTC
VALUES = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**63, 1.5, -0.0, math.inf, -math.inf, "", "a\u2028\ud800", [], [[]],
    (), (1, (2,)), {}, {"a": {"b": 1}}, {1: "a", "1": "b"}, {None: 1, (1, 2): 2, 2.5: 3, b"x": 4, True: 5},
    {"$": 1}, {"$": "tuple", "v": []}, {"a": {"$": {"$": "int", "v": "x"}}}, {"v": 1},
    {1, 2, "a"}, frozenset({(1, 2)}), b"\0\xff", bytearray(b"x"), 1 + 2j, complex(math.inf, -0.0),
    range(3), range(5, 0, -2), collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter("aab"),
    collections.deque([1, 2], maxlen=3),
    collections.defaultdict(list, {"a": [1]}), collections.defaultdict(None, {1: 2}),
    datetime.datetime(2024, 5, 6, 7, 8, 9, 10), datetime.datetime(2024, 5, 6, tzinfo=utc), datetime.date(2024, 5, 6),
    datetime.time(1, 2, 3), datetime.timedelta(days=-1, microseconds=3), utc,
    datetime.timezone(datetime.timedelta(hours=2), "X"),
    decimal.Decimal("1.10"), uuid.UUID(int=5), pathlib.Path("/a/b"), pathlib.PurePath("c"),
    argparse.Namespace(a=1, b=2), types.SimpleNamespace(b=(1,)),
    torch.float32, torch.bfloat16, torch.quint8, torch.device("cuda", 1), torch.Size([1, 2]),
    np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2024-05-06"), np.complex64(1j),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_there_and_back(value):
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value) or isinstance(value, set | frozenset)
    if isinstance(value, collections.deque):
        assert back.maxlen == value.maxlen
    if isinstance(value, collections.defaultdict):
        assert back.default_factory is value.default_factory


def test_not_a_number():
    assert math.isnan(there_and_back([float("nan")])[0])
    assert np.isnan(there_and_back(np.float64("nan")))


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers() | st.just("$"), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=40)
@given(json_like)
def test_any_tree_there_and_back(tree):
    back = there_and_back(tree)
    assert back == tree
    assert repr(back) == repr(tree)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6).reshape(2, 3).T,
        np.zeros((0, 2), np.float16),
        np.array(3.5),
        np.array(["ab", "c"]),
        np.array([1], ">i4"),
    ],
    ids=str,
)
def test_arrays(array):
    back = there_and_back({"a": array})["a"]
    assert back.shape == array.shape
    assert back.dtype == array.dtype.newbyteorder("=")
    assert (back == array).all()
    back[...] = back  # writable, as the original


def test_tensors_are_referred_to_by_their_place_and_shared_ones_once():
    weight = torch.randn(3)
    state = {"callbacks": [{"ema": weight}, weight], "a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}
    tree, tensors = encode(state)
    assert list(tensors) == ["callbacks.0.ema", "a.b", "a.b#2"]
    back = decode(tree, tensors.__getitem__)
    assert back["callbacks"][1] is back["callbacks"][0]["ema"]
    assert back["a"]["b"].item() == 0


@pytest.mark.usefixtures("no_codecs_stay")
def test_tensors_that_a_codec_makes_are_not_taken_for_each_other():
    register_codec(Point, lambda p: torch.full((3,), float(p.x)), lambda v: Point(int(v[0]), v))
    back = there_and_back([Point(i, None) for i in range(50)])
    assert [point.x for point in back] == list(range(50))


def test_a_reference_stands_for_a_sharded_tensor():
    tree, tensors = encode({"ema": [Reference("state/ema/0")]})
    assert not tensors
    assert tree == {"ema": [{"$": "stored", "v": "state/ema/0"}]}
    assert decode(tree, tensors.__getitem__) == {"ema": [Reference("state/ema/0")]}
    assert decode(tree, tensors.__getitem__, {"state/ema/0": 7}.__getitem__) == {"ema": [7]}


@pytest.mark.parametrize("text", ["${nothing}", "${missing}", "${oc.env:NO_SUCH_VARIABLE}"])
def test_a_config_that_cannot_be_resolved_is_refused_by_its_key(text):
    config = OmegaConf.create({"a": text, "missing": "???"})
    with pytest.raises(UnsupportedStateError, match=r"'hparams\.config' is a config that can't be resolved"):
        encode({"hparams": {"config": config}})


def test_configs_become_plain_mappings():
    config = OmegaConf.create({"a": {"b": [1, "${c}"]}, "c": 5, "missing": "???"})
    assert there_and_back({"hparams": config}) == {"hparams": {"a": {"b": [1, 5]}, "c": 5, "missing": "???"}}
    back = there_and_back(AttributeDict(lr=0.1, nested=AttributeDict(x=1)))
    assert type(back) is dict
    assert back == {"lr": 0.1, "nested": {"x": 1}}


def test_enums_come_back_as_themselves_where_the_program_has_their_classes():
    """As values, they would be equal to no member: a hyperparameter that chooses a layer would choose another."""
    for value in (Color.RED, Level.LOW, Access.READ, Access.READ | Access.WRITE):
        assert there_and_back(value) is value
    tree, _ = encode([Color.RED, Color.RED])
    register_codec(Color)
    assert there_and_back(Color.RED) is Color.RED
    for item in tree:
        item["type"] = "of.another.program.Color"
    with pytest.warns(UserWarning, match=r"1 is given in place of the member 'RED'.*this program hasn't") as told:
        assert decode(tree, {}.__getitem__) == [1, 1]
    assert len(told) == 1


@pytest.mark.usefixtures("no_codecs_stay")
def test_a_member_that_the_class_has_lost_is_named():
    register_codec(Color)
    tree, _ = encode(Color.RED)
    with pytest.raises(CheckpointError, match=r"'GREEN' \(7\) of '.*Color', which this program's class hasn't"):
        decode({**tree, "name": "GREEN", "v": 7}, {}.__getitem__)
    assert decode({**tree, "name": "CRIMSON"}, {}.__getitem__) is Color.RED  # renamed since


@pytest.mark.usefixtures("no_codecs_stay")
def test_registered_types():
    with pytest.raises(UnsupportedStateError, match=r"'a\[0\]' is a .*Point.*register_codec\(Point"):
        encode({"a": [Point(1, torch.ones(2))]})
    register_codec(Point, lambda p: (p.x, p.y), lambda v: Point(*v), name="point")
    back = there_and_back({"p": Point(1, torch.ones(2))})["p"]
    assert type(back) is Point
    assert back.x == 1
    assert torch.equal(back.y, torch.ones(2))
    with pytest.raises(ValueError, match="taken"):
        register_codec(Color, name="point")
    tree, tensors = encode(Point(2, torch.ones(1)))
    by_name.pop("point")
    with pytest.raises(CheckpointError, match=r"'point'.*register_codec"):
        decode(tree, tensors.__getitem__)
    lenient = decode(tree, tensors.__getitem__, lenient=True)
    assert lenient["type"] == "point"


class Dict(dict):
    pass


Pair = collections.namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "value",
    [
        print, lambda: 0, object(), Color, Dict(), Pair(1, 2), np.array([object()]), iter([]), 1 .__add__,
        torch.nn.Linear(1, 1),
        collections.defaultdict(lambda: 0), torch.Generator(), np.random.default_rng(0),
        np.zeros(1, [("a", int)]), slice(1),
    ],
    ids=lambda value: f"{type(value).__name__}",
)  # fmt: skip
def test_what_cannot_be_held_is_refused_by_its_key(value):
    with pytest.raises(UnsupportedStateError, match=r"'callbacks\.x\[1\]' is a"):
        encode({"callbacks": {"x": [0, value]}})


def test_cycles_and_depth_are_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(UnsupportedStateError, match=r"'a\[0\]' contains itself"):
        encode({"a": loop})
    deep: list = []
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(UnsupportedStateError, match="nested more than"):
        encode(deep)
