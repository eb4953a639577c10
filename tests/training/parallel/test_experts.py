"""Which modules are experts that can be dealt to ranks, and the layouts that deal them; in one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import LayoutError, PlanError
from lightning_shard.layout import Layout
from lightning_shard.parallel.experts.module_lists import distribute_list
from lightning_shard.parallel.experts.stacked import resolve_experts
from lightning_shard.plugin.assembly.probe import two_runs
from lightning_shard.testing.layouts import parse
from tests.training.mixtures import EXPERTS, NETWORKS, NOISY, Experts, ListedMixture, Mixtures, Noisy

PLAN = {"blocks.*.experts": "experts"}


def test_experts_are_dealt_to_neighbours_among_the_data_ranks() -> None:
    layout = Layout.resolve(16, data_parallel_size=8, tensor_parallel_size=2, expert_parallel_size=4)
    assert layout.sizes["expert_parallel_size"] == 4
    assert str(layout) == "1 pipeline × 8 data (experts over 4) × 2 tensor"
    # an earlier version's checkpoints have no such axis
    assert "expert_parallel_size" not in Layout.resolve(2).sizes


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"data_parallel_size": 6, "expert_parallel_size": 4},
            r"expert_parallel_size \(4\) must divide data_parallel_size \(6\).*\[1, 2, 3, 6\], or a multiple of 4",
        ),
        (
            {"data_parallel_size": 4, "data_parallel_replicas": 2, "expert_parallel_size": 4},
            r"/ data_parallel_replicas \(2\).*\[1, 2\], or a multiple of 8",
        ),
        ({"expert_parallel_size": 0}, r"expert_parallel_size \(0\) must be an integer of at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_what_fits(sizes: dict[str, Any], told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        HybridShardStrategy(**sizes)


def test_auto_data_ranks_must_divide_too() -> None:
    with pytest.raises(LayoutError, match=r"use one of \[1, 3\]"):
        Layout.resolve(3, expert_parallel_size=2)


def test_names_of_layouts_with_experts() -> None:
    assert parse("ep2", {}).world_size == 2
    layout = parse("pp2 x ep2 x dp2", {}).at(0)
    assert (layout.pipeline_parallel_size, layout.data_parallel_size, layout.expert_parallel_size) == (2, 4, 2)


@pytest.mark.parametrize("kind", ["mixtral", "gpt-oss", "deepseek-v3", "granite"])
def test_transformers_models_declare_their_experts(kind: str) -> None:
    with torch.device("meta"):
        root = nn.ModuleDict({"net": NETWORKS[kind]()})
    first = 1 if kind.startswith("deepseek") else 0  # whose first layer is dense
    mixture = "block_sparse_moe" if kind == "granite" else "mlp"
    assert resolve_experts(root, None, 2) == [f"net.model.layers.{i}.{mixture}.experts" for i in range(first, 4)]


def test_a_plan_names_a_users_own() -> None:
    assert resolve_experts(Mixtures(), PLAN, 4) == [f"blocks.{i}.experts" for i in range(4)]


def linear(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(8, 8) for _ in range(count))


class WithState(Experts):
    def __init__(self) -> None:
        super().__init__(EXPERTS, 8, 8)
        self.register_buffer("load", torch.zeros(EXPERTS))


class Normed(Experts):
    def __init__(self) -> None:
        super().__init__(EXPERTS, 8, 8)
        self.norm = nn.LayerNorm(8)


class OfMasks(Experts):
    def __init__(self) -> None:
        super().__init__(EXPERTS, 8, 8)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        return tokens


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        (linear(4), "ModuleList, is held by a ModuleDict whose forward doesn't call them"),
        (nn.Linear(8, 8), "has no num_experts"),
        (WithState(), "has load beside its parameters"),
        (Normed(), "holds norm.weight in a module of its own"),
        (OfMasks(), r"is called with \(tokens, mask\)"),
        (Experts(3, 8, 8), r"has 3 experts, which expert_parallel_size \(2\) must divide: use one of \[1, 3\]"),
    ],
)
def test_experts_that_cannot_be_dealt_are_refused(experts: nn.Module, told: str) -> None:
    with pytest.raises(PlanError, match=told):
        resolve_experts(nn.ModuleDict({"experts": experts}), {"experts": "experts"}, 2)


@pytest.mark.parametrize(
    ("experts", "told"),
    [
        (linear(3), r"has 3 experts, which expert_parallel_size \(2\) must divide"),
        (nn.ModuleList([nn.Dropout(), nn.SiLU()]), "has no experts with parameters"),
        (nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)]), r"aren't alike \(0 and 1\)"),
        (nn.ModuleList([nn.Linear(8, 8)] * 2), "holds one expert several times"),
        (nn.ModuleList([nn.BatchNorm1d(8), nn.BatchNorm1d(8)]), "has experts with buffers"),
    ],
)
def test_lists_of_experts_that_cannot_be_dealt_are_refused(experts: nn.Module, told: str) -> None:
    root = nn.ModuleDict({"mixture": ListedMixture(8, "all")})
    root["mixture"].experts = experts
    with pytest.raises(PlanError, match=told):
        resolve_experts(root, {"experts": "experts"}, 2)


def test_lists_whose_experts_share_weights_are_refused() -> None:
    root = nn.ModuleDict({"mixture": ListedMixture(8, "all")})
    first, second, *_ = root["mixture"].experts
    first[0].weight = second[0].weight
    with pytest.raises(PlanError, match=r"shares mixture\.experts\.0\.0\.weight, mixture\.experts\.1\.0\.weight"):
        resolve_experts(root, {"experts": "experts"}, 2)


def test_plans_that_say_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="pass expert_parallel_plan"):
        resolve_experts(Mixtures(), None, 2)
    with pytest.raises(PlanError, match=r"matches no module; modules with that last name: \['blocks.0.experts'"):
        resolve_experts(Mixtures(), {"layers.*.experts": "experts"}, 2)
    with pytest.raises(PlanError, match="'colwise'; the only one"):
        resolve_experts(Mixtures(), {"blocks.*.experts": "colwise"}, 2)


def test_noise_of_the_router_is_the_same_in_both_runs_whatever_experts_draw() -> None:
    """On one rank, whose experts run on the rows that plain ones do."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain = nn.ModuleDict({"mixture": Noisy()})
    dealt = copy.deepcopy(plain)
    distribute_list(dealt, "mixture.experts", mesh, mesh, partial(two_runs, torch.device("cpu")))
    tokens = torch.randn(16, NOISY)
    for step in range(2):  # of which the first asks an expert for the shape of its results
        results = []
        for module in (dealt, plain):
            torch.manual_seed(step)
            results.append((module["mixture"](tokens), torch.rand(1)))
        (of_dealt, after_dealt), (of_plain, after_plain) = results
        torch.testing.assert_close(of_dealt, of_plain)
        assert after_dealt == after_plain  # as many random numbers were drawn
