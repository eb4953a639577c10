"""Tests that need a CUDA device, and are skipped where there is none: ``pytest tests/gpu``."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _device() -> None:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
