"""Joins what every pipeline stage has a copy of, where code between steps changes each stage's copy otherwise.

These are frozen networks next to the one that trains, such as a teacher, and saved buffers. A mean teacher's weights
are averages of the student's, and so are the buffers of latent diffusion's ``LitEma``. Code that updates them goes over
``named_parameters()``, which has a stage's own parameters of the network that trains. So each stage's copies are up to
date for these only. A copy that one stage has changed is the others' too.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.dense import is_dense
from lightning_shard.errors import StepError
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.sharding import local_tensor


class Copies:
    """A stage's tensors of which other stages have copies. The constructor is a collective call.

    Args:
        held: This stage's, by name, as they are now.
        refusal: What an error says of one, behind its name.
        gather_over_stages: All-gathers a value over the pipeline.
        pipeline: The pipeline's ranks, the last stage's first, for tensors.
        device: Where this rank computes, which that group's backend serves.
    """

    def __init__(
        self,
        held: Callable[[], Mapping[str, Tensor]],
        refusal: str,
        gather_over_stages: Callable[[Any], list[Any]],
        pipeline: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._held = held
        self._refusal = refusal
        self._gather = gather_over_stages
        self._pipeline = pipeline
        self._device = device
        own = sums_of(held())
        holders = Counter(name for stage in gather_over_stages([*own]) for name in stage)
        self._known = {name: sums for name, sums in own.items() if holders[name] > 1}
        self._is_any = max(holders.values(), default=0) > 1
        self._joined: set[str] = set()

    def join(self, *, begins: bool = True, only_joined: bool = False, tolerates: bool = False) -> dict[str, str]:
        """Have all copies be as the stage has made them that has changed its own; a collective call over the pipeline.

        Args:
            begins: Copies may part that haven't before; otherwise steps may have used them meanwhile.
            only_joined: Look at copies that have parted before.
            tolerates: Leave copies as they are that can't be joined, in place of an error, and if it would spread NaN.

        Returns:
            What an error would say of copies that have parted, by name.

        Raises:
            StepError: On every stage, if stages have changed their copies in different ways.
        """
        apart: dict[str, str] = {}
        if not (self._joined if only_joined else self._is_any):
            return apart
        held = {name: t for name, t in self._held().items() if name in (self._joined if only_joined else self._known)}
        own = sums_of(held)
        stages = self._gather({name: (sums, sums != self._known.get(name)) for name, sums in own.items()})
        for name in dict.fromkeys(name for stage in stages for name in stage):
            found = [(index, *stage[name]) for index, stage in enumerate(stages) if name in stage]
            if all(sums == found[0][1] for _, sums, _ in found):
                continue
            changed = [(index, sums) for index, sums, is_other in found if is_other]
            is_one = len(found) == len(stages) and bool(changed) and all(s == changed[0][1] for _, s in changed)
            may_join = is_one and (begins or name in self._joined)
            if not may_join and not tolerates:
                raise StepError(f"{name} {self._refusal}")
            spoils = is_one and tolerates and math.isnan(_number(changed[0][1][1]))
            if not may_join or spoils:
                apart[name] = f"{name} {self._refusal}"
            if not is_one or spoils:
                continue
            self._joined.add(name)
            local, source = local_tensor(held[name]).detach(), len(stages) - 1 - changed[0][0]
            local.copy_(values_of(source, local, self._pipeline, self._device))
        self._known.update(sums_of(held))
        return apart


_OF_FROZEN = (
    "is frozen, and every pipeline stage holds it; now the stages' copies differ. Code that updates it, as for a mean"
    " teacher, sees only its own stage's parameters of the network that trains (named_parameters(), state_dict()): have"
    " it update each weight by the one of the same name, after every batch from the first on, or use"
    " pipeline_parallel_size=1."
)
_OF_BUFFERS = (
    "is a buffer that every pipeline stage holds, and now the stages' copies differ: what computes it between steps"
    " sees only its own stage's parameters (named_parameters(), state_dict()). Compute it for each parameter by itself,"
    " or from trainer.strategy.gather_full_parameters(); or use pipeline_parallel_size=1."
)


class CopiesOfStages:
    """Frozen parameters and saved buffers of which other stages have copies. The constructor is a collective call.

    Args:
        module: The stage's.
        others: Names of buffers that are compared elsewhere.
        rest: The further arguments of :class:`Copies`.
    """

    def __init__(self, module: nn.Module, others: Collection[str], *rest: Any) -> None:
        frozen = {name: p for name, p in nn.Module.named_parameters(module) if not p.requires_grad}
        self._frozen = Copies(lambda: frozen, _OF_FROZEN, *rest)
        self._buffers = Copies(
            lambda: {name: buffer for name, buffer in _saved(module).items() if name not in others}, _OF_BUFFERS, *rest
        )

    def join(self, *, is_early: bool, tolerates: bool = False) -> dict[str, str]:
        """Join them; a collective call over the pipeline.

        Args:
            is_early: In a run's first steps. Buffers may part later, too: steps on stages seldom read those that hooks
                compute of parameters.
            tolerates: See :meth:`Copies.join`.

        Raises:
            StepError: On every stage, if stages have changed their copies in different ways.
        """
        return {**self._frozen.join(begins=is_early, tolerates=tolerates), **self._buffers.join(tolerates=tolerates)}

    def join_for_step(self) -> None:
        """Join those that were seen to part."""
        self._frozen.join(only_joined=True)


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


@torch.no_grad()
def sums_of(tensors: Mapping[Any, Tensor]) -> dict[Any, list[int]]:
    """Sum and norm of each, as bits. Version counters don't show changes made through ``.data``."""
    sums = [_sums(local_tensor(tensor).detach()) for tensor in tensors.values()]
    together = [each.to(sums[0].device) for each in sums]
    return dict(zip(tensors, torch.stack(together).view(torch.int64).tolist())) if sums else {}


def _number(bits: int) -> float:
    return struct.unpack("d", struct.pack("q", bits))[0]


def _sums(tensor: Tensor) -> Tensor:
    wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()  # one copy at a time
    return torch.stack([wide.sum(), wide.norm()])
