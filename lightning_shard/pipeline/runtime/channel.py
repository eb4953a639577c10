"""Point-to-point communication between neighbouring stages, on different ranks or on one: values and gradients.

The tensors that a microbatch of a signature sends are agreed once (``crossing.py``). After that both sides know their
shapes, and only tensors are sent. The sender checks them against the agreement, since on a mismatch the receiver would
hang.

Values and gradients use separate process groups, and each direction its own group if values go both ways. On NCCL,
operations of one group run in call order, so two ranks that send to each other on one group would each wait for the
other's receive. Control messages go from host to host, on another group.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.messages import Key, Slot, described

Signature = tuple[str, tuple[Any, ...]]


def signature(microbatch: Any, kind: str) -> Signature:
    """The kind of step, and shapes and dtypes of the microbatch's tensors: these determine which values cross."""
    return kind, tree.outline(microbatch)


@dataclass(frozen=True)
class Ways:
    """Process groups of a pipeline's ranks, last rank first: for sends to later ranks, and to earlier ranks."""

    later: dist.ProcessGroup
    earlier: dist.ProcessGroup


@dataclass(frozen=True)
class Pipeline:
    """The ranks of a pipeline, as one of them sees them.

    Attributes:
        values: The groups for values, which go to the next stage.
        gradients: The groups for gradients, which go to the previous stage.
        control: A group of the same ranks, for control messages between hosts.
        rank_of: The pipeline rank of each stage.
        device: The device on which tensors are received.
    """

    values: Ways
    gradients: Ways
    control: dist.ProcessGroup
    rank_of: Sequence[int]
    device: torch.device


class _Link(NamedTuple):
    """A neighbouring stage on another rank: its rank in the groups, and the group of each kind of message with it."""

    peer: int
    groups: Mapping[str, dist.ProcessGroup]


@dataclass
class Channel:
    """One stage's endpoints of the links to its neighbours.

    Attributes:
        stage: The stage's index.
        handed: Queues between stages of this rank, which share this dict: by kind of message, and sending stage.
    """

    pipeline: Pipeline
    stage: int
    handed: dict[tuple[str, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))

    def __post_init__(self) -> None:
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._left = 0
        stages = range(len(self.pipeline.rank_of))
        neighbours = [stage for stage in (self.stage - 1, self.stage + 1) if stage in stages]
        self._links = {stage: self._link(stage) for stage in neighbours if not self.is_here(stage)}

    def _link(self, neighbour: int) -> _Link:
        pipeline, rank_of = self.pipeline, self.pipeline.rank_of
        first, second = sorted((self.stage, neighbour))
        if rank_of[second] > rank_of[first]:
            groups = {"value": pipeline.values.later, "gradient": pipeline.gradients.earlier}
        else:
            groups = {"value": pipeline.values.earlier, "gradient": pipeline.gradients.later}
        return _Link(max(rank_of) - rank_of[neighbour], groups)  # groups list the pipeline's last rank first

    def is_here(self, stage: int) -> bool:
        """Whether a stage is this rank's."""
        return self.pipeline.rank_of[stage] == self.pipeline.rank_of[self.stage]

    # In a step that runs call by call

    def gather(self, value: Any) -> list[Any]:
        """All-gather of objects over the pipeline; the value of the last stage's rank comes last."""
        values: list[Any] = [None] * len({*self.pipeline.rank_of})
        dist.all_gather_object(values, value, group=self.pipeline.control)
        return values[::-1]

    def share(self, values: Sequence[Tensor] | Sequence[Slot]) -> list[Tensor]:
        """Broadcast the last stage's tensors to all ranks; a collective over the pipeline.

        Args:
            values: The tensors on the rank of the last stage; their slots on other ranks.
        """
        shared = []
        for value in values:
            if isinstance(value, Tensor):
                tensor = value.contiguous()
            else:
                tensor = torch.empty(value.shape, dtype=value.dtype, device=self.pipeline.device)
            dist.broadcast(tensor, group=self.pipeline.values.later, group_src=0)
            shared.append(tensor)
        return shared

    # In each microbatch

    def send(self, values: Mapping[Key, Tensor], slots: Mapping[Key, Slot]) -> None:
        """Send the values of these slots to the next stage.

        Raises:
            StepError: They differ from the agreed slots for microbatches of this signature.
        """
        own = {key: Slot.of(values[key]) for key in slots if key in values}
        if own != slots:
            key, slot = next((key, slot) for key, slot in slots.items() if own.get(key) != slot)
            raise StepError(
                f"Stage {self.stage} would send {described(own.get(key))}, and sent {described(slot)} for an earlier"
                " microbatch of the same shapes: what crosses between stages may depend on a batch's shapes, not on its"
                " values (pad it), and what needs gradients may change where an epoch begins"
                " (on_train_epoch_start). Or use pipeline_parallel_size=1.",
                breaks=1,
            )
        for key in slots:
            self._send(values[key].detach(), "value", self.stage + 1)

    def expect(self, slots: Mapping[Key, Slot]) -> Callable[[], dict[Key, Tensor]]:
        """Post the receives of values from the previous stage, in send order; returns a function that waits for them.

        It gives leaves that require gradients if the sent values do.
        """
        arrive = self._expect(slots.values(), "value", self.stage - 1)

        def take() -> dict[Key, Tensor]:
            tensors = arrive()
            for tensor, slot in zip(tensors, slots.values()):
                tensor.requires_grad_(slot.requires_grad)
            return dict(zip(slots, tensors))

        return take

    def send_gradients(self, received: Iterable[Tensor]) -> None:
        """Send the gradients of received values to the previous stage; zeros for a value without one."""
        for tensor in received:
            gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            self._send(gradient, "gradient", self.stage - 1)

    def expect_gradients(self, sent: Iterable[Slot]) -> Callable[[], list[Tensor]]:
        """Post the receives of sent values' gradients from the next stage; returns a function that waits for them."""
        return self._expect(sent, "gradient", self.stage + 1)

    def send_needed(self, needed: Sequence[bool]) -> None:
        """Tell the previous stage which values that require gradients received one; once per signature."""
        flags = torch.tensor(needed, dtype=torch.uint8, device=self.pipeline.device)
        self._send(flags, "gradient", self.stage - 1)

    def receive_needed(self, count: int) -> list[bool]:
        """Receive these flags for ``count`` values from the next stage."""
        [flags] = self.expect_gradients([Slot((count,), torch.uint8, False)])()
        return [bool(flag) for flag in flags.tolist()]

    @property
    def sent(self) -> int:
        """The number of tensors sent to other ranks so far, completed or not."""
        return self._left + len(self._sending)

    def flush(self, until: int | None = None) -> None:
        """Wait until all sends have completed, or the first ``until`` of all tensors ever :attr:`sent`."""
        while self._sending and (until is None or self._left < until):
            self._sending[0][0].wait()
            self._sending.popleft()
            self._left += 1

    def _send(self, tensor: Tensor, what: str, to: int) -> None:
        if (link := self._links.get(to)) is None:
            self.handed[what, self.stage].append(tensor)
            return
        while self._sending and self._sending[0][0].is_completed():  # on gloo, only after a wait
            self._sending.popleft()
            self._left += 1
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=link.groups[what], group_dst=link.peer)
        assert work is not None
        self._sending.append((work, tensor))  # the tensor must live until the send has completed

    def _expect(self, slots: Iterable[Slot], what: str, source: int) -> Callable[[], list[Tensor]]:
        if (link := self._links.get(source)) is None:
            return lambda: [self.handed[what, source].popleft() for _ in slots]
        tensors, works = [], []
        for slot in slots:
            tensors.append(torch.empty(slot.shape, dtype=slot.dtype, device=self.pipeline.device))
            works.append(dist.irecv(tensors[-1], group=link.groups[what], group_src=link.peer))

        def arrive() -> list[Tensor]:
            for work in works:
                assert work is not None
                work.wait()
            return tensors

        return arrive
