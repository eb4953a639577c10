"""Buffers that steps change: compared between ranks that hold the same ones, refused where stages hold copies.

Joins what every pipeline stage has a copy of, where code between steps changes each stage's copy otherwise.

These are frozen networks next to the one that trains, such as a teacher, and saved buffers. A mean teacher's weights
are averages of the student's, and so are the buffers of latent diffusion's ``LitEma``. Code that updates them goes over
``named_parameters()``, which has a stage's own parameters of the network that trains. So each stage's copies are up to
date for these only. A copy that one stage has changed is the others' too.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.arguments import few
from lightning_shard.dense import is_dense
from lightning_shard.errors import StepError
from lightning_shard.parallel.rank_compare import (
    NOTHING,
    Fingerprint,
    by_name,
    differing,
    exchanged,
    fingerprints,
)
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.plugin.broadcast import values_of
from lightning_shard.plugin.groups import Groups
from lightning_shard.sharding import local_tensor
from lightning_shard.torch_private import BatchNorm

_REDUCED = 1e-6
"""Relative to the norm, buffers of data ranks differ by less if they are reduced, and by more if each rank has its own:
also where a step moves a few rows of a codebook a little."""


class ChangedBuffers:
    """Buffers that training steps change, of a module as it is now. Of equal copies on ranks one rank's are saved.

    Only those that it has now are compared: which masks and tables a step creates may depend on a rank's batches.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names = [
            name for name, buffer in module.named_buffers() if type(buffer) in (Tensor, DTensor) and not buffer.is_meta
        ]
        self._before: dict[str, Fingerprint] | None = None
        self._has_warned = False

    def begin(self) -> None:
        """A training step begins."""
        if self._before is None:
            self._before = fingerprints(self._now())

    def changed(self) -> dict[str, Fingerprint]:
        """What this rank has changed since; zeros for the others, which another rank may have changed."""
        known = self._before or {}
        now = fingerprints(self._now()) if known else {}
        changed = {name: each for name, each in now.items() if repr(each) != repr(known.get(name))}
        return {name: ((), *changed.get(name, NOTHING)[1:]) for name in self._names}

    def warn_of_data_ranks(self, ranks: dist.ProcessGroup, *, warns: bool) -> None:
        """Compare them over data ranks; a collective call over these, until some are reported."""
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


@contextmanager
def unchanged(module: nn.Module, names: Collection[str], method: str) -> Iterator[None]:
    """Context of a step, which may not change buffers of modules that several stages hold, as VeRA's projections.

    Each stage has a copy, which changes with the calls of its own stage's blocks, and in one process with those of all
    blocks. So copies that a step changes are wrong, even where they are equal. Hooks between steps may change them:
    these run on every stage.
    """

    def held() -> dict[str, Tensor]:
        owners = {name: module.get_submodule(name.rpartition(".")[0])._buffers for name in names}
        found = {name: buffers.get(name.rpartition(".")[2]) for name, buffers in owners.items()}
        return {name: buffer for name, buffer in found.items() if buffer is not None}

    before = sums_of(held())
    yield
    now = held()
    known = sums_of({name: buffer for name, buffer in now.items() if not isinstance(buffer, Unknown)})
    # one that is unknown here another stage has set
    changed = next((name for name in now if name not in known or known[name] != before.get(name)), None)
    if changed is not None:
        raise StepError(
            f"{method} changes {changed}, and several pipeline stages hold this buffer's module. Each has a copy,"
            " which changes with the calls of its own blocks only: use one module per call, which may share"
            " their weights, or pipeline_parallel_size=1.",
            breaks=6,
        )


_OF_FROZEN = (
    "is frozen, and every pipeline stage holds it; now the stages' copies differ. Code"
    " that updates it, as for a mean teacher, sees only its own stage's parameters of the network that trains"
    " (named_parameters(), state_dict()): have it update each weight by the one of the same name, after every batch"
    " from the first on, or use pipeline_parallel_size=1."
)
_OF_BUFFERS = (
    "is a buffer that every pipeline stage holds, and now the stages' copies differ: what"
    " computes it between steps sees only its own stage's parameters (named_parameters(), state_dict()). Compute it for"
    " each parameter by itself, or from {whole_parameters}; or use pipeline_parallel_size=1."
)


class CopiesOfStages:
    """Frozen parameters and saved buffers of which other stages have copies. The constructor is a collective call.

    Args:
        others: Names of buffers that are compared elsewhere.
        whole: Where code between steps finds all parameters, for messages.
    """

    def __init__(
        self,
        module: nn.Module,
        others: Collection[str],
        groups: Groups,
        device: torch.device,
        whole: str,
    ) -> None:
        self._module = module
        self._of_buffers = _OF_BUFFERS.format(whole_parameters=whole)
        self._others = others
        self._frozen = {name: p for name, p in nn.Module.named_parameters(module) if not p.requires_grad}
        self._groups = groups
        self._device = device
        own = sums_of(self._held())
        holders = Counter(name for stage in groups.gather_over_stages([*own]) for name in stage)
        self._known = {name: sums for name, sums in own.items() if holders[name] > 1}
        self._is_any = max(holders.values(), default=0) > 1
        self._joined: set[str] = set()
        """Names that have parted before: the same on all stages, which all hold them."""

    def join(self, *, is_early: bool, tolerates: bool = False) -> dict[str, str]:
        """Have all copies be as the stage has made them that has changed its own; a collective call over the pipeline.

        Args:
            is_early: In a run's first steps. Frozen parameters may not begin to part later, when steps may have used
                them. Buffers may: steps on stages seldom read those that hooks compute of parameters.
            tolerates: Leave copies as they are that can't be joined, in place of an error, and if it would spread NaN.

        Returns:
            What an error would say of copies that have parted, by name.

        Raises:
            StepError: On every stage, if stages have changed their copies in different ways.
        """
        if not self._is_any:
            return {}
        held = {name: held for name, held in self._held().items() if name in self._known}
        return self._join(held, is_early=is_early, tolerates=tolerates)

    def join_for_step(self) -> None:
        """Join the frozen ones that were seen to part."""
        if parted := {name: self._frozen[name] for name in self._frozen if name in self._joined}:
            self._join(parted, is_early=False)

    def _join(self, held: Mapping[str, Tensor], *, is_early: bool, tolerates: bool = False) -> dict[str, str]:
        apart: dict[str, str] = {}
        own = sums_of(held)
        stages = self._groups.gather_over_stages(
            {name: (sums, sums != self._known.get(name)) for name, sums in own.items()}
        )
        for name, found in by_name(stages).items():
            if len({sums for sums, _ in found.values()}) == 1:
                continue
            changed = {sums: stage for stage, (sums, has_changed) in reversed(found.items()) if has_changed}
            is_one = len(found) == len(stages) and len(changed) == 1
            may_join = is_one and (is_early or name in self._joined or name not in self._frozen)
            text = f"{name} {_OF_FROZEN if name in self._frozen else self._of_buffers}"
            if not may_join and not tolerates:
                raise StepError(text, breaks=6)
            spoils = is_one and tolerates and "nan" in min(changed)
            if not may_join or spoils:
                apart[name] = text
            if not is_one or spoils:
                continue
            self._joined.add(name)
            (stage,) = changed.values()  # the first that has it
            local = local_tensor(held[name])
            local.copy_(values_of(len(stages) - 1 - stage, local, self._groups.pipeline, self._device))
        self._known.update(sums_of(held))
        return apart

    def _held(self) -> dict[str, Tensor]:
        return self._frozen | {
            name: buffer for name, buffer in _saved(self._module).items() if name not in self._others
        }


def _saved(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a state dict, but for sparse and nested ones."""
    return {
        f"{path}.{key}" if path else key: buffer
        for path, part in module.named_modules()
        for key, buffer in part._buffers.items()
        if type(buffer) is Tensor
        and key not in part._non_persistent_buffers_set
        and is_dense(buffer)
        and not buffer.is_meta
    }


def sums_of(tensors: Mapping[Any, Tensor]) -> dict[Any, str]:
    """What each is known again by. Version counters don't show changes made through ``.data``."""
    return {key: repr(each) for key, each in fingerprints(tensors).items()}  # equal for NaN too
