"""Values forward, gradients backward: what passes between neighbouring stages, on two ranks or on one.

What a microbatch of a signature brings is agreed once (``crossing.py``): then both sides know the shapes, and only
tensors travel. The sender checks what it sends against them, since the receiver could only hang.

Forward and backward travel on process groups of their own, and each way in another one where values go both ways: on
NCCL, operations of one group run in the order of their calls, and two ranks that send to each other at once would each
wait for the other's receive. What stages say to each other travels from host to host, on a group of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Delivery, Key, Request, Slot


def signature(microbatch: Any, kind: str) -> Hashable:
    """What decides what crosses, and its shapes: the kind of step and the shapes of the microbatch's tensors."""
    return kind, tuple((tuple(t.shape), t.dtype) for t in tree.tensors(microbatch))


@dataclass(frozen=True)
class Ways:
    """Process groups of the ranks of a pipeline, the last one first: to later ranks, and to earlier ones."""

    later: dist.ProcessGroup
    earlier: dist.ProcessGroup


@dataclass
class Channel:
    """One stage's ends of its pipeline.

    Attributes:
        values: Of values, which go from stage to stage.
        gradients: Of gradients, which go back.
        control: The same ranks' hosts, for what stages say.
        stage: The stage.
        rank_of: Each stage's rank.
        device: Where tensors are received.
        handed: What stages of this rank hand to each other, by what it is, and from which stage.
    """

    values: Ways
    gradients: Ways
    control: dist.ProcessGroup
    stage: int
    rank_of: Sequence[int]
    device: torch.device
    handed: dict[tuple[str, int], deque[Any]] = field(default_factory=lambda: defaultdict(deque))
    _sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    _left: int = 0

    # While it is found out what crosses

    def announce(self, delivery: Delivery | None) -> None:
        """Tell the next stage what it will be sent; ``None``: nothing, since something is missing before."""
        self._say(delivery, self.stage + 1)

    def hear(self) -> Delivery | None:
        """What the stage before announces."""
        return self._listen(self.stage - 1)

    def request(self, request: Request) -> None:
        """Answer the stage before."""
        self._say(request, self.stage - 1)

    def requested(self) -> Request:
        """The next stage's answer."""
        return self._listen(self.stage + 1)

    # Of a step that goes call by call

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, that of the last stage's at the end; a collective call over the pipeline."""
        values: list[Any] = [None] * len({*self.rank_of})
        dist.all_gather_object(values, value, group=self.control)
        return values[::-1]

    def share(self, values: Sequence[Tensor] | Sequence[Slot]) -> list[Tensor]:
        """The last stage's tensors, on every rank; a collective call over the pipeline.

        Args:
            values: Where the last stage is the tensors, on other ranks their slots.
        """
        shared = []
        for value in values:
            if isinstance(value, Tensor):
                tensor = value.contiguous()
            else:
                tensor = torch.empty(value.shape, dtype=value.dtype, device=self.device)
            dist.broadcast(tensor, group=self.values.later, group_src=0)
            shared.append(tensor)
        return shared

    # Of each microbatch

    def send(self, values: Mapping[Key, Tensor], slots: Mapping[Key, Slot]) -> None:
        """Send the values of these slots to the next stage.

        Raises:
            StepError: They differ from what was agreed for microbatches of the same shapes.
        """
        own = {key: Slot.of(values[key]) for key in slots if key in values}
        if own != slots:
            key, slot = next((key, slot) for key, slot in slots.items() if own.get(key) != slot)
            raise StepError(
                f"Stage {self.stage} hands on {own.get(key)} as {key}, and handed on {slot} for an earlier microbatch"
                " of the same shapes: what crosses between stages may depend on a batch's shapes, not on its values"
                " (pad it), and what needs gradients can't change in mid-run (unfreeze from the start). Or use"
                " pipeline_parallel_size=1."
            )
        for key in slots:
            self._send(values[key].detach(), "value", self.values, self.stage + 1)

    def receive(self, slots: Mapping[Key, Slot]) -> dict[Key, Tensor]:
        """What the stage before sends, as leaves that gather gradients where the sender's values need them."""
        return self.expect(slots)()

    def expect(self, slots: Mapping[Key, Slot]) -> Callable[[], dict[Key, Tensor]]:
        """Post the receives, in the order in which they are sent; what is returned waits for them."""
        arrive = self._expect(slots.values(), "value", self.values, self.stage - 1)

        def take() -> dict[Key, Tensor]:
            return {key: t.requires_grad_(slot.requires_grad) for (key, slot), t in zip(slots.items(), arrive())}

        return take

    def send_gradients(self, received: Iterable[Tensor]) -> None:
        """Send the gradients of received values to the previous stage; zeros for what has none."""
        for tensor in received:
            gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            self._send(gradient, "gradient", self.gradients, self.stage - 1)

    def expect_gradients(self, sent: Iterable[Slot]) -> Callable[[], list[Tensor]]:
        """Post the receives of the gradients of sent values, from the next stage."""
        return self._expect(sent, "gradient", self.gradients, self.stage + 1)

    def send_needed(self, needed: Sequence[bool]) -> None:
        """Tell the previous stage, once for a signature, which of the values that need gradients have got one."""
        flags = torch.tensor(needed, dtype=torch.uint8, device=self.device)
        self._send(flags, "gradient", self.gradients, self.stage - 1)

    def receive_needed(self, count: int) -> list[bool]:
        """What the next stage tells of ``count`` values."""
        [flags] = self.expect_gradients([Slot((count,), torch.uint8, False)])()
        return [bool(flag) for flag in flags.tolist()]

    @property
    def sent(self) -> int:
        """How many tensors have been sent to other ranks so far."""
        return self._left + len(self._sending)

    def flush(self, until: int | None = None) -> None:
        """Wait until everything that was sent has left, or so many of all tensors ever :attr:`sent`."""
        while self._sending and (until is None or self._left < until):
            self._sending[0][0].wait()
            self._forget_first()

    def _forget_first(self) -> None:
        self._sending.popleft()
        self._left += 1

    def _send(self, tensor: Tensor, what: str, ways: Ways, to: int) -> None:
        if self.rank_of[to] == self.rank_of[self.stage]:
            self.handed[what, self.stage].append(tensor)
            return
        while self._sending and self._sending[0][0].is_completed():  # gloo's is when it was waited for
            self._forget_first()
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=self._way(ways, self.stage, to), group_dst=self._peer(to))
        assert work is not None
        self._sending.append((work, tensor))  # the tensor must live until it has left

    def _expect(self, slots: Iterable[Slot], what: str, ways: Ways, source: int) -> Callable[[], list[Tensor]]:
        slots = [*slots]
        if self.rank_of[source] == self.rank_of[self.stage]:
            return lambda: [self.handed[what, source].popleft() for _ in slots]
        group, peer = self._way(ways, source, self.stage), self._peer(source)
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=self.device) for slot in slots]
        works = [dist.irecv(tensor, group=group, group_src=peer) for tensor in tensors]

        def arrive() -> list[Tensor]:
            for work in works:
                assert work is not None
                work.wait()
            return tensors

        return arrive

    def _way(self, ways: Ways, source: int, to: int) -> dist.ProcessGroup:
        return ways.later if self.rank_of[to] > self.rank_of[source] else ways.earlier

    def _peer(self, stage: int) -> int:
        """A stage's rank in the groups."""
        return max(self.rank_of) - self.rank_of[stage]

    def _say(self, message: Any, to: int) -> None:
        if self.rank_of[to] == self.rank_of[self.stage]:
            self.handed["message", self.stage].append(message)
            return
        dist.send_object_list([message], group=self.control, group_dst=self._peer(to))

    def _listen(self, source: int) -> Any:
        if self.rank_of[source] == self.rank_of[self.stage]:
            return self.handed["message", source].popleft()
        message: list[Any] = [None]
        dist.recv_object_list(message, group=self.control, group_src=self._peer(source))
        return message[0]
