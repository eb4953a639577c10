"""Holds and checks the strategy's arguments other than the sizes of the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.errors import ConfigurationError, PlacementError
from lightning_shard.parallel.activation_checkpointing import Recomputing, check_recomputing
from lightning_shard.parallel.compiled_blocks import check_backend
from lightning_shard.parallel.experts.stacked import EXPERT_STYLE, ExpertPlan
from lightning_shard.parallel.plans import check_plan
from lightning_shard.parallel.tensor.plan import Plan
from lightning_shard.parallel.tensor.styles import STYLE_NAMES
from lightning_shard.pipeline.placement import check_policy


@dataclass(frozen=True)
class Settings:
    """The arguments that say how a module is cut, sharded and run; what can't work with any model is refused.

    Attributes:
        gathered_dtype: The dtype of the Trainer's mixed precision, in which FSDP all-gathers parameters.
    """

    placement: Literal["auto", "even"] | Sequence[int]
    pipeline_blocks: str | Sequence[str] | None
    tensor_parallel_plan: Plan | None
    expert_parallel_plan: ExpertPlan | None = None
    activation_checkpointing: Recomputing = None
    cpu_offload: bool = False
    compile_blocks: bool | str = False
    reshard_after_forward: bool | None = None
    rehearse: bool = field(default=True, compare=False)  # another Trainer may choose anew
    gathered_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_recomputing(self.activation_checkpointing)
        check_backend(self.compile_blocks)
        check_switches(cpu_offload=self.cpu_offload, rehearse=self.rehearse)
        if self.reshard_after_forward is not None:
            check_switches(reshard_after_forward=self.reshard_after_forward)
        check_policy(self.placement)
        check_plan("tensor_parallel_plan", self.tensor_parallel_plan, STYLE_NAMES, ParallelStyle)
        check_plan("expert_parallel_plan", self.expert_parallel_plan, {EXPERT_STYLE})
        names = self.pipeline_blocks
        is_text = names is None or isinstance(names, str)
        if not is_text and not (isinstance(names, Sequence) and names and all(isinstance(n, str) for n in names)):
            raise PlacementError(
                f'pipeline_blocks={names!r} must be the name of a list of blocks, such as "model.layers", or names of'
                " several lists and modules in the order in which they run; or None, to have it found."
            )

    def check_beside(self, sizes: Mapping[str, Any]) -> None:
        """Check the arguments against the sizes of the mesh axes, by argument."""
        if not self.compile_blocks:
            return
        for name in ("expert_parallel_size", "context_parallel_size"):
            if (size := sizes.get(name, 1)) > 1:
                raise ConfigurationError(
                    f"compile_blocks with {name}={size} isn't supported (untested): leave one out."
                )
        pipeline, tensor = sizes["pipeline_parallel_size"], sizes["tensor_parallel_size"]
        if pipeline > 1 and tensor > 1 and torch.__version__ < "2.12":
            raise ConfigurationError(
                f"compile_blocks with pipeline_parallel_size={pipeline} and tensor_parallel_size={tensor} fails within"
                f" torch {torch.__version__}: install torch 2.12 or newer, or leave one out."
            )

    @property
    def of_blocks(self) -> dict[str, Any]:
        """The settings that say how blocks are run and sharded, by name, without those left at their defaults."""
        names = ("activation_checkpointing", "cpu_offload", "compile_blocks", "reshard_after_forward")
        return {name: getattr(self, name) for name in names if getattr(self, name) not in (None, False)}


def check_switches(**switches: object) -> None:
    """Check that switches are bools."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name}={value!r} is neither True nor False: use one of these.")


def check_kinds(*, loss_weight: Any, reduce_each_microbatch: Any, timeout: Any) -> None:
    """Check the types of arguments that the strategy passes on unchanged."""
    check_switches(reduce_each_microbatch=reduce_each_microbatch)
    if loss_weight is not None and not callable(loss_weight):
        raise ConfigurationError(
            f"loss_weight={loss_weight!r} must be a function of a batch that gives a number, such as"
            ' lambda batch: batch["mask"].sum().'
        )
    if timeout is not None and (not isinstance(timeout, timedelta) or timeout <= timedelta(0)):
        raise ConfigurationError(
            f"timeout={timeout!r} must be a datetime.timedelta of more than 0 s, such as timedelta(minutes=30)."
        )
