"""Hidden states forward, gradients backward: what passes between neighbouring stages.

All stages of a pipeline read the same batch, so the shapes of a hidden state follow from the shapes of the microbatch:
they are sent along once for every new signature (see :func:`signature`), then both sides know them and only tensors
travel. The sender checks what it sends against them, since the receiver could only hang.

Forward and backward travel on process groups of their own: on NCCL, operations of one group run in the order of their
calls, and two neighbours that send to each other at once would each wait for the other's receive.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree


@dataclass(frozen=True)
class Slot(tree.Leaf):
    """Where a tensor stands in a hidden state, and what it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def signature(microbatch: Any, kind: str) -> Hashable:
    """What decides a hidden state's shapes: the kind of step and the shapes of the microbatch's tensors."""
    return kind, tuple((tuple(t.shape), t.dtype) for t in tree.tensors(microbatch))


@dataclass
class Channel:
    """This rank's ends of its pipeline.

    Attributes:
        forward_group: The ranks of this pipeline in stage order, for hidden states.
        backward_group: The same ranks, for gradients.
        device: Where tensors are received.
    """

    forward_group: dist.ProcessGroup
    backward_group: dist.ProcessGroup
    stage: int
    device: torch.device
    _incoming: dict[Hashable, Any] = field(default_factory=dict)
    _outgoing: dict[Hashable, Any] = field(default_factory=dict)
    _sending: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    def send_state(self, state: Any, key: Hashable) -> None:
        """Send a hidden state, of any nesting, to the next stage.

        Raises:
            StepError: Its shapes differ from those sent before for microbatches of the same shapes.
        """
        slots = tree.map_leaves(_slot, state)
        if key not in self._outgoing:
            dist.send_object_list([slots], group=self.forward_group, group_dst=self.stage + 1, device=self.device)
            self._outgoing[key] = slots
        elif self._outgoing[key] != slots:
            raise StepError(
                f"Stage {self.stage} hands on {slots}, and handed on {self._outgoing[key]} for an earlier microbatch"
                " of the same shapes: a hidden state's shapes may depend on those of the batch, not on its values (pad"
                " them), and what needs gradients can't change in mid-run (unfreeze from the start). Or use"
                " pipeline_parallel_size=1."
            )
        for tensor in tree.tensors(state):
            self._send(tensor.detach(), self.forward_group, self.stage + 1)

    def receive_state(self, key: Hashable) -> Any:
        """The previous stage's hidden state, its tensors leaves that gather gradients where the sender's did."""
        if key not in self._incoming:
            header: list[Any] = [None]
            dist.recv_object_list(header, group=self.forward_group, group_src=self.stage - 1, device=self.device)
            self._incoming[key] = header[0]
        return tree.map_leaves(self._receive_slot, self._incoming[key])

    def send_gradients(self, state: Any) -> None:
        """Send the gradients of a received state's tensors to the previous stage."""
        for tensor in tree.tensors(state):
            if tensor.requires_grad:
                gradient = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                self._send(gradient, self.backward_group, self.stage - 1)

    def receive_gradients(self, state: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of a sent state that need gradients, and their gradients from the next stage."""
        outputs = [tensor for tensor in tree.tensors(state) if tensor.requires_grad]
        gradients = []
        for output in outputs:
            gradient = torch.empty(output.shape, dtype=output.dtype, device=self.device)
            dist.recv(gradient, group=self.backward_group, group_src=self.stage + 1)
            gradients.append(gradient)
        return outputs, gradients

    def flush(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _receive_slot(self, leaf: Any) -> Any:
        if not isinstance(leaf, Slot):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=self.device)
        dist.recv(tensor, group=self.forward_group, group_src=self.stage - 1)
        return tensor.requires_grad_(leaf.requires_grad)

    def _send(self, tensor: Tensor, group: dist.ProcessGroup, to: int) -> None:
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=to)
        assert work is not None
        self._sending.append((work, tensor))  # the tensor must live until it has left


def _slot(leaf: Any) -> Any:
    return Slot(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
