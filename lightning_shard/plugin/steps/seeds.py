"""Seeds the generators for the parts of pipelined steps: microbatches, blocks, and calls of the network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch

from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.plugin.steps import randomness, unseeded
from lightning_shard.plugin.steps.state.python_state import own_generators

_numpy: Any = np.random


class Seeds:
    """The seeds of one module's steps on this rank's stages.

    A microbatch's seed is equal on every stage, for the code around the blocks. Blocks have seeds of their own, so that
    it doesn't matter which stage runs them.
    """

    def __init__(self, module: pl.LightningModule, device: torch.device, data_rank: int) -> None:
        self._module = module
        self._device = device
        self._data_rank = data_rank
        self._generators = randomness.AllGenerators(device)
        self._may_have_new_generators = True
        self._draw_from_torch: set[int] = set()
        self._draw_from_others: set[int] = set()
        self._numpys: defaultdict[int, np.random.MT19937] = defaultdict(partial(np.random.MT19937, 0))

    @property
    def seed(self) -> Callable[[int], None]:
        """Seeds all generators."""
        return self._generators.seed

    @property
    def remember(self) -> Callable[[], Callable[[], None]]:
        """Snapshots the states of all generators; returns a function that restores them."""
        return self._generators.remember

    def look_for_generators(self) -> None:
        """Before the next steps, look for the generators that the module itself holds."""
        self._may_have_new_generators = True

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators after the steps that run inside; seed those that steps make without a seed."""
        if self._may_have_new_generators:
            self._generators.own = own_generators(self._module)
            self._may_have_new_generators = False
        with unseeded.seeded(), self._generators.preserved():
            yield

    def of_part(self, stage: Stage, draw: int, part: int) -> int:
        """Return a microbatch's seed, and make the stage's blocks draw from seeds derived from it.

        Args:
            draw: The step's seed.
            part: The microbatch's number.
        """
        seed = randomness.derive(draw, part, self._data_rank)
        stage.draws = partial(self._seed_block, stage, seed)
        return seed

    def after_call(self, last: Stage, draw: int, calls: int) -> None:
        """Seed the generators equally on all ranks, whatever each has drawn in its parts of the call.

        Args:
            last: This rank's last stage.
            draw: The step's seed.
            calls: The number of calls of the network so far.
        """
        self.seed(randomness.derive(self.of_part(last, draw, 0), "call", calls))

    def _seed_block(self, stage: Stage, seed: int, index: int) -> Callable[[], None] | None:
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
        own = randomness.derive(seed, "block", index, *([calls] if calls else []))
        skips = not torch.is_grad_enabled() and not self._generators.own
        if skips and index in self._draw_from_torch and not stage.passage.searching:
            _numpy.set_bit_generator(_numpy.get_bit_generator())  # as a replacement of numpy's generator does below
            made, put_torch_back = unseeded.STATE.next, randomness.remember_torch(self._device)
            unseeded.seed(own)
            randomness.seed_torch(own)

            def put_these_back() -> None:
                unseeded.STATE.next = made
                put_torch_back()

            return put_these_back
        put_back = self._generators.remember(self._numpys[index])
        self._generators.seed(own)
        if not skips or index in self._draw_from_others:
            return put_back
        before = randomness.where_others_stand()

        def note_and_put_back() -> None:
            drew = randomness.where_others_stand() != before
            self._draw_from_torch.discard(index)
            (self._draw_from_others if drew else self._draw_from_torch).add(index)
            put_back()

        return note_and_put_back
