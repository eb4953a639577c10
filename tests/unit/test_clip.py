"""Norms of single gradients, of which the norm of all is made."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_shard.parallel.clip import _own_norms


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
