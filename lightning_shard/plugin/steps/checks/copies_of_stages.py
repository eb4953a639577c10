"""Joins what every pipeline stage has a copy of, where code between steps changes each stage's copy otherwise.

These are frozen networks next to the one that trains, such as a teacher, and saved buffers. A mean teacher's weights
are averages of the student's, and so are the buffers of latent diffusion's ``LitEma``. Code that updates them goes over
``named_parameters()``, which has a stage's own parameters of the network that trains. So each stage's copies are up to
date for these only. A copy that one stage has changed is the others' too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.dense import is_dense
from lightning_shard.errors import StepError
from lightning_shard.parallel.rank_compare import by_name, fingerprints
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.sharding import local_tensor

_OF_FROZEN = (
    "is frozen, and every pipeline stage holds it; now the stages' copies differ. Code"
    " that updates it, as for a mean teacher, sees only its own stage's parameters of the network that trains"
    " (named_parameters(), state_dict()): have it update each weight by the one of the same name, after every batch"
    " from the first on, or use pipeline_parallel_size=1."
)
_OF_BUFFERS = (
    "is a buffer that every pipeline stage holds, and now the stages' copies differ: what"
    " computes it between steps sees only its own stage's parameters (named_parameters(), state_dict()). Compute it for"
    " each parameter by itself, or from {whole_parameters}; or use pipeline_parallel_size=1."
)


class CopiesOfStages:
    """Frozen parameters and saved buffers of which other stages have copies. The constructor is a collective call.

    Args:
        module: The stage's.
        others: Names of buffers that are compared elsewhere.
        gather_over_stages: All-gathers a value over the pipeline.
        pipeline: The pipeline's ranks, the last stage's first, for tensors.
        device: Where this rank computes, which that group's backend serves.
        whole: Where code between steps finds all parameters, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        others: Collection[str],
        gather_over_stages: Callable[[Any], list[Any]],
        pipeline: dist.ProcessGroup,
        device: torch.device,
        whole: str = "trainer.strategy.gather_full_parameters()",
    ) -> None:
        self._module = module
        self._of_buffers = _OF_BUFFERS.format(whole_parameters=whole)
        self._others = others
        self._frozen = {name: p for name, p in nn.Module.named_parameters(module) if not p.requires_grad}
        self._gather = gather_over_stages
        self._pipeline = pipeline
        self._device = device
        own = sums_of(self._held())
        holders = Counter(name for stage in gather_over_stages([*own]) for name in stage)
        self._known = {name: sums for name, sums in own.items() if holders[name] > 1}
        self._is_any = max(holders.values(), default=0) > 1
        self._joined: set[str] = set()
        """Names that have parted before: the same on all stages, which all hold them."""

    def join(self, *, is_early: bool, tolerates: bool = False) -> dict[str, str]:
        """Have all copies be as the stage has made them that has changed its own; a collective call over the pipeline.

        Args:
            is_early: In a run's first steps. Frozen parameters may not begin to part later, when steps may have used
                them. Buffers may: steps on stages seldom read those that hooks compute of parameters.
            tolerates: Leave copies as they are that can't be joined, in place of an error, and if it would spread NaN.

        Returns:
            What an error would say of copies that have parted, by name.

        Raises:
            StepError: On every stage, if stages have changed their copies in different ways.
        """
        if not self._is_any:
            return {}
        held = {name: held for name, held in self._held().items() if name in self._known}
        return self._join(held, is_early=is_early, tolerates=tolerates)

    def join_for_step(self) -> None:
        """Join the frozen ones that were seen to part."""
        if parted := {name: self._frozen[name] for name in self._frozen if name in self._joined}:
            self._join(parted, is_early=False)

    def _join(self, held: Mapping[str, Tensor], *, is_early: bool, tolerates: bool = False) -> dict[str, str]:
        apart: dict[str, str] = {}
        own = sums_of(held)
        stages = self._gather({name: (sums, sums != self._known.get(name)) for name, sums in own.items()})
        for name, found in by_name(stages).items():
            if len({sums for sums, _ in found.values()}) == 1:
                continue
            changed = {sums: stage for stage, (sums, has_changed) in reversed(found.items()) if has_changed}
            is_one = len(found) == len(stages) and len(changed) == 1
            may_join = is_one and (is_early or name in self._joined or name not in self._frozen)
            text = f"{name} {_OF_FROZEN if name in self._frozen else self._of_buffers}"
            if not may_join and not tolerates:
                raise StepError(text, breaks=6)
            spoils = is_one and tolerates and "nan" in min(changed)
            if not may_join or spoils:
                apart[name] = text
            if not is_one or spoils:
                continue
            self._joined.add(name)
            (stage,) = changed.values()  # the first that has it
            local = local_tensor(held[name])
            local.copy_(values_of(len(stages) - 1 - stage, local, self._pipeline, self._device))
        self._known.update(sums_of(held))
        return apart

    def _held(self) -> dict[str, Tensor]:
        return self._frozen | {
            name: buffer for name, buffer in _saved(self._module).items() if name not in self._others
        }


def _saved(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a state dict, but for sparse and nested ones."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if type(buffer) is Tensor
        and key not in part._non_persistent_buffers_set
        and is_dense(buffer)
        and not buffer.is_meta
    }


def sums_of(tensors: Mapping[Any, Tensor]) -> dict[Any, str]:
    """What each is known again by. Version counters don't show changes made through ``.data``."""
    return {key: repr(each) for key, each in fingerprints(tensors).items()}  # equal for NaN too
