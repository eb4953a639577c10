"""Two pipeline stages share one CUDA device, and compute what one process does.

NCCL refuses two ranks on one device, so they talk over gloo. That can't send from a device, as stages do: what they
send goes through the host here. So this shows all that stages do on a CUDA device, but for NCCL's sends. Data and
tensor parallel ranks can't be tried so: gloo ends the process with SIGSEGV, in a thread of its own (torch 2.11).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin import groups
from lightning_shard.testing import run_ranks
from tests.parity import LAYOUTS, Seen, combine, largest_difference, train

STAGES = LAYOUTS["pp2"]


def train_stage(network: str) -> Seen:
    # as on two machines of one device each
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    settings = {"accelerator": "gpu", "devices": 1, "num_nodes": 2}
    return train(network, STAGES, trainer=settings, process_group_backend="gloo")


def through_the_host(network: str) -> tuple[Seen, Seen]:
    send_through_the_host()
    plain = train(network, trainer={"accelerator": "gpu"})
    return on_host(train_stage(network)), on_host(plain)


def send_through_the_host() -> None:
    groups.refuse_gloo = lambda: None
    isend, irecv, broadcast, sent = dist.isend, dist.irecv, dist.broadcast, []

    def send(tensor: Tensor, **where: Any) -> Any:
        sent.append(tensor.cpu())  # must live until it has left
        return isend(sent[-1], **where)

    def receive(tensor: Tensor, **where: Any) -> Arriving:
        received = tensor.cpu()
        return Arriving(irecv(received, **where), received, tensor)

    def tell(tensor: Tensor, **where: Any) -> None:
        told = tensor.cpu()
        broadcast(told, **where)
        tensor.copy_(told)

    dist.isend, dist.irecv, dist.broadcast = send, receive, tell


@dataclass
class Arriving:
    work: Any
    received: Tensor
    tensor: Tensor

    def wait(self) -> None:
        self.work.wait()
        self.tensor.copy_(self.received)


def on_host(seen: Seen) -> Seen:
    for part in (seen.gradients, seen.initial, seen.parameters):
        assert all(tensor.is_cuda for tensor in part.values())
        part.update({name: tensor.cpu() for name, tensor in part.items()})
    return seen


@pytest.mark.parametrize("network", ["gpt", "llama"])
def test_two_stages_compute_what_one_process_computes(network: str) -> None:
    per_rank = run_ranks(through_the_host, 2, network, elastic=True, start_method="spawn", timeout_s=120)
    ours, plain = combine([ours for ours, _ in per_rank], STAGES), per_rank[0][1]
    assert ours.losses == pytest.approx(plain.losses, rel=5e-6)
    assert ours.metrics == pytest.approx(plain.metrics, rel=5e-6)
    assert ours.norm == pytest.approx(plain.norm, rel=2e-6)
    assert largest_difference(ours.gradients, plain.gradients) < 5e-7
    assert largest_difference(ours.parameters, plain.parameters) < 5e-5


def refused() -> None:
    with pytest.raises(ConfigurationError, match="gloo, which doesn't serve CUDA devices"):
        train_stage("gpt")


def test_gloo_is_refused() -> None:
    run_ranks(refused, 2, elastic=True, start_method="spawn", timeout_s=120)
