"""Frozen networks beside the one that trains, such as a teacher: every pipeline stage holds them whole.

A user's code may change them between steps, as a mean teacher's weights are averages of the student's. On a stage it
sees the student's part only, so each stage would change another part of its copy, and the one that is used, the last
stage's, would be wrong in the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.plugin.steps.agreement import digest_of
from lightning_shard.sharding import local_tensor


class FrozenCopies:
    """A stage's frozen parameters, of which other stages may have copies.

    Args:
        module: The stage's.
        gather_over_stages: Of the pipeline.
    """

    def __init__(self, module: nn.Module, gather_over_stages: Callable[[Any], list[Any]]) -> None:
        self._held = {name: p for name, p in nn.Module.named_parameters(module) if not p.requires_grad}
        self._seen = self._versions()
        self._gather = gather_over_stages

    def check(self) -> None:
        """Compare those that were changed since the last time; a collective call over the pipeline.

        Raises:
            StepError: On every stage, where two of them have changed their copies in different ways.
        """
        before, self._seen = self._seen, self._versions()
        own = {name for name, version in self._seen.items() if version != before[name]}
        changed = set().union(*self._gather(own))
        if not changed:
            return
        first: dict[str, str] = {}
        digests = {name: digest_of(local_tensor(self._held[name])) for name in changed & {*self._held}}
        for stage in self._gather(digests):
            for name, value in stage.items():
                if first.setdefault(name, value) != value:
                    raise StepError(
                        f"{name} is frozen, and every pipeline stage holds it; now the stages' copies differ. Code that"
                        " changes it, as a teacher that averages the weights of the network that trains, sees its"
                        " stage's part of that network only (named_parameters(), state_dict()). Use"
                        " pipeline_parallel_size=1."
                    )

    def _versions(self) -> dict[str, tuple[int, int]]:
        """What is another one after a change, without a look at values."""
        local: dict[str, Tensor] = {name: local_tensor(parameter) for name, parameter in self._held.items()}
        return {name: (tensor.data_ptr(), tensor._version) for name, tensor in local.items()}
