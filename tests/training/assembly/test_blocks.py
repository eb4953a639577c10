"""Blocks, and what stands around them, are found in models as people write them."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_shard.errors import PlacementError
from lightning_shard.parallel.blocks import block_lists, find_blocks, tied_parameters
from lightning_shard.parallel.plans import declared_plan, matches
from lightning_shard.plugin.assembly.example import example_of
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


def test_only_a_network_that_embeds_tokens_is_run_on_some() -> None:
    module = L.LightningModule()
    module.embed = nn.Embedding(8, 8)
    module.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)
    assert example_of(module, find_blocks(module)) is None
    gpt = Model("gpt")
    assert example_of(gpt, find_blocks(gpt)) is not None


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
    plan = declared_plan(Model("llama"), "tp")
    assert plan["model.model.layers.*.self_attn.q_proj"] == "colwise"
    assert plan["model.lm_head"] == "colwise_gather_output"
    assert declared_plan(Model("gpt"), "tp") == {}


def test_a_frozen_teacher_is_not_what_is_cut() -> None:
    module = Model("gpt")
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


def test_a_list_that_the_example_leaves_out_is_a_part() -> None:
    module = Around()
    del module.net.heads
    both = find_blocks(module).names
    assert {name.rpartition(".")[0] for name in both} == {"net.encoder", "net.decoder"}
    blocks = find_blocks(module, calls=lambda: ["net.encoder.0", "net.encoder.1", "net.head"])
    assert blocks.names == ("net.encoder.0", "net.encoder.1")
    assert any(name.startswith("net.decoder") for name, _ in blocks.parts)


def test_the_order_that_was_seen_in_a_run_corrects_the_guess() -> None:
    blocks = find_blocks(Whole()).ordered(["head", "embed", "layers.1", "layers.0", "layers.2"])
    assert blocks.names == ("layers.1", "layers.0", "layers.2")
    assert dict(blocks.parts)["head"] == 0


class Prepares(Whole):
    """What it adds is registered after the blocks and used before; the loop uses a part between all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.prepare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.prepare(x))


class UsesAPartBetween(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self._prepare(x)
        for experts in self.layers:
            x = self.norm(experts(x))
        return self.head(x)


class AddsATable(UsesAPartBetween):
    """Its loop calls no part, and takes the weight of one, as DETR's decoder does of its queries."""

    def forward(self, x: Tensor) -> Tensor:
        x = self._prepare(x)
        for experts in self.layers:
            x = experts(x + self.norm.weight)
        return self.head(x)

    def freeze(self) -> None:
        for one, other in zip(self.layers.parameters(), self.head.parameters()):
            one.requires_grad = other.requires_grad = False


class LooksFirst(UsesAPartBetween):
    """Names its layers before it prepares, without running them; its loop is over a variable that holds them."""

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.layers, nn.ModuleList) or self.layers is None:
            raise TypeError
        device = self.layers[0][0].weight.device
        x = self._prepare(x).to(device)
        pairs = (self.layers, range(3))
        for experts, _ in zip(*pairs):
            x = self.norm(experts(x))
        return self.head(x)


@pytest.mark.parametrize(
    ("network", "part"), [(Prepares, "prepare"), (UsesAPartBetween, "norm"), (AddsATable, "norm"), (LooksFirst, "norm")]
)
def test_what_runs_before_an_inherited_forward_or_within_the_loop_comes_first(network: type[Whole], part: str) -> None:
    places = dict(find_blocks(network()).parts)
    assert places[part] == places["embed"] == 0
    assert places["head"] == 3


class ReturnsEarly(Whole):
    """Parts of other branches than the first, as peft's prompts for a model that it may also call without."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.condition = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, condition: Tensor | None = None) -> Tensor:
        if condition is None:
            with torch.no_grad():
                return self.head(self._run(self._prepare(x)))
        elif condition.dtype == torch.int64:
            return self.last(self._run(self._prepare(x)))
        return self.head(self._run(self._prepare(x) + self.condition(condition)))

    def _run(self, x: Tensor) -> Tensor:
        for experts in self.layers:
            x = experts(x)
        return x


def test_what_runs_where_an_earlier_branch_has_returned_may_come_before_what_that_runs() -> None:
    places = dict(find_blocks(ReturnsEarly()).parts)
    assert places == {"position": 0, "embed": 0, "condition": 0, "head": 3, "last": 3}


class CollectsFeatures(Whole):
    """As timm's networks: a method that no step calls takes the norm within its loop."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self._features(self._prepare(x))))

    def _features(self, x: Tensor) -> Tensor:
        for experts in self.layers:
            x = experts(x)
        return x

    def forward_intermediates(self, x: Tensor) -> list[Tensor]:
        found = []
        for experts in self.layers:
            x = experts(x)
            found.append(self.norm(x))
        return found


class OfFeatures(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = CollectsFeatures()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net.forward_intermediates(batch)[-1].sum()


def test_loops_of_methods_that_no_step_calls_arent_looked_at() -> None:
    assert dict(find_blocks(CollectsFeatures()).parts)["norm"] == 3
    assert dict(find_blocks(OfFeatures()).parts)["net.norm"] == 0


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


def test_a_module_of_several_places_is_there_as_often_as_it_runs() -> None:
    module = Holder()
    module.embed, module.block, module.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
    assert find_blocks(module, ["block"] * 3).names == ("block",) * 3
    seen = ["embed", "block", "norm", "block", "norm"]
    found = find_blocks(module, calls=lambda: seen)
    assert found.names == ("block",)
    ordered = found.ordered(seen)
    assert ordered.names == ("block", "block")
    assert dict(ordered.parts) == {"embed": 0, "norm": 1}
    module.blocks = nn.ModuleList([module.block, nn.Linear(8, 8)] * 2)
    assert find_blocks(module).names == ("block", "blocks.1") * 2
    assert "block" not in dict(find_blocks(module).parts)


class InPairs(nn.Module):
    """Lists of containers that are never called, of which one holds a list in turn; a norm after each pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norms = nn.Linear(8, 8), nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.layers = nn.ModuleList(nn.ModuleList([nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8)]) for _ in range(2))
        self.named = nn.ModuleList(
            nn.ModuleDict({"first": nn.Linear(8, 8), "rest": nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8)])})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for (before, activation, linear), norm in zip(self.layers, self.norms):
            x = norm(x + linear(activation(before(x))))
        for block in self.named:
            x = block["first"](x)
            for rest in block["rest"]:
                x = rest(x)
        return x


def test_containers_that_are_never_called_are_replaced_by_what_they_hold() -> None:
    module = Holder()
    module.net = InPairs()
    pairs = tuple(f"net.layers.{i}.{j}" for i in range(2) for j in (0, 2))
    rest = tuple(f"net.named.{i}.{name}" for i in range(2) for name in ("first", "rest.0", "rest.1"))
    found = find_blocks(module)
    assert found.names == pairs + rest
    assert dict(found.parts) == {"net.embed": 0, "net.norms.0": 0, "net.norms.1": 2}
    assert find_blocks(module, calls=lambda: [*pairs, *rest]).names == pairs + rest
    assert find_blocks(module, calls=lambda: pairs).names == pairs
    assert find_blocks(module, "layers").names == pairs
    assert find_blocks(module, ["named.1", "layers"]).names == (*rest[3:], *pairs)


def test_a_module_that_several_containers_hold_has_a_place_for_each() -> None:
    module, shared = Holder(), nn.Linear(8, 8)
    module.layers = nn.ModuleList(nn.ModuleList([nn.Linear(8, 8), shared]) for _ in range(2))
    assert find_blocks(module).names == ("layers.0.0", "layers.0.1", "layers.1.0", "layers.0.1")


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


class LooksLikeAList(nn.Module):
    """A block that runs three times, and holds a list."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Towers()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.block(x)
        return x


def test_a_list_in_a_module_that_runs_several_times_isnt_cut() -> None:
    module = Holder()
    module.net = LooksLikeAList()
    assert find_blocks(module, calls=lambda: ["net", "net.block", "net.block"]).names == ("net.block",)
    assert find_blocks(module).names[0] == "net.block.encoder.0"


class SelfSupervised(L.LightningModule):
    """A backbone of four stages, and heads of more layers, whose parameters may be as many as a stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64) for _ in range(4))
        self.projector = nn.Sequential(
            nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 32)
        )
        self.predictor = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(9))
        self.tables = nn.ModuleDict({str(size): nn.Embedding(size, 64) for size in range(100, 106)})


def test_heads_and_tables_of_embeddings_are_not_what_is_cut() -> None:
    module = SelfSupervised()
    assert find_blocks(module).names == tuple(f"backbone.{number}" for number in range(4))
    del module.backbone, module.predictor
    assert find_blocks(module).names[0] == "projector.0"
    del module.projector
    with pytest.raises(PlacementError):
        find_blocks(module)
