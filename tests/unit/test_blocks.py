"""Blocks, and what stands around them, are found in models as people write them."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import PlacementError
from lightning_shard.parallel.blocks import block_lists, find_blocks, tied_parameters
from lightning_shard.parallel.tensor import matches, own_plan
from lightning_shard.pipeline.cost import measure
from lightning_shard.pipeline.placement import place
from lightning_shard.plugin.assemble import _refuse_collectors
from tests.parity import Model


def test_blocks_of_a_gpt() -> None:
    blocks = find_blocks(Model("gpt"))
    assert blocks.names == tuple(f"model.blocks.{i}" for i in range(4))
    assert blocks.network == "model"
    assert set(blocks.before) == {"model.token_embedding", "model.position_embedding"}
    assert set(blocks.after) == {"model.norm", "model.head"}


@pytest.mark.parametrize(
    ("network", "path", "before", "after"),
    [
        ("llama", "model.model.layers", {"embed_tokens"}, {"norm", "lm_head"}),
        ("qwen3", "model.model.layers", {"embed_tokens"}, {"norm", "lm_head"}),
        ("gpt2", "model.transformer.h", {"wte", "wpe"}, {"ln_f", "lm_head"}),
    ],
)
def test_blocks_of_transformers_models(network: str, path: str, before: set[str], after: set[str]) -> None:
    module = Model(network)
    blocks = find_blocks(module)
    assert blocks.names[0] == f"{path}.0"
    assert before <= {name.rsplit(".")[-1] for name in blocks.before}
    assert after <= {name.rsplit(".")[-1] for name in blocks.after}
    trained = {name for name, _ in module.named_parameters()}
    around = [*blocks.names, *blocks.before, *blocks.after]
    assert all(any(name.startswith(f"{part}.") for part in around) for name in trained)


class Whole(L.LightningModule):
    """The network itself, its head registered first, its position a bare parameter, experts inside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(9)) for _ in range(3))
        self.position = nn.Parameter(torch.zeros(8))

    def _prepare(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.position

    def forward(self, x: Tensor) -> Tensor:
        x = self._prepare(x)
        for experts in self.layers:
            x = experts[0](x)
        return self.head(x)


def test_the_order_is_that_of_the_code_and_inner_lists_arent_blocks() -> None:
    blocks = find_blocks(Whole())
    assert blocks.names == tuple(f"layers.{i}" for i in range(3))
    assert blocks.network == ""
    assert set(blocks.before) == {"embed", "position"}
    assert blocks.after == ("head",)
    assert list(block_lists(Whole())) == ["layers"]


def test_a_path_may_leave_out_its_beginning_where_that_is_clear() -> None:
    assert find_blocks(Model("llama"), "layers").names[1] == "model.model.layers.1"
    assert find_blocks(Model("llama"), "model.layers").names[1] == "model.model.layers.1"
    with pytest.raises(PlacementError, match="is not a list"):
        find_blocks(Model("llama"), "blocks")


def test_ties_are_seen() -> None:
    module = Whole()
    module.head.weight = module.embed.weight
    assert tied_parameters(module) == [("head.weight", "embed.weight")]


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("model.layers.3.mlp.up", "layers.*.mlp.up", True),
        ("model.layers.3.mlp.up", "mlp.up", True),
        ("model.layers.3.mlp.up", "model.*.*.mlp.u*", True),
        ("model.layers.3.mlp.up", "layers.mlp.up", False),
        ("up", "mlp.up", False),
    ],
)
def test_a_star_is_one_part_of_a_name(name: str, pattern: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


def test_transformers_models_bring_their_plans() -> None:
    plan = own_plan(Model("llama"))
    assert plan["model.model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.lm_head"] == "colwise_gather_output"
    assert own_plan(Model("gpt")) == {}


def test_a_frozen_teacher_is_not_what_is_cut() -> None:
    module = Model("gpt")
    module.teacher = nn.ModuleList(nn.Linear(8, 8) for _ in range(9)).requires_grad_(False)
    assert find_blocks(module).names[0] == "model.blocks.0"
    module.model.requires_grad_(False)
    assert find_blocks(module).names[0] == "teacher.0"


def check_collectors(module: L.LightningModule) -> None:
    blocks = find_blocks(module)
    cost = measure(dict(zip(blocks.names, blocks.modules(module))), {})
    _refuse_collectors(module, blocks, place(cost, 2, [2, 2]))


def test_what_collects_values_inside_of_blocks_on_several_stages_is_refused() -> None:
    module = Model("llama")
    layers = module.model.model.layers
    layers[0].register_forward_hook(lambda *_: None)
    layers[3].mlp.register_forward_hook(lambda *_: None)  # on the last stage, where the values are used
    check_collectors(module)
    layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(PlacementError, match=r"model\.layers\.1\.mlp has a forward hook, which runs on the stage"):
        check_collectors(module)
    module = Model("llama")
    module.model.config.output_router_logits = True
    with pytest.raises(PlacementError, match=r"config\.output_router_logits can't be collected"):
        check_collectors(module)
