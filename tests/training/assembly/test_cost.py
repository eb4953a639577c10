"""Costs of the parts of a network, counted without computing anything."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_shard.pipeline.cost import measure, watch

WIDTH, VOCABULARY, TOKENS = 16, 50, 12
MLP_FLOPS = 2 * TOKENS * (WIDTH * 4 * WIDTH) * 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Network(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def cost(self, run=None):
        blocks = dict(self.blocks.named_children())
        parts = {"embedding": self.embedding, "scale": self.scale, "norm": self.norm, "head": self.head}
        seen = watch({**blocks, **parts}, run) if run else None
        places = {"embedding": 0, "scale": 0, "norm": len(blocks), "head": len(blocks)}
        return measure(blocks.items(), {name: (places[name], part) for name, part in parts.items()}, seen)


def by_name(parts):
    return {part.name: part for part in parts}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_operations_are_counted_part_by_part_on_tensors_without_data(device):
    with torch.device(device):
        network = Network()
    cost = network.cost(run=lambda: network(torch.zeros(1, TOKENS, dtype=torch.long)))
    assert [block.flops for block in cost.blocks] == [MLP_FLOPS] * 3
    assert by_name(cost.parts_at(0))["embedding"].flops == 0
    assert by_name(cost.parts_at(3))["head"].flops == 2 * TOKENS * WIDTH * VOCABULARY
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_parameters_and_bytes_are_of_the_dtype_and_count_a_shared_parameter_once():
    network = Network().to(torch.bfloat16)
    network.blocks[0].down.weight = nn.Parameter(network.blocks[0].up.weight.T)
    network.blocks[1].again = network.blocks[1].up
    cost = network.cost()
    assert [(block.parameters, block.bytes) for block in cost.blocks] == [(2048, 4096)] * 3
    assert by_name(cost.parts_at(0))["scale"].bytes == 2 * WIDTH
    assert by_name(cost.parts_at(3))["norm"].parameters == 2 * WIDTH


def test_a_network_that_needs_real_values_is_estimated_and_says_so():
    network = Network()
    with pytest.warns(UserWarning, match="estimated"):
        cost = network.cost(run=lambda: network(torch.zeros(1, TOKENS, dtype=torch.long)).sum().item())
    assert cost == network.cost()
