"""One parameter of the model on several stages: an embedding that is also the head's weight, a block that runs again.

Each of these stages holds it under all of its names, so tying stays what it was for the user's code: on the first
stage the embedding uses it, on the last the head. Their gradients are added before anything looks at them, so all
copies take the same steps and stay equal. A norm counts it once, and the last of the stages saves it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.sharding import local_tensor


@dataclass(frozen=True)
class Tie:
    """A parameter by all of its names, and the stages that hold it, in order."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def find_ties(groups: Iterable[tuple[str, ...]], stages_of: Callable[[str], Collection[int]]) -> list[Tie]:
    """The parameters that several stages hold.

    Args:
        groups: Each parameter's names.
        stages_of: The stages that use it by one of its names.
    """
    ties = (Tie(names, tuple(sorted({stage for name in names for stage in stages_of(name)}))) for names in groups)
    return [tie for tie in ties if len(tie.stages) > 1]


class TiedGradients:
    """Adds up the gradients of the tied parameters of this stage.

    Args:
        module: Cut and sharded.
        ties: Those that ``stage`` holds, in the same order on all of their stages.
        group: The ranks of this pipeline, the last stage's first.
        control: The same ranks' hosts.
        device: Where tensors are received.
    """

    def __init__(
        self,
        module: nn.Module,
        ties: Iterable[Tie],
        stage: int,
        group: dist.ProcessGroup,
        control: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._tied = [(tie.names[0], module.get_parameter(tie.names[0]), tie.stages) for tie in ties]
        self._stage = stage
        self._group = group
        self._control = control
        self._device = device

    @contextmanager
    def adding(self, *, last: bool) -> Iterator[None]:
        """Run backwards inside; what they add to the gradients on one stage is then added on all that hold them.

        A collective call of the stages that hold the ties, if ``last``. What gradients held before was added before.

        Args:
            last: Whether gradients are reduced inside, before an optimizer step.

        Raises:
            StepError: On all of these stages, where only some of them train the parameter.
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
        for name, parameter, stages in self._tied:
            own = parameter.grad
            flags = torch.tensor([parameter.requires_grad, own is not None], dtype=torch.int32)
            trains, there = torch.stack(self._gather(flags, stages, self._control)).T.tolist()
            if len(set(trains)) > 1:
                raise StepError(
                    f"{name} is on pipeline stages {[*stages]}, since it is tied, and only some of them train it:"
                    " freeze parameters by name, which is the same on all."
                )
            if not any(there):
                continue  # frozen, or unused on all, as it would be on one process
            if own is None:
                own = parameter.grad = torch.zeros_like(parameter)
            gradient = local_tensor(own)
            sent = gradient.contiguous().to(self._device)  # it may be offloaded
            parts = self._gather(sent, stages, self._group)  # in one order everywhere: the copies stay equal bit by bit
            gradient.copy_(torch.stack(parts).sum(0))

    def _gather(self, own: Tensor, stages: tuple[int, ...], group: dist.ProcessGroup) -> list[Tensor]:
        """Each stage's tensor, in their order."""
        parts = {stage: torch.empty_like(own) for stage in stages if stage != self._stage}
        last = dist.get_world_size(group) - 1
        operations = [
            operation
            for stage, part in parts.items()
            for operation in (
                dist.P2POp(dist.isend, own, group=group, group_peer=last - stage),
                dist.P2POp(dist.irecv, part, group=group, group_peer=last - stage),
            )
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [parts.get(stage, own) for stage in stages]
