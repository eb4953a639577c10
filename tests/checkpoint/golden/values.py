"""What the golden checkpoints hold, computed without the package that reads them."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import math
import pathlib
import types
import uuid
from typing import Any

import numpy as np

WIDTHS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32", "C32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0", "I8", "U8", "BOOL"), 1),
    "C128": 16,
}
SHARDED = {"w": ("F32", (7, 5)), "v": ("BF16", (9,)), "rows": ("F64", (5, 3)), "few": ("I32", (1, 2))}
PLAIN = {f"plain.{dtype}": (dtype, (3, 2)) for dtype in WIDTHS} | {
    "scalar": ("F32", ()),
    "empty": ("F16", (0, 3)),
    'ünï\n"quoted"': ("U8", (3,)),
}
OPTIMIZER = {"0/w/exp_avg": ("F32", (7, 5)), "state/ema/w": ("F32", (7, 5))}
RANK = {"generator": ("U8", (16,))}


def data_of(name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    """A tensor's bytes: a pattern that differs from name to name, within what the dtype allows."""
    count = math.prod(shape) * WIDTHS[dtype]
    pattern = (np.arange(count, dtype=np.int64) * 37 + sum(name.encode()) * 11) % 119
    return (pattern % 2 if dtype == "BOOL" else pattern).astype(np.uint8).tobytes()


class Color(enum.Enum):
    RED = 3


class Point:
    def __init__(self, x: int, y: int) -> None:
        self.x, self.y = x, y


def trainer_state(tensor: Any, stored: Any) -> Any:
    """A value of every tag. ``tensor`` makes one of a name, dtype and shape, ``stored`` a reference."""
    shared = tensor("shared", "I16", (4,))
    return {
        "plain": [None, True, False, 0, -1, 2**63 - 1, 1.5, -0.0, "a\u2028\ud800ü", [[]], {"v": 1}],
        "int": -(2**80),
        "float": [math.inf, -math.inf],
        "complex": complex(1.5, -math.inf),
        "tuple": (1, (2,)),
        "set": {1, 2},
        "frozenset": frozenset({"a"}),
        "dict": {1: "a", "$": 2},
        "ordered_dict": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter("aab"),
        "defaultdict": collections.defaultdict(list, {"a": [1]}),
        "deque": collections.deque([1, 2], maxlen=3),
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"x"),
        "range": range(5, 0, -2),
        "datetime": datetime.datetime(2024, 5, 6, 7, 8, 9, 10, tzinfo=datetime.UTC),
        "date": datetime.date(2024, 5, 6),
        "time": datetime.time(1, 2, 3),
        "timedelta": datetime.timedelta(days=-1, microseconds=3),
        "timezone": datetime.timezone(datetime.timedelta(hours=2), "X"),
        "decimal": decimal.Decimal("1.10"),
        "uuid": uuid.UUID(int=5),
        "path": pathlib.Path("/a/b"),
        "pure_path": pathlib.PurePath("c"),
        "namespace": argparse.Namespace(a=1),
        "simple_namespace": types.SimpleNamespace(b=(1,)),
        "numpy": np.float32(1.5),
        "ndarray": np.arange(6, dtype="<i2").reshape(2, 3),
        "tensor": [shared, shared, tensor("other", "F64", ())],
        "stored": stored("state/ema/w"),
        "enum": Color.RED,
        "custom": Point(3, 4),
    }


# What another writer, a program of a few lines from docs/format.md, put into its checkpoint: boxes that are no grid,
# blocks of 64 bytes, files and fields of its own.
OTHER = {"pinwheel": ("I32", (9, 9)), "one": ("F32", (20,))}
