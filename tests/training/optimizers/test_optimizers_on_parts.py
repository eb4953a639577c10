"""Optimizers for which torch's DTensors don't suffice step sharded parameters as whole ones, or are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.optimization import Adafactor

from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.layout import Layout
from lightning_shard.plugin.optimizers import whole_tensors
from lightning_shard.plugin.optimizers.sharded import refuse
from lightning_shard.testing import run_ranks

MIXED = re.escape("mixed torch.Tensor and DTensor")
SHAPES = [(5, 4), (4, 6), (7,), (200, 130), (3, 2, 3)]


class Own(torch.optim.Optimizer):
    """Gradient descent, each tensor's step divided by something of its own."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def scale(self, p: Any) -> Any:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / self.scale(p))


class ByFlattened(Own):
    """As AdamP and Prodigy do: DTensors can't be flattened where ranks share them unevenly."""

    def scale(self, p: Any) -> Any:
        return 1 + p.grad.flatten().dot(p.flatten()).abs()


class ByNormInPlace(Own):
    """As Muon's relatives do: DTensors refuse to change a sum that isn't added up."""

    def scale(self, p: Any) -> Any:
        return p.norm(2).clamp_(min=0.1).add_(1)


class ByMeansOfRows(Own):
    """As CAME and NovoGrad do: means are plain tensors, changed in place."""

    def scale(self, p: Any) -> Any:
        state = self.state[p]
        if not state:
            state["rows"] = torch.zeros(p.shape[:-1])
        rows = state["rows"]
        rows.mul_(0.9).add_(p.grad.square().mean(-1), alpha=0.1)
        rows += p.grad.abs().amax(-1)
        torch.mul(p.grad, torch.full(p.shape, 1.0), out=p.grad)
        return rows.unsqueeze(-1).sqrt() + 1


class OfOwnPart(Own):
    """Each rank has the norm of its part."""

    def scale(self, p: Any) -> Any:
        return (p.to_local() if isinstance(p, DTensor) else p).norm() + 1


class OfOwnPartInSomeGroups(OfOwnPart):
    """As Muon with Adam for the rest: a setting that isn't among the defaults chooses the code of a group."""

    def scale(self, p: Any) -> Any:
        [group] = [group for group in self.param_groups if any(p is each for each in group["params"])]
        return super().scale(p) if group.get("by_norm") else 1.0


class TakingTurns(Own):
    """As Muon for plain data ranks: each rank computes the update of other parameters, and all gather them."""

    def scale(self, p: Any) -> Any:
        dist.all_gather([torch.empty_like(p) for _ in range(dist.get_world_size())], p)
        return 1.0


class ThroughView(ByNormInPlace):
    """What it changes isn't the parameter, where that was gathered to be flattened."""

    def scale(self, p: Any) -> Any:
        torch._foreach_mul_([p.view(-1)], 0.9)
        return super().scale(p)


RIGHT = (ByFlattened, ByMeansOfRows, Adafactor, torch.optim.Adafactor, torch.optim.Rprop)


def made(kind: Any, parameters: list[nn.Parameter]) -> Any:
    return kind(parameters, lr=None, warmup_init=True) if kind is Adafactor else kind(parameters)


def of_shapes(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(kind: Any, place: Any, prepare: Any) -> list[Tensor]:
    parameters = [nn.Parameter(place(values)) for values in of_shapes(0)]
    optimizer = made(kind, parameters)
    prepare(optimizer)
    for step in (1, 2):

        def closure(step: int = step) -> Tensor:
            for p, gradient in zip(parameters, of_shapes(step)):
                p.grad = place(gradient)
            if place is not Tensor.clone:
                with pytest.raises(RuntimeError, match=MIXED):
                    _ = parameters[0] + torch.ones(5, 4)  # a user's code is refused as ever
            return torch.zeros(())

        optimizer.step(closure)
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in (p.detach() for p in parameters)]


def step_parts() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(whole: Tensor) -> Tensor:
        return distribute_tensor(whole, mesh, [Shard(0)])

    for kind in RIGHT:
        whole = trained(kind, Tensor.clone, lambda _: None)
        torch.testing.assert_close(trained(kind, place, whole_tensors.allow), whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(ConfigurationError, match="OfOwnPart steps a parameter of which each rank has a part otherwise"):
        trained(OfOwnPart, place, whole_tensors.allow)
    first, second, *rest = [nn.Parameter(place(values)) for values in of_shapes(0)]
    groups = [{"params": [first]}, {"params": [second], "lr": 0.2}, {"params": rest, "by_norm": True}]
    with pytest.raises(ConfigurationError, match="OfOwnPartInSomeGroups steps"):
        whole_tensors.allow(OfOwnPartInSomeGroups(groups))
    with pytest.raises(ConfigurationError, match=r"TakingTurns calls other ranks in its step \(all_gather\)"):
        refuse(TakingTurns([first]), Layout(data_parallel_size=2))
    dealt = ZeroRedundancyOptimizer([nn.Parameter(torch.ones(2))], torch.optim.Adam)
    with pytest.raises(ConfigurationError, match="ZeroRedundancyOptimizer calls other ranks"):
        refuse(dealt, Layout(data_parallel_size=2))
    with pytest.raises(RuntimeError):
        trained(ThroughView, place, whole_tensors.allow)  # it isn't allowed, and torch refuses what it does
    uneven = place(torch.ones(5, 4))
    with whole_tensors._whole_where_needed(), pytest.raises(StepError, match="changes a view"):
        torch._foreach_mul_([uneven.view(-1)], 0.9)
    with pytest.raises(RuntimeError, match=MIXED):
        _ = place(torch.ones(5, 4)) + torch.ones(5, 4)


def test_parts_are_stepped_as_whole_parameters() -> None:
    run_ranks(step_parts, 2)
