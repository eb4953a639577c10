"""What the user chose beside the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from lightning_shard.parallel.expert import ExpertPlan
from lightning_shard.parallel.recompute import Recomputing
from lightning_shard.parallel.tensor import Plan


@dataclass(frozen=True)
class Settings:
    """What the user chose, beside the layout.

    Attributes:
        gathered_dtype: That of the Trainer's mixed precision.
    """

    placement: Literal["auto", "even"] | Sequence[int]
    pipeline_blocks: str | Sequence[str] | None
    tensor_parallel_plan: Plan | None
    expert_parallel_plan: ExpertPlan | None = None
    activation_checkpointing: Recomputing = None
    cpu_offload: bool = False
    compile_blocks: bool | str = False
    reshard_after_forward: bool | None = None
    gathered_dtype: torch.dtype | None = None

    @property
    def of_blocks(self) -> dict[str, Any]:
        """The settings that say how blocks are run and sharded, by name, where they were chosen."""
        names = ("activation_checkpointing", "cpu_offload", "compile_blocks", "reshard_after_forward")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}
