"""Refuses steps that change buffers of modules that several pipeline stages hold.

Each stage has a copy, as of the projections that all adapters of VeRA share. A copy changes with the calls of its own
stage's blocks, and in one process with those of all blocks. So copies that change are wrong, even where they are equal.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.plugin.steps.checks.changed_buffers import Mark


class SharedBuffers:
    """This rank's copies. Hooks between steps may change them: these run on every stage.

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
        for name, buffer in self._now():
            if compares or name not in self._marks or not self._marks[name].has_version_of(buffer):
                self._marks[name] = Mark.of(buffer)
        yield
        for name, buffer in self._now():
            before = self._marks.get(name)
            if before is not None and before.has_version_of(buffer) and not compares:
                continue
            of_other_stage = isinstance(buffer, Unknown)  # which has set it
            if before is None or of_other_stage or not torch.equal(before.numbers, Mark.of(buffer).numbers):
                raise StepError(
                    f"{method} changes {name}, and several pipeline stages hold this buffer's module. Each has a copy,"
                    " which changes with the calls of its own blocks only: use one module per call, which may share"
                    " their weights, or pipeline_parallel_size=1."
                )

    def _now(self) -> Iterator[tuple[str, Tensor]]:
        for name in self._names:
            path, _, key = name.rpartition(".")
            buffer = self._module.get_submodule(path)._buffers.get(key)
            if buffer is not None:
                yield name, buffer
