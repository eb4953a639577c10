"""Compares buffers that steps change between ranks that hold the same ones, of which one rank's are saved."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.errors import PlanError
from lightning_shard.plugin.steps.checks.tensor_ranks import ROUNDING, differ, everyones, is_split
from lightning_shard.sharding import local_tensor

_Mark = tuple[tuple[int, int], Tensor]
"""A buffer's identity and version; its norm and sum."""


class ChangedBuffers:
    """Buffers that steps change. Tensor ranks have to change them equally, since one rank's are saved."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._marks()

    def check(self, tensor_axis: DeviceMesh) -> None:
        """Compare buffers that have changed; a collective call over the tensor axis.

        Raises:
            PlanError: On every rank of the axis, if one of them differs.
        """
        before, now = self._before, self._marks()
        named = self._module.named_buffers()
        buffers = [name for name, buffer in named if name in now and not is_split(buffer, tensor_axis)]
        if not buffers:
            return
        nothing = torch.zeros(2, dtype=torch.float64)
        rows = [nothing if name in before and _same(before[name], now[name]) else now[name][1] for name in buffers]
        everyone = everyones(torch.stack(rows), tensor_axis)
        wrong = [name for name, is_apart in zip(buffers, differ(everyone, ROUNDING)) if is_apart]
        if wrong:
            raise PlanError(
                f"{wrong[0]}{f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''}: the tensor ranks have changed"
                " this buffer to different values, so it is computed from features that tensor_parallel_plan splits."
                " Leave the layers around it out of the plan, or give the one before it the style"
                ' "colwise_gather_output" and the layer after it "rowwise_split_input".'
            )

    def _marks(self) -> dict[str, _Mark]:
        """Marks of this stage's buffers. Versions alone don't show changes made through ``.data``."""
        return {
            name: ((id(buffer), buffer._version), _changed(buffer))
            for name, buffer in self._module.named_buffers()
            if type(buffer) in (Tensor, DTensor) and not buffer.is_meta
        }


def _same(one: _Mark, other: _Mark) -> bool:
    return one[0] == other[0] and torch.equal(one[1], other[1])


def _changed(buffer: Tensor) -> Tensor:
    """A buffer's norm and sum."""
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    values = local_tensor(values).detach().double().cpu()
    return torch.stack([torch.linalg.vector_norm(values), values.sum()])
