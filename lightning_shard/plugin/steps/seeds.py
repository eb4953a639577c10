"""Seeds the generators for the parts of pipelined steps: microbatches, blocks, and calls of the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps import randomness, unseeded
from lightning_shard.state.walk import OwnGenerator, own_generators

_numpy: Any = np.random


class Seeds:
    """The seeds of one module's steps on this rank's stages.

    A microbatch's seed is equal on every stage, for the code around the blocks. Blocks have seeds of their own, so that
    it doesn't matter which stage runs them.
    """

    def __init__(self, module: nn.Module, stages: Iterable[Stage], device: torch.device, data_rank: int) -> None:
        self._module = module
        self._device = device
        self._data_rank = data_rank
        self._may_have_new_generators = True
        self._know({})
        for stage in stages:
            stage.draws = partial(self._seed_block, stage)
        self._draw_from_torch: set[int] = set()
        self._draw_from_others: set[int] = set()
        self._numpys: defaultdict[int, np.random.MT19937] = defaultdict(partial(np.random.MT19937, 0))

    def _know(self, own: Mapping[str, OwnGenerator]) -> None:
        """Seed and remember the global generators, and these."""
        self._generators = randomness.AllGenerators(self._device, own)
        self.seed: Callable[[int], None] = self._generators.seed if own else randomness.seed_all
        self.remember: Callable[..., Callable[[], None]] = (
            self._generators.remember if own else partial(randomness.remember, self._device)
        )

    def look_for_generators(self) -> None:
        """Before the next steps, look for the generators that the module itself holds."""
        self._may_have_new_generators = True

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators after the steps that run inside; seed those that steps make without a seed."""
        if self._may_have_new_generators:
            self._know(own_generators(self._module))
            self._may_have_new_generators = False
        with unseeded.seeded(), self._generators.preserved():
            yield

    def of_parts(self, draw: int, parts: int) -> list[int]:
        """The seeds of a step's microbatches.

        Args:
            draw: The step's seed.
            parts: The number of microbatches.
        """
        return [randomness.derive(draw, part, self._data_rank) for part in range(parts)]

    def after_call(self, seed: int, calls: int) -> None:
        """Seed the generators equally on all ranks, whatever each has drawn in its parts of the call.

        Args:
            seed: The microbatch's.
            calls: The number of calls of the network so far.
        """
        self.seed(randomness.derive(seed, "call", calls))

    def _seed_block(self, stage: Stage, index: int) -> Callable[[], None] | None:
        """Seed the generators for a block; returns a function that restores them for the code around it.

        For a block of another stage only the second Gaussian number that numpy may have cached is dropped, as it is for
        the stage's own, and there is nothing to restore.

        Numpy's and Python's generators take most of the time. In evaluations they are skipped for a block that didn't
        draw from them in the first microbatch of its kind, unless modules have generators of their own.
        """
        if index not in stage.owned and len(stage.places[stage.blocks[index]]) == 1:
            _numpy.set_bit_generator(_numpy.get_bit_generator())
            return None
        calls = stage.calls.count if stage.calls is not None else 0
        own = stage.seed ^ _of_block(index, calls)
        skips = not torch.is_grad_enabled() and not self._generators.own
        if skips and index in self._draw_from_torch and not stage.passage.searching:
            _numpy.set_bit_generator(_numpy.get_bit_generator())  # as a replacement of numpy's generator does below
            put_torch_back = randomness.remember(self._device, torch_alone=True)
            randomness.seed_all(own, torch_alone=True)
            return put_torch_back
        put_back = self.remember(self._numpys[index])
        self.seed(own)
        if not skips or index in self._draw_from_others:
            return put_back
        before = randomness.where_others_stand()

        def note_and_put_back() -> None:
            drew = randomness.where_others_stand() != before
            self._draw_from_torch.discard(index)
            (self._draw_from_others if drew else self._draw_from_torch).add(index)
            put_back()

        return note_and_put_back


@lru_cache(maxsize=2**16)
def _of_block(place: int, call: int) -> int:
    """The difference between the seeds of a block in a call of the network, and of the microbatch."""
    return randomness.derive("block", place, call)
