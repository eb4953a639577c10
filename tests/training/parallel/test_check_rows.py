"""Experts whose rows depend on each other are refused, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import PlanError
from lightning_shard.parallel.experts.check_rows import RowCheck

WEIGHT = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


def capacity(most: Callable[[int], int]) -> Callable[[Tensor], Tensor]:
    def compute(rows: Tensor) -> Tensor:
        kept = torch.arange(len(rows)) < most(len(rows))
        return (rows @ WEIGHT).tanh() * kept[:, None]

    return compute


DEPEND = {
    "a fixed capacity": capacity(lambda rows: 20),
    "a share as capacity": capacity(lambda rows: int(1.25 * rows / 2)),
    "statistics": lambda rows: rows @ WEIGHT - rows.mean(0),
    "the number of rows": lambda rows: rows @ WEIGHT / len(rows),
    "order": lambda rows: (rows @ WEIGHT).cumsum(0),
}


@pytest.mark.parametrize("how", DEPEND)
@pytest.mark.parametrize("rows", [3, 100])
def test_rows_that_depend_on_others(how: str, rows: int) -> None:
    with pytest.raises(PlanError, match=r"expert of moe\.experts computes something else .*expert_parallel_size=1"):
        RowCheck("moe.experts")(DEPEND[how], nn.Identity(), torch.randn(rows, 6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_by_themselves(dtype: torch.dtype) -> None:
    expert = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.SiLU(), nn.Linear(50, 6)).to(dtype)
    rows = torch.randn(100, 6, dtype=dtype)
    before = torch.get_rng_state()
    RowCheck("moe.experts")(expert, expert, rows)
    assert torch.equal(before, torch.get_rng_state())
    assert expert.training
    assert expert[1].training


def test_it_waits_for_rows_and_numbers_that_show_something() -> None:
    calls: list[int] = []
    scale = torch.zeros(())

    def compute(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return (rows @ WEIGHT) * scale

    check = RowCheck("moe.experts")
    check(compute, nn.Identity(), torch.zeros(0, 6))
    assert not calls
    check(compute, nn.Identity(), torch.randn(5, 6))
    assert calls == [5]  # all zero
    scale.fill_(1.0)
    check(compute, nn.Identity(), torch.randn(100, 6))
    check(compute, nn.Identity(), torch.randn(100, 6))
    assert calls == [5, 50, 400, 1]  # once
