"""Compares buffers that steps change between ranks that hold the same ones, of which one rank's are saved."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_shard.dense import dense_parts
from lightning_shard.errors import PlanError
from lightning_shard.parallel.tensor.check_handed_on import norm_and_sum
from lightning_shard.plugin.steps.checks.tensor_ranks import ROUNDING, differ, everyones, first_of, is_split
from lightning_shard.sharding import local_tensor

_REDUCED = 1e-6
"""Relative to the norm, buffers of data ranks differ by less if they are reduced, and by more if each rank has its own:
also where a step moves a few rows of a codebook a little."""


class Mark(NamedTuple):
    """What a buffer is known again by. Versions alone don't show changes made through ``.data``."""

    identity: int
    version: int
    numbers: Tensor

    @classmethod
    def of(cls, buffer: Tensor) -> Mark:
        numbers = torch.stack([*map(_numbers, dense_parts(local_tensor(buffer)))]).sum(0)
        return cls(id(buffer), buffer._version, numbers)

    def is_same(self, other: Mark) -> bool:
        return self[:2] == other[:2] and torch.equal(self.numbers, other.numbers)

    def has_version_of(self, buffer: Tensor) -> bool:
        return self[:2] == (id(buffer), buffer._version)


def _numbers(local: Tensor) -> Tensor:
    has_norm = local.is_complex() or (local.is_floating_point() and local.dtype.itemsize > 1)
    return norm_and_sum(local if has_norm else local.double())


class ChangedBuffers:
    """Buffers that steps change, of a module as it is now.

    Only those that it has now are compared: which masks and tables a step creates may depend on a rank's batches.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = [
            name for name, buffer in module.named_buffers() if type(buffer) in (Tensor, DTensor) and not buffer.is_meta
        ]
        self._before: dict[str, Mark] | None = None
        self._has_warned = False

    def begin(self) -> None:
        """A training step begins."""
        if self._before is None:
            self._before = {name: Mark.of(buffer) for name, buffer in self._now().items()}

    def check_tensor_ranks(self, axis: DeviceMesh) -> None:
        """Compare them over tensor ranks, which have to change them equally; a collective call over the axis.

        Raises:
            PlanError: On every rank of the axis, if one of them differs.
        """
        split = {name for name, buffer in self._now().items() if is_split(buffer, axis)}
        if wrong := self._apart(axis.get_group(), axis.device_type, ROUNDING, split):
            raise PlanError(
                f"{first_of(wrong)}: the tensor ranks have changed this buffer to different values, so it is computed"
                " from features that tensor_parallel_plan splits. Leave the layers around it out of the plan, or give"
                ' the one before it the style "colwise_gather_output" and the layer after it "rowwise_split_input".'
            )

    def warn_of_data_ranks(self, ranks: dist.ProcessGroup, device_type: str, *, warns: bool) -> None:
        """Compare them over data ranks; a collective call over these, until some are told of.

        Args:
            device_type: Of the tensors of that group's calls.
            warns: Whether this rank does.
        """
        if self._has_warned or not (apart := self._apart(ranks, device_type, _REDUCED)):
            return
        self._has_warned = True
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

    def _now(self) -> dict[str, Tensor]:
        held = dict(self._module.named_buffers())
        return {name: held[name] for name in self._names if type(held.get(name)) in (Tensor, DTensor)}

    def _apart(
        self, ranks: dist.ProcessGroup, device_type: str, rounding: float, split: Collection[str] = ()
    ) -> list[str]:
        """Names of changed buffers that differ by more than rounding; those that are split over the ranks are left out.

        Args:
            rounding: Relative to a buffer's norm.
        """
        if self._before is None or not self._names:
            return []
        nothing = torch.zeros(2, dtype=torch.float64, device=device_type)
        rows, now = dict.fromkeys(self._names, nothing), self._now()
        for name, buffer in now.items():
            mark = Mark.of(buffer)
            if name not in split and not (name in self._before and mark.is_same(self._before[name])):
                rows[name] = mark.numbers.to(device_type)
        everyone = everyones(torch.stack([*rows.values()]), ranks, device_type)
        return [name for name, is_apart in zip(rows, differ(everyone, rounding)) if is_apart]
