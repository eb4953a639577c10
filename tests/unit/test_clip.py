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
