"""What tensor-parallel plans mean for packed experts, tied weights and adapters, and what they refuse."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

from lightning_shard.errors import PlanError
from lightning_shard.parallel.plans import declared_plan
from lightning_shard.parallel.tensor.plan import resolve_plan
from lightning_shard.parallel.tensor.styles import BY_HEADS, STYLES, SharedOutput, SummedGradients, SummedOutput
from tests.training.mixtures import NETWORKS, Mixtures, adapted, transformers_model


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        return nn.ModuleDict({"net": NETWORKS[kind]()})


def test_a_declared_plan_of_experts_is_taken_as_far_as_it_goes() -> None:
    styles = resolve_plan(on_meta("qwen3"), None, 2)
    assert isinstance(styles["net.model.layers.0.mlp.experts"], SummedOutput)
    assert "net.model.layers.0.mlp" not in styles  # the plan has dense layers too, and this model none
    dealt = [f"net.model.layers.{i}.mlp.experts" for i in range(4)]
    beside = resolve_plan(on_meta("qwen3"), None, 2, without=dealt)
    assert styles.keys() - beside.keys() == set(dealt)


def test_a_declared_plan_needs_whole_heads_on_each_rank() -> None:
    with torch.device("meta"):
        model = transformers.GemmaForCausalLM(
            transformers.GemmaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=1,
                head_dim=8,
            )
        )
    told = r"k_proj makes 1 heads of 8 features, which tensor_parallel_size \(2\) must divide \(num_key_value_heads"
    with pytest.raises(PlanError, match=told):
        resolve_plan(nn.ModuleDict({"net": model}), None, 2)


def test_shared_rotary_keys_of_deepseek() -> None:
    styles = resolve_plan(on_meta("deepseek"), None, 2)
    assert isinstance(styles["net.model.layers.1.self_attn.kv_a_proj_with_mqa"], SharedOutput)


def test_an_embedding_is_split_as_the_head_that_shares_its_weight() -> None:
    styles = resolve_plan(on_meta("tied llama"), None, 2)
    assert styles["net.model.embed_tokens"] is STYLES["embedding_rowwise"]
    assert styles["net.lm_head"] is STYLES["colwise_gather_output"]


def of_transformers(name: str, **sizes: Any) -> nn.Module:
    import transformers

    kind = getattr(transformers, name)
    few = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": 8}
    with torch.device("meta"):
        return nn.ModuleDict({"net": kind(kind.config_class(**few, **sizes))})


def test_what_plans_of_transformers_forget_is_completed() -> None:
    apertus = resolve_plan(of_transformers("ApertusForCausalLM"), None, 2)
    assert isinstance(apertus["net.model.layers.0.mlp.act_fn"], SummedGradients)
    phi = resolve_plan(of_transformers("PhiForCausalLM", qk_layernorm=True), None, 2)
    assert isinstance(phi["net.model.layers.0.self_attn.q_layernorm"], SummedGradients)
    cohere = resolve_plan(of_transformers("CohereForCausalLM", use_qk_norm=True), None, 2)
    assert cohere["net.model.layers.0.self_attn.k_norm"] is BY_HEADS
    gemma = resolve_plan(of_transformers("Gemma2ForCausalLM"), None, 2)
    assert gemma["net.model.embed_tokens"] is STYLES["embedding_rowwise"]  # of a class of its own, which scales
    assert gemma["net.lm_head"] is STYLES["colwise_gather_output"]


def test_lora_is_split_beside_its_layer() -> None:
    root = nn.ModuleDict({"net": adapted()})
    assert next(iter(declared_plan(root, "tp"))).startswith("net.base_model.model.model.layers")
    styles = resolve_plan(root, None, 2)
    layer = "net.base_model.model.model.layers.0.self_attn"
    split = {name.removeprefix(f"{layer}."): style for name, style in styles.items() if name.startswith(layer)}
    assert split == {
        "q_proj.base_layer": STYLES["colwise"],
        "q_proj.lora_B.default": STYLES["colwise"],
        "k_proj": STYLES["colwise"],
        "v_proj.base_layer": STYLES["colwise"],
        "v_proj.lora_B.default": STYLES["colwise"],
        "o_proj.base_layer": STYLES["rowwise"],
        "o_proj.lora_A.default": STYLES["rowwise"],
    }


def with_adapter(config: peft.PeftConfig) -> nn.Module:
    return nn.ModuleDict({"net": peft.get_peft_model(transformers_model("Llama"), config)})


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (peft.LoraConfig(target_modules=["q_proj"], use_dora=True), "lora_magnitude_vector"),
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "ia3_l"),
        (peft.LoraConfig(target_modules=[], target_parameters=["q_proj.weight"]), "adapts its parameter 'weight'"),
    ],
    ids=["DoRA", "IA3", "LoRA of a parameter"],
)
def test_other_adapters_are_refused(config: peft.PeftConfig, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        resolve_plan(with_adapter(config), None, 2)


def test_a_layer_that_peft_copies_to_train_all_of_it_is_split_with_its_copy() -> None:
    styles = resolve_plan(
        with_adapter(peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])), None, 2
    )
    head = "net.base_model.model.lm_head"
    assert {name.removeprefix(head): style for name, style in styles.items() if name.startswith(head)} == {
        ".original_module": STYLES["colwise_gather_output"],
        ".modules_to_save.default": STYLES["colwise_gather_output"],
    }


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ({"blocks.*.experts": "moe_tp_experts"}, "has parameters that the plan doesn't cut .*up, bias, down"),
        ({"experts.up": "colwise"}, r'experts.up.* are parameters of no module of style "moe_tp_experts"'),
        ({"experts.up": "sequence"}, "names a parameter and has style 'sequence'"),
        ({"blocks.*": "colwise"}, "Mixture of style 'colwise', has no parameters of its own"),
        (
            {"blocks.*.shared": "local_params"},
            "has style 'local_params'; known are .*leave out all layers that this one",
        ),
        ({"blocks.*.shared": "mla_kv_a_proj"}, "the module around it no qk_rope_head_dim"),
        (
            {"experts": "moe_tp_experts", "up": "packed_rowwise", "bias": "colwise", "down": "colwise"},
            r"has bias of shape \(4, 24\), and not \[experts",
        ),
    ],
)
def test_plans_that_cannot_work_are_refused(plan: dict[str, Any], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        resolve_plan(Mixtures(), plan, 2)


def test_packed_features_must_divide_in_each_half() -> None:
    with torch.device("meta"):
        root = transformers_model("Mixtral", num_local_experts=4, intermediate_size=65)
    with pytest.raises(PlanError, match=r"has 130 features in dim 1 of gate_up_proj, which 4 must divide"):
        resolve_plan(root, None, 2)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (nn.utils.parametrizations.weight_norm, "_WeightNorm"),
        (nn.utils.weight_norm, "WeightNorm"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_weight_that_is_computed_from_others_is_refused(compute: Any, name: str) -> None:
    net = nn.Sequential(compute(nn.Linear(4, 4)), nn.Linear(4, 4))
    for style in ("colwise", "rowwise"):
        with pytest.raises(PlanError, match=rf"has its weight computed anew by {name}, which can't be done in parts"):
            resolve_plan(net, {"0": style}, 2)


@pytest.mark.parametrize(
    ("layer", "style", "told"),
    [
        (nn.Embedding(8, 4), "rowwise", 'is given indices, and not a part of features: choose "embedding_rowwise"'),
        (nn.Conv1d(4, 4, 3), "colwise", "a Conv1d of style 'colwise': linear layers and embeddings can be split"),
        (nn.LSTM(4, 4), "colwise", "a LSTM of style 'colwise': linear"),
    ],
)
def test_layers_that_a_style_doesnt_fit_are_refused(layer: nn.Module, style: str, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        resolve_plan(nn.Sequential(layer), {"0": style}, 2)


def test_a_head_of_an_odd_vocabulary_stays_whole_in_a_models_own_plan() -> None:
    model = transformers_model("Llama", vocab_size=65, tie_word_embeddings=True)
    root = nn.ModuleDict({"net": model})
    styles = resolve_plan(root, None, 2)
    assert not {"net.lm_head", "net.model.embed_tokens"} & styles.keys()
    assert styles["net.model.layers.0.self_attn.q_proj"] is STYLES["colwise"]
    with pytest.raises(PlanError, match=r"net\.lm_head\.weight of a Linear has 65 out features"):
        resolve_plan(root, {"lm_head": "colwise_gather_output"}, 2)
