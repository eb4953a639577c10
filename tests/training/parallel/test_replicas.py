"""Parameters sharded within replicas (HSDP), beside every other axis, another schedule and settings of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shard.parallel.fsdp.shard import expect_backward_of, reduce_gradients
from lightning_shard.parallel.fsdp.units import sharded_units
from lightning_shard.sharding import full_tensor
from lightning_shard.testing import run_ranks
from tests.parity import Seen, combine, layout, train, world
from tests.training.parallel.test_memory_settings import CLIPPED
from tests.training.pipeline.test_several_stages import check

IN_TWO_PARTS = {"schedule": "ZBVZeroBubble"}
REPLICAS = {"data_parallel_replicas": 2}
DEAR = {"activation_checkpointing": True, "reduce_each_microbatch": True, "reshard_after_forward": True}
ROWS: dict[str, tuple[dict[str, int], str, list[dict[str, Any]]]] = {
    "dp4": (layout(data=4), "gpt", [{}, DEAR, {"cpu_offload": True}]),
    "pp2×dp2": (layout(pipeline=2, data=2), "gpt", [{}, {"cpu_offload": True}, IN_TWO_PARTS]),
    "pp2×dp4": (layout(pipeline=2, data=4), "gpt", [{}, {"schedule": "DualPipeV"}, DEAR]),
    "dp4×tp2": (layout(data=4, tensor=2), "llama", [{}]),
}


def each(sizes: Mapping[str, int], network: str, options: list[dict[str, Any]]) -> list[Seen]:
    return [train(network, sizes, trainer=CLIPPED, **REPLICAS, **more) for more in options]


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_replicas_compute_what_one_process_computes(row: str) -> None:
    sizes, network, options = ROWS[row]
    ranks = run_ranks(each, world(sizes), sizes, network, options, elastic=True, timeout_s=300)
    plain = train(network, trainer=CLIPPED)
    for number in range(len(options)):
        check(combine([rank[number] for rank in ranks], sizes), plain)


def reduced_afterwards() -> dict[str, Tensor]:
    """Gradients of a backward that doesn't reduce, as under schedules with backwards in two parts."""
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    fully_shard(module, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "data")))
    expect_backward_of(sharded_units(module), reduces=False, reshards=False, is_last=True)
    module(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
    reduce_gradients(module)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: full_tensor(gradient) for name, gradient in gradients.items() if gradient is not None}


def test_gradients_that_are_reduced_afterwards_are_those_of_all_replicas() -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    (sum(module(torch.full((2, 4), 1.0 + rank)).square().sum() for rank in range(2)) / 2).backward()
    for gradients in run_ranks(reduced_afterwards, 2):
        assert gradients.keys() == {"weight", "bias"}
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
