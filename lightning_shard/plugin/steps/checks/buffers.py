"""Buffers that steps change: compared between ranks that hold the same ones, refused where stages hold copies."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.arguments import few
from lightning_shard.errors import StepError
from lightning_shard.parallel.rank_compare import (
    NOTHING,
    Fingerprint,
    differing,
    exchanged,
    fingerprints,
)
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.torch_private import BatchNorm

_REDUCED = 1e-6
"""Relative to the norm, buffers of data ranks differ by less if they are reduced, and by more if each rank has its own:
also where a step moves a few rows of a codebook a little."""


class Mark(NamedTuple):
    """What a buffer is known again by. Versions alone don't show changes made through ``.data``."""

    identity: int
    version: int
    values: Fingerprint

    def has_version_of(self, buffer: Tensor) -> bool:
        return self[:2] == (id(buffer), buffer._version)


def _marks(buffers: Mapping[str, Tensor]) -> dict[str, Mark]:
    values = fingerprints(buffers)
    return {name: Mark(id(buffer), buffer._version, values[name]) for name, buffer in buffers.items()}


class ChangedBuffers:
    """Buffers that training steps change, of a module as it is now. Of equal copies on ranks one rank's are saved.

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
            self._before = _marks(self._now())

    def changed(self) -> dict[str, Fingerprint]:
        """What this rank has changed since; zeros for the others, which another rank may have changed."""
        known = self._before or {}
        marks = _marks(self._now()) if known else {}
        changed = {name: mark.values for name, mark in marks.items() if repr(mark) != repr(known.get(name))}
        return {name: ((), *changed.get(name, NOTHING)[1:]) for name in self._names}

    def warn_of_data_ranks(self, ranks: dist.ProcessGroup, *, warns: bool) -> None:
        """Compare them over data ranks; a collective call over these, until some are reported.

        Args:
            warns: Whether this rank does.
        """
        if self._has_warned or not self._names:
            return
        if not (apart := differing(exchanged(ranks, self.changed())[0], _REDUCED)):
            return
        self._has_warned = True
        if not warns:
            return
        normalized = [name for name in apart if isinstance(self._owner(name), BatchNorm)]
        others = [name for name in apart if name not in normalized]
        remedies = []
        if normalized:
            remedies.append(f"For {few(normalized, 1)}, Trainer(sync_batchnorm=True) takes all ranks' statistics.")
        if others:
            remedies.append(f"For {few(others, 1)}, reduce what updates it, as by self.all_gather(x).mean(0).")
        warnings.warn(
            "Data ranks have changed buffers to different values, each from its own samples, where one process has all"
            f" samples (sentence 6 of the contract); the first rank's are saved. {' '.join(remedies)}",
            stacklevel=2,
        )

    def _owner(self, name: str) -> nn.Module:
        return self._module.get_submodule(name.rpartition(".")[0])

    def _now(self) -> dict[str, Tensor]:
        held = dict(self._module.named_buffers())
        return {name: held[name] for name in self._names if type(held.get(name)) in (Tensor, DTensor)}


class SharedBuffers:
    """Buffers of modules that several stages hold, as of the projections that all adapters of VeRA share.

    Each stage has a copy, which changes with the calls of its own stage's blocks, and in one process with those of all
    blocks. So copies that a step changes are wrong, even where they are equal. Hooks between steps may change them:
    these run on every stage.

    Args:
        names: Of the buffers, of each one name.
    """

    def __init__(self, module: nn.Module, names: Collection[str]) -> None:
        self._module = module
        self._names = names
        self._marks: dict[str, Mark] = {}

    @contextmanager
    def unchanged(self, method: str, *, compares: bool) -> Iterator[None]:
        """Context of a step.

        Args:
            compares: Also look at values whose versions are as before, since changes through ``.data`` leave these.

        Raises:
            StepError: The step has changed a buffer.
        """
        marks = self._marks
        marks |= _marks({n: b for n, b in self._now() if compares or n not in marks or not marks[n].has_version_of(b)})
        yield
        for name, buffer in self._now():
            before = marks.get(name)
            if before is not None and before.has_version_of(buffer) and not compares:
                continue
            of_other_stage = isinstance(buffer, Unknown)  # which has set it
            if before is None or of_other_stage or repr(before.values) != repr(fingerprints({name: buffer})[name]):
                raise StepError(
                    f"{method} changes {name}, and several pipeline stages hold this buffer's module. Each has a copy,"
                    " which changes with the calls of its own blocks only: use one module per call, which may share"
                    " their weights, or pipeline_parallel_size=1.",
                    breaks=6,
                )

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            path, _, key = name.rpartition(".")
            buffer = self._module.get_submodule(path)._buffers.get(key)
            if buffer is not None:
                yield name, buffer
