"""A small configuration has layers of all the kinds that the whole one has."""

from __future__ import annotations

from typing import Any

import pytest
import transformers as hf

from lightning_shard.testing import run_ranks
from tests.training.models.layers import few_layers
from tests.training.models.transformers_models import architectures, find_small, read


def test_both_kinds_of_attention_are_in_both_halves() -> None:
    for config in (hf.Gemma3TextConfig(), hf.Llama4TextConfig(), hf.Qwen3NextConfig()):
        kinds = few_layers(config)["layer_types"]
        assert kinds[:2] == kinds[2:]
        assert len({*kinds}) == 2


def test_layers_that_use_what_others_have_computed_are_the_second_half() -> None:
    few = few_layers(hf.Gemma3nTextConfig())
    assert few["layer_types"] == ["sliding_attention", "full_attention"] * 3
    assert few["num_kv_shared_layers"] == 2
    assert few["activation_sparsity_pattern"] == [0.95, 0.95, 0, 0, 0, 0]


def test_numbers_of_layers_and_counts_are_those_of_the_few() -> None:
    assert few_layers(hf.DeepseekV3Config()) == {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    few: dict[str, Any] = few_layers(hf.MllamaConfig().text_config)
    assert (few["num_hidden_layers"], few["cross_attention_layers"]) == (4, [1, 3])


def test_nothing_is_set_where_all_layers_are_of_one_kind() -> None:
    assert few_layers(hf.LlamaConfig()) == few_layers(hf.BertConfig()) == few_layers(hf.MixtralConfig()) == {}


@pytest.mark.parametrize("name", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
def test_keys_and_values_are_shared_over_the_middle(name: str) -> None:
    [found] = run_ranks(find_small, 1, *architectures()[name], init=False)
    config = read(found)
    modes = config.kv_sharing_modes
    middle = len(modes) // 2
    assert "store" in modes[:middle]
    assert {*modes[middle + 1 :]} == {"reuse"}
    assert config.sliding_window < 12
