"""Norms of single gradients, of which the norm of all is made."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_shard.parallel.clip import _own_norms
from lightning_shard.parallel.fsdp.shard import average_gradients
from lightning_shard.plugin.steps.checks.stage_parameters import StageParameters
from lightning_shard.plugin.steps.gradient_norms import WholeNorms


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_those_of_the_elements_and_of_16_bit_ones_not_rounded(norm_type: float) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16]
    gradients = [torch.randn(1000, generator=generator).to(dtype) for dtype in kinds]
    exact = sorted(float(torch.linalg.vector_norm(g.to(torch.complex128), norm_type)) for g in gradients)
    mesh: Any = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=("data_parallel",))
    norms = _own_norms(gradients, mesh, torch.device("cpu"), norm_type)
    assert sorted(norms.tolist()) == pytest.approx(exact, rel=1e-5)


def test_the_norm_of_a_large_gradient_loses_nothing_to_its_size() -> None:
    """Added one after another in 32 bits, the squares of so many elements come to 1e-4 less and more."""
    gradient = torch.full((1 << 11, 1 << 12), 1e-3)
    mesh: Any = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=("data_parallel",))
    [norm] = _own_norms([gradient], mesh, torch.device("cpu"), 2.0).tolist()
    assert norm == pytest.approx(float(gradient[0, 0]) * 2**11.5, rel=1e-5)


def test_a_total_norm_has_one_dtype_on_all_stages() -> None:
    """A scale rounded to each stage's own would let the copies of tied weights part."""
    module: Any = nn.Linear(3, 3)
    mesh: Any = SimpleNamespace(get_coordinate=lambda: [0], mesh_dim_names=("data_parallel",))
    groups: Any = SimpleNamespace(gather_over_stages=lambda own: [own, False if own is False else torch.float64])
    norms = WholeNorms(module, mesh, groups, torch.device("cpu"), StageParameters({}))
    third = torch.tensor([1 / 3], dtype=torch.float32)
    assert norms.total([third]).dtype == torch.float64


def test_averaged_scalar_gradients_keep_their_bits_and_imaginary_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, of which the other has three times this one's gradients."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(4))
    values = [torch.tensor(1 / 3), torch.tensor(1 / 3, dtype=torch.float64), torch.tensor(1 / 3 + 2j)]
    parameters = [nn.Parameter(torch.zeros_like(value)) for value in [*values, values[0]]]
    for parameter, value in zip(parameters, values):
        parameter.grad = value.clone()
    group: Any = None
    average_gradients(parameters, group)
    for parameter, value in zip(parameters, values):
        assert torch.equal(parameter.grad, value * 2)  # type: ignore[arg-type]
    assert parameters[-1].grad is None
