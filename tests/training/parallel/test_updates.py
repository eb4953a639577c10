"""Adam's updates of sharded parameters: the numbers of DTensors' own, without their dispatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_shard.parallel.fsdp.adam import update_shards
from lightning_shard.testing import run_ranks

STEPS = 3
SUMMANDS = "summands"
SETTINGS: dict[str, dict[str, Any]] = {
    "Adam": {"lr": 0.1},
    "amsgrad": {"lr": 0.1, "amsgrad": True, "weight_decay": 0.1},
    "foreach": {"lr": 0.1, "foreach": True},
    "fused": {"lr": 0.1, "fused": True},
}


class OfDTensors(TorchDispatchMode):
    """Counts operations on them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(issubclass(kind, DTensor) for kind in types)
        return function(*args, **(kwargs or {}))


def updated(settings: dict[str, Any], of_gradient: Placement, ours: bool) -> tuple[list[Tensor], int]:
    """This rank's weights and state after some steps, and how many operations of the last were on DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(1)

    def part(placement: Placement, *shape: int) -> DTensor:
        return DTensor.from_local(torch.randn(shape, generator=generator), mesh, [placement], run_check=False)

    shards = [Replicate() if isinstance(of_gradient, Partial) else Shard(0), Shard(0)]
    parameters = [nn.Parameter(part(placement, 3, 4)) for placement in shards]
    optimizer = torch.optim.AdamW(parameters, **settings)
    if ours:
        update_shards(optimizer)
    for _ in range(STEPS):
        for parameter, placement in zip(parameters, (of_gradient, Shard(0))):
            parameter.grad = part(placement, 3, 4)
        with OfDTensors() as counted:
            optimizer.step()
    states = [value for of in optimizer.state.values() for value in of.values()]
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*parameters, *states)]
    return [tensor.detach() for tensor in tensors], counted.count


def both() -> dict[str, tuple[bool, int, int]]:
    """With each setting, and with gradients that are still to be summed: whether numbers are equal, and the counts."""
    ways = {name: (settings, Shard(0)) for name, settings in SETTINGS.items()} | {
        SUMMANDS: (SETTINGS["Adam"], Partial())
    }
    found = {}
    for name, (settings, of_gradient) in ways.items():
        theirs, ours = updated(settings, of_gradient, False), updated(settings, of_gradient, True)
        found[name] = all(map(torch.equal, theirs[0], ours[0])), theirs[1], ours[1]
    return found


def test_they_give_the_numbers_of_dtensors_without_their_dispatch_but_where_ranks_must_talk() -> None:
    for found in run_ranks(both, 2):
        for name, (equal, theirs, ours) in found.items():
            assert equal, name
            assert theirs > ours == 0 or (name == SUMMANDS and theirs == ours), name


def test_other_optimizers_stay_as_they_are() -> None:
    class Own(torch.optim.AdamW):
        pass

    for kind in (Own, torch.optim.SGD, torch.optim.RAdam):
        optimizer = kind([nn.Parameter(torch.ones(2))])
        update_shards(optimizer)
        assert "_init_group" not in vars(optimizer)
