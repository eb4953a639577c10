"""What ``docs/models.md`` says of architectures is still so: a sample here, all of them with ``-m long``.

Small configurations have layers of all the kinds that whole ones have.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers as hf

from lightning_shard.testing import preload, run_ranks
from tests.training.models import overrides, page, survey, transformers_models
from tests.training.models.layers import few_layers
from tests.training.models.transformers_models import architectures, find_small, read

preload(
    "tests.training.models.networks", "tests.training.models.transformers_models", "lightning_shard.testing.recorder"
)

RESULTS: dict[str, Any] = json.loads(survey.RESULTS.read_text())
SAMPLE = "diffusion transformer"


def test_nothing_is_wrong_or_a_raw_exception() -> None:
    bad = {name for name, row in RESULTS["rows"].items() if {"different", "crashed"} & {*_kinds(row).values()}}
    assert not bad


def test_the_page_is_that_of_the_results() -> None:
    assert page.page(RESULTS) == survey.PAGE.read_text(), "write it: python -m tests.training.models.survey --page"


def test_a_sample_is_on_two_stages_as_the_page_says() -> None:
    row = survey.all_of_it()[SAMPLE](layouts=["pp2"])
    assert _kinds(row)["pp2"] == _kinds(RESULTS["rows"][SAMPLE])["pp2"], row


@pytest.mark.long
def test_blocks_that_share_keys_and_values_by_a_dict_of_their_own_train_on_data_ranks() -> None:
    row = survey.all_of_it()["Gemma3nForCausalLM"](layouts=["dp2", "pp2 x dp2", "tp2"])
    assert _kinds(row) == {"dp2": "alike", "pp2 x dp2": "alike", "tp2": "refused"}, row
    assert row["layouts"]["tp2"]["error"] == "PlanError"  # its sparse layers take statistics over what the plan splits


def test_settings_are_of_known_architectures() -> None:
    known = {name for what in transformers_models.architectures().values() for name in what}
    assert known >= overrides.NAMES


@pytest.mark.parametrize("name", ["ResNetForImageClassification", "Qwen2VLForConditionalGeneration"])
def test_an_architecture_is_built_with_settings_and_inputs_of_its_own(name: str) -> None:
    what = transformers_models.architectures()[name]
    [found] = run_ranks(transformers_models.find_small, 1, *what, init=False)
    assert found.parameters < transformers_models.MOST_PARAMETERS
    assert "pixel_values" in found.inputs


@pytest.mark.long
@pytest.mark.parametrize("name", RESULTS["rows"])
def test_an_architecture_is_as_the_page_says(name: str) -> None:
    row = survey.all_of_it()[name]()
    assert _kinds(row) == _kinds(RESULTS["rows"][name]), row


def _kinds(row: dict[str, Any]) -> dict[str, str]:
    if "layouts" not in row:
        return {key: "" for key in ("not built", "random") if key in row}
    return {layout: result["result"] for layout, result in row["layouts"].items()}


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
