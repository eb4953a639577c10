"""Reports the memory that tensors occupy on each rank's device in a run, to compare with a plan's numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.arguments import size_text, table
from lightning_shard.layout import Layout
from lightning_shard.parallel.rank_compare import everyones
from lightning_shard.sharding import local_tensor


@dataclass(frozen=True)
class RankMemory:
    """Memory on one rank's device, in bytes. Tensors that share memory count once.

    Attributes:
        stages: The rank's pipeline stages.
        parameters: Its shards of the parameters.
        gradients: The gradients of these shards.
        optimizer: Its part of all optimizers' state.
        buffers: The module's buffers.
        allocated: All that torch's allocator has handed out; ``None`` on the CPU, where it isn't counted.
        peak: The maximum of that since the process began, or since ``torch.cuda.reset_peak_memory_stats()``.
    """

    rank: int
    stages: tuple[int, ...]
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    allocated: int | None = None
    peak: int | None = None

    @property
    def counted(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class HeldMemory:
    """The memory of all ranks, in rank order; ``str()`` is a table."""

    ranks: tuple[RankMemory, ...]

    def __str__(self) -> str:
        header = ["rank", "stage", "parameters", "gradients", "optimizer", "buffers", "counted", "allocated", "peak"]
        rows = [
            [
                str(each.rank),
                ", ".join(map(str, each.stages)),
                *map(size_text, (each.parameters, each.gradients, each.optimizer, each.buffers, each.counted)),
                *("" if number is None else size_text(number) for number in (each.allocated, each.peak)),
            ]
            for each in self.ranks
        ]
        return table(header, rows, header[2:])


def held_memory(
    module: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    layout: Layout,
    stages: Iterable[int],
    device: torch.device,
    group: dist.ProcessGroup,
) -> HeldMemory:
    """Measure all ranks' memory; a collective call.

    Args:
        module: With its parameters sharded, as they are between steps.
        device: This rank's; memory elsewhere, such as of offloaded shards, isn't counted.
    """
    seen: set[int] = set()

    def size(tensors: Iterable[Tensor]) -> int:
        total = 0
        for local in map(local_tensor, tensors):
            memory = local.untyped_storage()
            if memory.device.type == device.type and memory.data_ptr() not in seen:
                seen.add(memory.data_ptr())
                total += memory.nbytes()
        return total

    parameters = list(module.parameters())
    has_allocator = device.type == "cuda"
    own = RankMemory(
        layout.rank,
        tuple(stages),
        parameters=size(parameters),
        gradients=size(p.grad for p in parameters if p.grad is not None),
        optimizer=size(tree.tensors([list(optimizer.state.values()) for optimizer in optimizers])),
        buffers=size(module.buffers()),
        allocated=torch.cuda.memory_allocated(device) if has_allocator else None,
        peak=torch.cuda.max_memory_allocated(device) if has_allocator else None,
    )
    return HeldMemory(tuple(everyones(own, group)))
