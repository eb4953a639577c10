"""Blocks, and what stands around them, are found in models as people write them."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import PlacementError
from lightning_shard.parallel.blocks import Blocks, block_lists, find_blocks, tied_parameters
from lightning_shard.parallel.plans import declared_plan, matches
from tests.parity import Model


def after_all(blocks: Blocks) -> list[str]:
    """The parts that run after all blocks."""
    return [name for name, place in blocks.parts if place == len(blocks)]


def test_blocks_of_a_gpt() -> None:
    blocks = find_blocks(Model())
    assert blocks.names == tuple(f"model.blocks.{i}" for i in range(4))
    assert blocks.network == "model"
    assert set(blocks.before) == {"model.token_embedding", "model.position_embedding"}
    assert set(after_all(blocks)) == {"model.norm", "model.head"}


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
    assert after <= {name.rsplit(".")[-1] for name in after_all(blocks)}
    trained = {name for name, _ in module.named_parameters()}
    around = [*blocks.names, *blocks.before, *after_all(blocks)]
    assert all(any(name.startswith(f"{part}.") for part in around) for name in trained)


class Experts(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8) for _ in range(9))

    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


class Whole(L.LightningModule):
    """The network itself, its head registered first, its position a bare parameter, experts inside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.embed = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.position = nn.Parameter(torch.zeros(8))

    def _prepare(self, x: Tensor) -> Tensor:
        return self.embed(x) + self.position

    def forward(self, x: Tensor) -> Tensor:
        x = self._prepare(x)
        for experts in self.layers:
            x = experts(x)
        return self.head(x)


def test_the_order_is_that_of_the_code_and_inner_lists_arent_blocks() -> None:
    blocks = find_blocks(Whole())
    assert blocks.names == tuple(f"layers.{i}" for i in range(3))
    assert blocks.network == ""
    assert set(blocks.before) == {"embed", "position"}
    assert after_all(blocks) == ["head"]
    assert list(block_lists(Whole())) == ["layers"]


class Resets(L.LightningModule):
    """Names its blocks before the layer that runs before them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            block.loss = None
        for number, block in enumerate(self.blocks):
            block.requires_grad_()
            block.number = number
        names = [type(block) for block in self.blocks]
        return self.last(self.run(self.blocks, self.first(x))) * len(names)

    def run(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x


def test_what_only_resets_blocks_or_hands_them_on_doesnt_run_them() -> None:
    found = find_blocks(Resets())
    assert found.parts == (("first", 0), ("last", 3))


class Levels(L.LightningModule):
    """A pyramid: each level's embedding, and then its blocks, which the loop names in a line of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.levels = nn.ModuleList(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for _, level in enumerate(zip(self.embeds, self.levels)):
            embed, blocks = level
            x = embed(x)
            for block in blocks:
                x = block(x)
        return x


def test_a_list_that_runs_in_turn_with_the_blocks_stands_beside_them() -> None:
    found = find_blocks(Levels())
    assert found.names == tuple(f"levels.{level}.{block}" for level in range(3) for block in range(2))
    assert found.parts == (("embeds.0", 0), ("embeds.1", 2), ("embeds.2", 4))


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
    plan = declared_plan(Model("llama"), "tp")
    assert plan["model.model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.lm_head"] == "colwise_gather_output"
    assert declared_plan(Model(), "tp") == {}


def test_a_frozen_teacher_is_not_what_is_cut() -> None:
    module = Model()
    module.teacher = nn.ModuleList(nn.TransformerEncoderLayer(64, 2, 64) for _ in range(9)).requires_grad_(False)
    assert find_blocks(module).names[0] == "model.blocks.0"
    module.model.requires_grad_(False)
    assert find_blocks(module).names[0] == "teacher.0"


class Towers(nn.Module):
    """An encoder and a decoder of other blocks, a head called around both, experts of blocks, a small list of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
        self.decoder = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2))
        self.between = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.decode(self.between(self.encode(x))))

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, x: Tensor) -> Tensor:
        for layer in self.decoder:
            x = layer(x)
        return x


class Around(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.after = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.net = Towers()
        self.before = nn.Linear(8, 8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.after(self.net(self.before(batch))).sum()


def test_lists_that_run_one_after_the_other_and_parts_beside_the_network() -> None:
    module = Around()
    blocks = find_blocks(module, ["net.encoder", "net.decoder"])
    assert blocks.names == ("net.encoder.0", "net.encoder.1", "net.decoder.0", "net.decoder.1")
    places = dict(blocks.parts)
    assert (places["before"], places["net.between"], places["net.head"], places["after"]) == (0, 2, 4, 4)
    assert "frozen" not in places
    assert blocks.network == "net"


class Stage(nn.Module):
    """As timm's RegNet has: its blocks are attributes, and it loops over its children."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        for i in range(depth):
            self.add_module(f"b{i + 1}", nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.children():
            x = block(x)
        return x


class OfStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.s1, self.s2, self.head = nn.Linear(8, 8), Stage(2), Stage(3), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.s2(self.s1(self.stem(x))))


def test_a_module_that_loops_over_its_children_is_a_list() -> None:
    module = Holder()
    module.net = OfStages()
    blocks = find_blocks(module)
    assert blocks.names == ("net.s1.b1", "net.s1.b2", "net.s2.b1", "net.s2.b2", "net.s2.b3")
    assert blocks.parts == (("net.stem", 0), ("net.head", 5))


class Holder(nn.Module):
    """Of what is set on it."""


def test_what_cant_be_cut_says_what_could_be_named() -> None:
    module = Holder()
    module.net = Holder()
    module.net.first, module.net.second = nn.Linear(8, 8), nn.LSTM(8, 8, num_layers=4)
    with pytest.raises(PlacementError, match=r"pipeline_blocks, such as \['net\.first', 'net\.second'\]"):
        find_blocks(module)
    assert find_blocks(module, ["first", "second"]).names == ("net.first", "net.second")
    del module.net.first
    with pytest.raises(PlacementError, match=r"by pipeline_blocks\. .* single module, such as an nn\.LSTM, isn't cut"):
        find_blocks(module)
