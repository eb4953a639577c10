"""One parameter of the model on several stages: an embedding that is also the head's weight, a block that runs again.

Each of these stages holds it under all of its names, so tying stays what it was for the user's code: on the first
stage the embedding uses it, on the last the head. Their gradients are added before anything looks at them, so all
copies take the same steps and stay equal. A norm counts it once, and the last of the stages saves it.
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
    """A parameter by all of its names, and the stages, or the ranks of a pipeline, that hold it, in order."""

    names: tuple[str, ...]
    holders: tuple[int, ...]


def find_ties(groups: Iterable[tuple[str, ...]], stages_of: Callable[[str], Collection[int]]) -> list[Tie]:
    """The parameters that several stages hold.

    Args:
        groups: Each parameter's names.
        stages_of: The stages that use it by one of its names.
    """
    ties = (Tie(names, tuple(sorted({stage for name in names for stage in stages_of(name)}))) for names in groups)
    return [tie for tie in ties if len(tie.holders) > 1]


def over_ranks(ties: Iterable[Tie], rank_of: Mapping[int, int]) -> list[Tie]:
    """Those that several ranks hold: between stages of one rank a parameter is one, and its gradients add up."""
    ranks = (Tie(tie.names, tuple(sorted({rank_of[stage] for stage in tie.holders}))) for tie in ties)
    return [tie for tie in ranks if len(tie.holders) > 1]


class TiedGradients:
    """Adds up the gradients of the tied parameters of this rank.

    Args:
        module: Cut and sharded.
        ties: Those that ``rank`` holds, in the same order on all of their ranks.
        rank: This one, in its pipeline.
        group: The ranks of this pipeline, the last one first.
        control: The same ranks' hosts.
        device: Where tensors are received.
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

    @contextmanager
    def adding(self, *, last: bool) -> Iterator[None]:
        """Run backwards inside; what they add to the gradients on one rank is then added on all that hold them.

        A collective call of the ranks that hold the ties, if ``last``. What gradients held before was added before.

        Args:
            last: Whether gradients are reduced inside, before an optimizer step.

        Raises:
            StepError: On all of these ranks, where only some of them train the parameter.
        """
        earlier = [(parameter, parameter.grad) for _, parameter, _ in self._tied]
        for parameter, _ in earlier:
            parameter.grad = None
        yield
        if last:
            self._add()
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    @torch.no_grad()
    def _add(self) -> None:
        for name, parameter, ranks in self._tied:
            own = parameter.grad
            flags = torch.tensor([parameter.requires_grad, own is not None], dtype=torch.int32)
            trains, there = torch.stack(self._gather(flags, ranks, self._control)).T.tolist()
            if len(set(trains)) > 1:
                raise StepError(
                    f"{name} is on pipeline ranks {[*ranks]}, since it is tied, and only some of them train it:"
                    " freeze parameters by name, which is the same on all."
                )
            if not any(there):
                continue  # frozen, or unused on all, as it would be on one process
            if own is None:
                own = parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(own)
            sent = gradient.contiguous().to(self._device)  # it may be offloaded
            parts = self._gather(sent, ranks, self._group)  # in one order everywhere: the copies stay equal bit by bit
            gradient.copy_(torch.stack(parts).sum(0))

    def _gather(self, own: Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> list[Tensor]:
        """Each rank's tensor, in their order."""
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
