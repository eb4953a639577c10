"""Modules that hold sparse tensors, such as a graph's adjacency, and others that torch can't compare."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.init import agree_on_weights
from lightning_shard.testing import assert_trains_alike, ranks
from tests.training.parallel.small import Descends, random_batches

NODES = 8


def ring() -> Tensor:
    return torch.eye(NODES).roll(1, 0) + torch.eye(NODES)


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(6, 6)
        self.own = torch.eye(6).to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.weight(x) @ self.own.to_dense())
        return out


class Graphs(Descends):
    """Features of a graph's nodes, and of a batch several graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 6)
        self.blocks = nn.ModuleList(Convolution() for _ in range(4))
        self.head = nn.Linear(6, 1)
        self.register_buffer("adjacency", ring().to_sparse(), persistent=False)
        self.compressed = ring().to_sparse_csr()
        self.lengths = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        self.phases = torch.zeros(3, dtype=torch.complex32)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = torch.stack([torch.sparse.mm(self.adjacency, graph) for graph in batch])
        x = self.embed(torch.stack([self.compressed @ graph for graph in x]))
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: object, batch: Tensor, batch_idx: int) -> None:
        self.adjacency = (ring() * 0.5 / (batch_idx + 1)).to_sparse()


batches = partial(random_batches, 8, NODES, 3)


def test_sparse_and_nested_tensors_train_as_in_one_process() -> None:
    """Comparing them failed in torch's words: attributes on stages, and buffers on all layouts."""
    interleaved = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}
    assert_trains_alike(Graphs, batches, ["dp2", interleaved])


@ranks(2)
def test_processes_agree_on_weights_and_must_have_built_the_same_sparse_buffers() -> None:
    module = nn.Linear(3, 3)
    nn.init.constant_(module.weight, float(dist.get_rank()))
    module.register_buffer("listed", ring().to_sparse())
    agree_on_weights(module)
    assert not module.weight.any()
    module.register_buffer("compressed", (ring() * dist.get_rank()).to_sparse_csr())
    with pytest.raises(ConfigurationError, match="different sparse buffers"):
        agree_on_weights(module)
