"""Gathers all parameters, unsharded, on rank 0."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.layout import Layout
from lightning_shard.plugin.groups import Groups
from lightning_shard.sharding import full_tensor


def gather_parameters(
    module: nn.Module, layout: Layout, groups: Groups | None, device: torch.device
) -> dict[str, Tensor]:
    """Return full parameters by name on rank 0's CPU, and an empty dict on other ranks. Collective over all ranks.

    They are copies, which later steps don't change.

    While it runs, the first data and tensor rank of each stage holds its stage's full parameters on its CPU.
    """
    gathered: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        full = full_tensor(parameter)
        if layout.rank in layout.pipelines()[0]:
            gathered[name] = full.to("cpu", copy=True)  # on one data rank it is the parameter's memory
    if groups is None or layout.pipeline_parallel_size == 1 or layout.rank not in layout.pipelines()[0]:
        return gathered if layout.rank == 0 else {}
    described = {name: (tuple(t.shape), t.dtype) for name, t in gathered.items()}
    stages = groups.gather_over_stages(described)
    for stage, names in enumerate(stages):
        for name, (shape, dtype) in names.items():
            of_rank = layout.pipelines()[0][stage]
            if layout.rank == of_rank and of_rank:
                dist.send(gathered[name].to(device).contiguous(), group=groups.pipeline, group_dst=0)
            elif layout.rank == 0 and of_rank:
                received = torch.empty(shape, dtype=dtype, device=device)
                dist.recv(received, group=groups.pipeline, group_src=layout.pipeline_parallel_size - 1 - stage)
                gathered[name] = received.cpu()
    return gathered if layout.rank == 0 else {}
