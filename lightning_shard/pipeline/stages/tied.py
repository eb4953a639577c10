"""Tied parameters: replicas of one parameter on several stages, whose gradients are summed over these stages.

Examples are an embedding that is also the head's weight, and a block that runs at places of several stages
(``docs/decisions/tied.md``). Gradients are summed before anything reads them, so all replicas take the same optimizer
steps and stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.sharding import local_tensor


@dataclass(frozen=True)
class Tie:
    """A tied parameter: all of its names, and the stages (or pipeline ranks) that hold it, ascending."""

    names: tuple[str, ...]
    holders: tuple[int, ...]


def find_ties(groups: Iterable[tuple[str, ...]], stages_of: Callable[[str], Collection[int]]) -> list[Tie]:
    """Find the parameters that several stages hold.

    Args:
        groups: All names of each parameter.
        stages_of: The stages that use a parameter by this name.
    """
    ties = (Tie(names, tuple(sorted({stage for name in names for stage in stages_of(name)}))) for names in groups)
    return [tie for tie in ties if len(tie.holders) > 1]


def over_ranks(ties: Iterable[Tie], rank_of: Mapping[int, int]) -> list[Tie]:
    """The ties over ranks. Stages of one rank share one parameter, in which their gradients accumulate."""
    ranks = (Tie(tie.names, tuple(sorted({rank_of[stage] for stage in tie.holders}))) for tie in ties)
    return [tie for tie in ranks if len(tie.holders) > 1]


class TiedGradients:
    """Sums the gradients of this rank's tied parameters over the ranks that hold them.

    Args:
        module: The cut and sharded module.
        ties: The ties that ``rank`` holds, in the same order on all of their ranks.
        rank: This rank, in its pipeline.
        group: The process group of this pipeline, its last rank first.
        control: A process group of the same ranks, for CPU tensors.
        device: The device on which gradients are received.
    """

    def __init__(
        self,
        module: nn.Module,
        ties: Iterable[Tie],
        rank: int,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._tied = [(tie.names[0], module.get_parameter(tie.names[0]), tie.holders) for tie in ties]
        self._rank = rank
        self._group = group
        self._control = control
        self._device = device
        self._earlier: list[Tensor | None] | None = None  # gradients from before an accumulation that is under way

    @contextmanager
    def adding(self, *, first: bool, last: bool) -> Iterator[None]:
        """Context of a batch's backwards. At the end of an accumulation, its gradients are summed over holding ranks.

        A collective over these ranks, if ``last``. Gradients from before the accumulation are set aside and added back:
        they are already sums.

        Args:
            first: Whether the batch is the first one of an accumulation.
            last: Whether an optimizer step follows. Only then all gradients are on their parameters: of scalars, and
                where each backward reduces, they are there after earlier batches too.

        Raises:
            StepError: Only some of the ranks train the parameter. Raised on all of them.
        """
        if first or self._earlier is None:
            self._earlier = [parameter.grad for _, parameter, _ in self._tied]
            for _, parameter, _ in self._tied:
                parameter.grad = None
        yield
        if not last:
            return
        self._add()
        for (_, parameter, _), gradient in zip(self._tied, self._earlier):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self._earlier = None

    @torch.no_grad()
    def _add(self) -> None:
        for name, parameter, ranks in self._tied:
            own = parameter.grad
            flags = torch.tensor([parameter.requires_grad, own is not None], dtype=torch.int32)
            trains, there = torch.stack(self._gather(flags, ranks, self._control)).T.tolist()
            if len(set(trains)) > 1:
                raise StepError(
                    f"{name} is on pipeline ranks {[*ranks]}, since it is tied, and only some of them train it:"
                    " freeze parameters by name, which is the same on all.",
                    breaks=10,
                )
            if not any(there):
                continue  # frozen, or unused on all, as it would be on one process
            if own is None:
                own = parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(own)
            sent = gradient.contiguous().to(self._device)  # it may be offloaded
            parts = self._gather(sent, ranks, self._group)  # summed in one order on all ranks: replicas stay bit-equal
            gradient.copy_(torch.stack(parts).sum(0))

    def _gather(self, own: Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> list[Tensor]:
        """All-gather over ``ranks``: each rank's tensor, in their order."""
        parts = {rank: torch.empty_like(own) for rank in ranks if rank != self._rank}
        last = dist.get_world_size(group) - 1
        operations = [
            operation
            for rank, part in parts.items()
            for operation in (
                dist.P2POp(dist.isend, own, group=group, group_peer=last - rank),
                dist.P2POp(dist.irecv, part, group=group, group_peer=last - rank),
            )
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [parts.get(rank, own) for rank in ranks]
