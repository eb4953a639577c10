"""Padded sequences on stages, as alone: ``nn.TransformerEncoder`` with torch's defaults, and transformers' masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.masks import masks_made_as_given, use_dense_tensors
from tests.training.pipelines import assert_alike, assert_evaluates_alike, evaluated_on_stages


class Padded(nn.Module):
    """Uses what the encoder returns at padded positions too."""

    kind: type[nn.TransformerEncoder] = nn.TransformerEncoder

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.embed, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        nn.init.normal_(self.norm.bias)
        self.encoder = self.kind(layer, 4, norm=self.norm, **options)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0)


class OwnForward(nn.TransformerEncoder):
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(*args, **kwargs)


class OfOwnClass(Padded):
    kind = OwnForward


def step(root: nn.Module, tokens: Tensor) -> Tensor:
    return root(tokens)


def tokens(*lengths: int) -> Tensor:
    torch.manual_seed(1)
    drawn = torch.randint(1, 10, (len(lengths), 6))
    return drawn * (torch.arange(6) < torch.tensor(lengths)[:, None])


@pytest.mark.parametrize("options", [{}, {"mask_check": False}, {"enable_nested_tensor": False}])
def test_evaluates_as_one_process_also_at_padded_positions(options: dict[str, Any]) -> None:
    batches = [tokens(6, 3), tokens(6, 6), tokens(2, 4), tokens(3, 6).flip(1)]  # the last one isn't aligned
    if "mask_check" in options:
        del batches[-1]

    assert_evaluates_alike(partial(Padded, **options), step, batches, 4)


def test_a_frozen_encoder_gives_zeros_in_training_steps_too() -> None:
    network = Padded().eval().requires_grad_(False)
    expected = network(tokens(6, 3))
    use_dense_tensors(network)
    torch.testing.assert_close(network(tokens(6, 3)), expected)
    network.requires_grad_(True)
    assert not torch.allclose(network(tokens(6, 3)), expected)  # nor does torch use nested tensors then


def test_a_subclass_with_a_forward_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(StepError, match=r"layers\.1 returns a nested tensor.*enable_nested_tensor=False"):
        evaluated_on_stages(OfOwnClass, step, [tokens(6, 3)] * 2, 2)  # traced, the first has none


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
