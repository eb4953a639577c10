"""Joins buffers of which every pipeline stage has a copy, where code between steps changes each stage's otherwise.

Averages of weights that are buffers, as latent diffusion's ``LitEma`` keeps them, are updated by
``named_parameters()``, which has a stage's own parameters. So each stage's copies are up to date for these, as they
were at first for others, and one stage's are saved. A buffer that one stage has changed is the others' too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.checks.frozen_networks import sums_of
from lightning_shard.tree import as_bytes


class CopiedBuffers:
    """A stage's saved buffers of which other stages have copies. The constructor is a collective call.

    Args:
        module: The stage's.
        others: Names of buffers that are compared elsewhere.
        gather_over_stages: All-gathers a value over the pipeline.
        pipeline: The pipeline's ranks, the last stage's first, for tensors.
        device: Where this rank computes, which the group's backend serves.
    """

    def __init__(
        self,
        module: nn.Module,
        others: Collection[str],
        gather_over_stages: Callable[[Any], list[Any]],
        pipeline: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module = module
        self._gather = gather_over_stages
        self._pipeline = pipeline
        self._device = device
        own = sums_of({name: buffer for name, buffer in _saved(module).items() if name not in others})
        holders = Counter(name for stage in gather_over_stages([*own]) for name in stage)
        self._known = {name: sums for name, sums in own.items() if holders[name] > 1}
        self._is_any = max(holders.values(), default=0) > 1

    def join(self) -> None:
        """Have all copies be as the stage has made them that has changed its own; a collective call over the pipeline.

        Raises:
            StepError: On every stage, if stages have changed their copies in different ways.
        """
        if not self._is_any:
            return
        held = {name: buffer for name, buffer in _saved(self._module).items() if name in self._known}
        own = sums_of(held)
        stages = self._gather({name: (sums, sums != self._known[name]) for name, sums in own.items()})
        for name in dict.fromkeys(name for stage in stages for name in stage):
            found = [stage.get(name) for stage in stages]
            if len({tuple(each[0]) for each in found if each is not None}) == 1:
                continue
            changed = [index for index, each in enumerate(found) if each is not None and each[1]]
            if len({tuple(found[index][0]) for index in changed}) != 1 or None in found:
                raise StepError(
                    f"{name} is a buffer that every pipeline stage holds, and now the stages' copies differ: what"
                    " computes it between steps sees only its own stage's parameters (named_parameters(),"
                    " state_dict()). Compute it for each parameter by itself, or from"
                    " trainer.strategy.gather_full_parameters(); or use pipeline_parallel_size=1."
                )
            self._broadcast(held[name], changed[0])
        self._known.update(sums_of(held))

    @torch.no_grad()
    def _broadcast(self, buffer: Tensor, stage: int) -> None:
        sent = torch.empty(buffer.shape, dtype=buffer.dtype, device=self._device).copy_(buffer)
        # as bytes, since not every backend supports every dtype
        dist.broadcast(as_bytes(sent), group=self._pipeline, group_src=dist.get_world_size(self._pipeline) - 1 - stage)
        buffer.copy_(sent)


def _saved(module: nn.Module) -> dict[str, Tensor]:
    return {
        f"{path}.{key}" if path else key: buffer
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if type(buffer) is Tensor and key not in part._non_persistent_buffers_set and not buffer.is_meta
    }
