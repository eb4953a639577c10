"""Indexing what is stored gives what torch gives for the tensor itself, and reads about what it picks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from lightning_shard import checkpoint
from lightning_shard.checkpoint.boxes import Box
from lightning_shard.errors import CorruptCheckpointError

MASK = torch.tensor([True, False, True, False, True, False])
INDICES = [
    [1, 4],
    [4, 1, 1, -6],
    [],
    torch.tensor([[0, 1], [2, 3]]),
    range(1, 6, 2),
    np.array([5, 0], dtype=np.int16),
    torch.tensor([2, -1]),
    torch.tensor(3),
    np.int64(-2),
    MASK,
    MASK.tolist(),
    ~MASK.numpy(),
    torch.zeros(6, dtype=torch.bool),
    torch.ones(6, 5, dtype=torch.bool).tril(),
    torch.ones(6, 5, 4, dtype=torch.bool).triu(),
    None,
    (),
    ...,
    (None, ..., None, 1),
    (slice(None, None, 3), None, [1, 2]),
    (0, slice(None), [1, 2]),
    (slice(1, 4), [0, 3], slice(2, None)),
    ([0, 5], slice(None, None, 2), [3, 0]),
    (torch.tensor([[0], [5]]), [1, 2, 3]),
    (..., torch.tensor([[0, 3], [1, 2]])),
    (slice(2, 2), [0]),
    ([], 4),
    (torch.ones(6, 5, dtype=torch.bool).triu(2), 2),
    (slice(None), torch.ones(5, 4, dtype=torch.bool).triu(2)),
]
DTYPES = [torch.int32, torch.float8_e4m3fn, torch.uint16, torch.bool, torch.bfloat16, torch.complex128, torch.complex64]


def values(dtype: torch.dtype) -> Tensor:
    return torch.arange(6 * 5 * 4).view(6, 5, 4).to(dtype)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> checkpoint.Checkpoint:
    path = tmp_path_factory.mktemp("stored") / "c"
    checkpoint.save({**{str(d): values(d) for d in DTYPES}, "scalar": torch.tensor(7)}, path, fsync=False)
    return checkpoint.read(path)


@pytest.mark.parametrize("index", INDICES, ids=lambda index: repr(index).replace("\n", "")[:50])
def test_the_result_is_torchs(stored: checkpoint.Checkpoint, index: Any) -> None:
    expected = values(torch.int32)[index]
    found = stored["torch.int32"][index]
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_every_dtype_also_those_that_torch_does_not_index(stored: checkpoint.Checkpoint, dtype: torch.dtype) -> None:
    found = stored[str(dtype)][[5, 0], ::2]
    expected = values(torch.int32)[[5, 0]][:, ::2].to(dtype)
    assert found.dtype == dtype
    assert found.tolist() == expected.tolist() if dtype != torch.float8_e4m3fn else True
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(*[st.slices(size) for size in (6, 5, 4)]))
def test_slices_are_torchs(stored: checkpoint.Checkpoint, index: tuple[slice, ...]) -> None:
    if any((item.step or 1) < 0 for item in index):
        with pytest.raises(IndexError, match="flip what you read"):
            stored["torch.int32"][index]
    else:
        assert torch.equal(stored["torch.int32"][index], values(torch.int32)[index])


def test_a_scalar_has_no_dims(stored: checkpoint.Checkpoint) -> None:
    assert stored["scalar"][()] == stored["scalar"][...] == 7
    assert stored["scalar"][None].shape == (1,)
    with pytest.raises(IndexError, match="too many"):
        stored["scalar"][0]


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (6, "index 6 is out of bounds for a dim of size 6"),
        ([0, -7], "index -7 is out of bounds for a dim of size 6"),
        ((0, 0, 0, 0), "too many indices"),
        ((..., 0, ...), "too many indices"),
        (torch.ones(5, dtype=torch.bool), r"mask of shape \(5,\)"),
        *[(index, "can't be indexed with") for index in ([0.5], 1.5, True, torch.tensor(True), "name", [[0, 1]])],
        (torch.tensor([1, 0, 1], dtype=torch.uint8), "signed integers or bools"),
        *[(index, "can't be indexed with") for index in ([slice(1), 2], [0, None], [torch.tensor(1)], [range(2)])],
    ],
    ids=str,
)
def test_what_numpy_and_torch_do_not_agree_on_is_refused(stored: checkpoint.Checkpoint, index: Any, says: str) -> None:
    with pytest.raises(IndexError, match=says):
        stored["torch.int32"][index]


def test_a_box_that_reaches_beyond_a_tensor_is_refused(tmp_path: Path) -> None:
    checkpoint.save({"a": torch.arange(4.0)}, tmp_path / "one")
    stored = checkpoint.read(tmp_path / "one")["a"]
    assert stored.box(Box((2,), (2,))).tolist() == [2, 3]
    with pytest.raises(CorruptCheckpointError, match="don't make up"):
        stored.box(Box((2,), (4,)))
