"""Compares frozen networks next to the one that trains, such as a teacher: every pipeline stage holds a full copy.

User code may change them between steps: a mean teacher's weights are averages of the student's. On a stage such code
sees the stage's part of the student only. So each stage would update another part of its copy of the teacher, and the
copy that is used, the last stage's, would be wrong in the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.checks.agreement import first_parted
from lightning_shard.sharding import local_tensor


class FrozenCopies:
    """A stage's frozen parameters of which other stages have copies. The constructor is a collective call.

    Args:
        module: The stage's.
        gather_over_stages: All-gathers a value over the pipeline.
    """

    def __init__(self, module: nn.Module, gather_over_stages: Callable[[Any], list[Any]]) -> None:
        frozen = {name: p for name, p in nn.Module.named_parameters(module) if not p.requires_grad}
        holders = Counter(name for stage in gather_over_stages([*frozen]) for name in stage)
        self._held = {name: parameter for name, parameter in frozen.items() if holders[name] > 1}
        self._is_any = max(holders.values(), default=0) > 1
        self._gather = gather_over_stages

    def check(self) -> None:
        """Compare the copies, by sums; a collective call over the pipeline.

        Raises:
            StepError: On every stage, if stages have changed their copies in different ways.
        """
        if not self._is_any:
            return
        parted = first_parted(self._gather(sums_of(self._held)))
        if parted is not None:
            raise StepError(
                f"{parted} is frozen, and every pipeline stage holds it; now the stages' copies differ. Code that"
                " updates it, as for a mean teacher, sees only its own stage's parameters of the network that trains"
                " (named_parameters(), state_dict()). Use pipeline_parallel_size=1."
            )


@torch.no_grad()
def sums_of(tensors: Mapping[Any, Tensor]) -> dict[Any, list[int]]:
    """Sum and norm of each, as bits. Version counters don't show changes made through ``.data``."""
    sums = [_sums(local_tensor(tensor).detach()) for tensor in tensors.values()]
    together = [each.to(sums[0].device) for each in sums]
    return dict(zip(tensors, torch.stack(together).view(torch.int64).tolist())) if sums else {}


def _sums(tensor: Tensor) -> Tensor:
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()  # one copy at a time
    return torch.stack([wide.sum(), wide.norm()])
