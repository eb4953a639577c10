"""Tensor-parallel plans that take more than linear layers: packed experts, tied weights, LoRA."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mixtures import assert_alike
from tests.parity import layout


def test_packed_experts_tied_weights_and_lora(tmp_path: Path) -> None:
    assert_alike(layout(tensor=2), ["qwen3", "tied llama", "llama with LoRA"], tmp_path)


def test_tied_weights_over_stages_and_tensor_ranks(tmp_path: Path) -> None:
    over_two_batches = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    assert_alike(layout(pipeline=2, tensor=2), ["tied llama"], tmp_path, trainer=over_two_batches)


@pytest.mark.long
def test_packed_experts_and_shared_rotary_keys() -> None:
    assert_alike(layout(tensor=2), ["mixtral", "deepseek"])


@pytest.mark.long
@pytest.mark.parametrize("sizes", [layout(data=2, tensor=2), layout(pipeline=2, tensor=2)], ids=["dp2×tp2", "pp2×tp2"])
def test_packed_experts_beside_other_axes(sizes: dict[str, int], tmp_path: Path) -> None:
    assert_alike(sizes, ["qwen3", "llama with LoRA"], tmp_path)
