"""Compares buffers that steps change between ranks that hold the same ones, of which one rank's are saved."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_shard.errors import PlanError
from lightning_shard.plugin.steps.checks.tensor_ranks import ROUNDING, differ, everyones, first_of, is_split
from lightning_shard.sharding import local_tensor

_Mark = tuple[tuple[int, int], Tensor]
"""A buffer's identity and version; its norm and sum."""


class ChangedBuffers:
    """Buffers that steps change, of a module as it is now."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = self._marks()
        self._told = False

    def check_tensor_ranks(self, axis: DeviceMesh) -> None:
        """Compare them over tensor ranks, which have to change them equally; a collective call over the axis.

        Raises:
            PlanError: On every rank of the axis, if one of them differs.
        """
        if wrong := self._apart(axis):
            raise PlanError(
                f"{first_of(wrong)}: the tensor ranks have changed this buffer to different values, so it is computed"
                " from features that tensor_parallel_plan splits. Leave the layers around it out of the plan, or give"
                ' the one before it the style "colwise_gather_output" and the layer after it "rowwise_split_input".'
            )

    def warn_of_data_ranks(self, axis: DeviceMesh, *, warns: bool) -> None:
        """Compare them over data ranks; a collective call over the axis, until some are told of.

        Args:
            warns: Whether this rank does.
        """
        if self._told or not (apart := self._apart(axis)):
            return
        self._told = True
        if not warns:
            return
        normalized = [name for name in apart if isinstance(self._owner(name), _BatchNorm)]
        others = [name for name in apart if name not in normalized]
        remedies = []
        if normalized:
            remedies.append(f"For {first_of(normalized)}, Trainer(sync_batchnorm=True) takes all ranks' statistics.")
        if others:
            remedies.append(f"For {first_of(others)}, reduce what updates it, as by self.all_gather(x).mean(0).")
        warnings.warn(
            "Data ranks have changed buffers to different values, each from its own samples, where one process has all"
            f" samples; the first rank's are saved. {' '.join(remedies)}",
            stacklevel=2,
        )

    def _owner(self, name: str) -> nn.Module:
        return self._module.get_submodule(name.rpartition(".")[0])

    def _apart(self, axis: DeviceMesh) -> list[str]:
        """Names of changed buffers that differ."""
        before, now = self._before, self._marks()
        buffers = [name for name, buffer in self._module.named_buffers() if name in now and not is_split(buffer, axis)]
        if not buffers:
            return []
        nothing = torch.zeros(2, dtype=torch.float64)
        rows = [nothing if name in before and _same(before[name], now[name]) else now[name][1] for name in buffers]
        everyone = everyones(torch.stack(rows), axis)
        return [name for name, is_apart in zip(buffers, differ(everyone, ROUNDING)) if is_apart]

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
