"""Microbatches with and without padding run the same operations on stages, whose values are named by these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.pipeline.dataflow.masks import masks_made_as_given
from tests.training.pipelines import assert_alike

transformers: Any = pytest.importorskip("transformers")


def t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    tokens = {"vocab_size": 20, "pad_token_id": 0, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**tokens, **sizes, dropout_rate=0.0))


def generated(root: nn.Module, tokens: Tensor) -> Tensor:
    return root.net(input_ids=tokens, attention_mask=(tokens > 0).long(), labels=tokens[:, :3].contiguous()).loss


@pytest.mark.parametrize(
    ("stages", "padded"),
    [(2, (True, False, False, True)), pytest.param(4, (False, False, True, True), marks=pytest.mark.long)],
)
def test_padding_in_some_microbatches_is_as_in_one_process(stages: int, padded: tuple[bool, ...]) -> None:
    torch.manual_seed(1)
    parts = [torch.randint(3, 20, (2, 6)) for _ in padded]
    for part, is_padded in zip(parts, padded):
        part[0, 4:] *= not is_padded
    assert_alike(t5, generated, parts, stages)


def test_outside_of_steps_on_stages_masks_are_skipped_as_usual() -> None:
    masks = transformers.masking_utils
    whole = torch.ones(1, 4, dtype=torch.bool)
    for name, sizes in {"_ignore_bidirectional_mask_sdpa": (4,), "_ignore_causal_mask_sdpa": (4, 4, 0, 0)}.items():
        with masks_made_as_given(causal_too=True):
            assert not getattr(masks, name)(whole, *sizes)
            assert getattr(masks, name)(None, *sizes)
        assert getattr(masks, name)(whole, *sizes)
    with masks_made_as_given(causal_too=False):
        assert masks._ignore_causal_mask_sdpa(whole, 4, 4, 0, 0)
