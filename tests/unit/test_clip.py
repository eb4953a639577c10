"""Norms of single gradients, of which the norm of all is made."""

import math

import pytest
import torch

from lightning_shard.parallel.clip import _norms


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_norms_are_those_of_the_elements_and_of_16_bit_ones_not_rounded(norm_type: float) -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.float16]
    gradients = [torch.randn(1000, generator=generator).to(dtype) for dtype in kinds]
    exact = sorted(float(torch.linalg.vector_norm(g.to(torch.complex128), norm_type)) for g in gradients)
    assert sorted(map(float, _norms(gradients, norm_type))) == pytest.approx(exact, rel=1e-5)
