"""Distributes one global order of samples over data ranks, so that the order doesn't depend on the layout.

The DataLoader's own sampler yields an epoch's global order, which is equal on every rank, as it is drawn from the run's
seed and the epoch. Data rank r of N takes its positions r, r + N, r + 2N, …. So in each step the batches of the N ranks
together are the batch that one process with N times the batch size would see::

    position          0  1  2  3  4  5  6  7  8  9      batch size 2, N = 2
    step 0            0  1  0  1                        (the rank that takes the position)
    step 1                        0  1  0  1
    step 2                                    0  1

The place in the epoch is a number of positions, counted over all ranks, and so it means the same for any other N.
A batch sampler of the user's own is distributed in the same way; a position is then a whole batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, cycle, islice
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_shard.errors import StateMismatchError
from lightning_shard.plugin.steps import randomness

READ_AHEAD = 256
"""How many positions are drawn from the user's sampler at a time; generators are swapped once for these."""

_CPU = torch.device("cpu")


class ShardedSampler(Sampler[Any]):
    """One data rank's part of the order that a sampler (or a batch sampler) yields.

    Args:
        order: Yields the positions of one epoch: indices, or whole batches of them. It is iterated under generators
            (torch, numpy, Python, and its own ``generator``) seeded from ``seed`` and the epoch.
        batch_size: How many positions make a batch on one rank; ``None`` where a position is a batch.
        drop_last: Drop the last positions if they don't make a full round over the ranks, or a full batch. Otherwise
            the round is filled with the epoch's first positions, so that every rank takes the same number of steps.
        purpose: In training, another order begins where an epoch iterates it again, as beside a longer loader. For
            predictions positions repeat only where a rank would lack a batch, and not to fill the last round.
        worker_generator: Reseeded for every epoch; the seeds of the DataLoader's workers are drawn from it.

    It has many attributes: what it deals, and the place in it.
    """

    def __init__(
        self,
        order: Iterable[Any],
        *,
        data_rank: int,
        data_size: int,
        seed: int,
        batch_size: int | None = 1,
        drop_last: bool = False,
        purpose: Literal["train", "evaluate", "predict"] = "evaluate",
        worker_generator: torch.Generator | None = None,
    ) -> None:
        self.order = order
        self.data_rank = data_rank
        self.data_size = data_size
        self.seed = seed
        self.batch_size = batch_size or 1
        self.drop_last = drop_last
        self._purpose = purpose
        self._unit = "batches" if batch_size is None else "samples"
        self._worker_generator = worker_generator
        self.epoch = 0
        # the position at which this epoch was begun or resumed
        self.start = 0
        # the position at which the next iteration begins. A loader that is shorter than others beside it is iterated
        # several times in an epoch, from the second time on from 0
        self.next_start = 0
        # how many times it was iterated to its end in this epoch, and by then when the epoch was begun or resumed
        self._passes = self._passes_before = 0
        # the training loop's batch count at `start`; None between loading a state and beginning from it
        self._batches_before: int | None = 0
        self.set_epoch(0)

    @property
    def sampler(self) -> ShardedSampler:
        """Itself: Lightning calls ``loader.batch_sampler.sampler.set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of this epoch; if it is the current epoch, keep the place in it."""
        if epoch != self.epoch:
            self.start = self.next_start = self._batches_before = self._passes = self._passes_before = 0
        self.epoch = epoch
        for part in self._user_samplers():
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        self._seed_workers()

    def __iter__(self) -> Iterator[Any]:
        positions = chain.from_iterable(self._positions())
        head = list(islice(positions, self.data_size - 1))
        positions = chain(head, positions)
        next(islice(positions, self.next_start, self.next_start), None)
        taken = 0
        while dealt := list(islice(positions, self.data_size)):
            if (missing := self.data_size - len(dealt)) and self.drop_last:
                break
            if self.data_rank >= len(dealt) and self._purpose == "predict" and taken % self.batch_size:
                break
            dealt += islice(cycle(head), missing)
            yield dealt[self.data_rank]
            taken += 1
        self.next_start = 0
        self._passes += self._purpose == "train"

    def __len__(self) -> int:
        """Positions of a whole epoch on this rank, even if a part of it was done before a resume.

        Lightning takes the loader's length as the epoch's and counts up to it from the batches done before.

        Raises:
            TypeError: The user's sampler has no length.
        """
        return self._share(len(self.order))  # type: ignore[arg-type]

    @property
    def ends_with_a_repeated_batch(self) -> bool:
        """Whether this rank's last batch of a whole epoch holds only a repeated position, which another rank took."""
        if (length := length_of(self.order)) is None or self.drop_last:
            return False
        rest = length % self.data_size
        return 0 < rest <= self.data_rank and (self._share(length) - 1) % self.batch_size == 0

    def _positions(self) -> Iterator[list[Any]]:
        """Yield the epoch's global order from its start, in pieces; generators that others use are restored."""
        seed = randomness.derive(self.seed, "order", *self.next_pass())
        own = [
            g for part in self._user_samplers() if isinstance(g := getattr(part, "generator", None), torch.Generator)
        ]
        own_states: list[torch.Tensor] = []
        shared_states: dict[str, torch.Tensor] = {}
        iterator: Iterator[Any] | None = None
        while True:
            outer = [generator.get_state() for generator in own]
            with drawing_apart(seed):
                if iterator is None:
                    for generator in own:
                        generator.manual_seed(seed)
                    iterator = iter(self.order)
                else:
                    for generator, state in zip(own, own_states, strict=True):
                        generator.set_state(state)
                    randomness.restore(shared_states, _CPU)
                drawn = list(islice(iterator, READ_AHEAD))
                shared_states = randomness.capture(_CPU)
                own_states = [generator.get_state() for generator in own]
            for generator, state in zip(own, outer, strict=True):
                generator.set_state(state)
            yield drawn
            if len(drawn) < READ_AHEAD:
                return

    def _user_samplers(self) -> Iterator[Any]:
        yield self.order
        if (inner := getattr(self.order, "sampler", None)) is not None:
            yield inner

    def _seed_workers(self) -> None:
        if self._worker_generator is not None:
            seed = randomness.derive(self.seed, "workers", self.epoch, self.start, self.data_rank)
            self._worker_generator.manual_seed(seed)

    # -- the place in the epoch ---------------------------------------------------------------------------------------

    def next_pass(self) -> tuple[int, ...]:
        """The epoch, and which of its passes over the data the next iteration is, if it isn't the first."""
        return (self.epoch, self._passes) if self._passes else (self.epoch,)

    def _pass_and_position(self, batches: int) -> tuple[int, int]:
        """The pass, and the global position in it, after training on this many batches, as the training loop counts.

        Not the number of batches handed out, since workers and fetchers run ahead of training.
        """
        if self._batches_before is None:
            return self._passes_before, self.start
        done = batches - self._batches_before
        per_batch = self.data_size * self.batch_size
        if (length := length_of(self.order)) is None:
            return self._passes_before, self.start + done * per_batch
        first_pass = self._batches(length - self.start)
        whole_pass = self._batches(length)
        if done > first_pass and whole_pass:
            passes, rest = divmod(done - first_pass, whole_pass)
            return self._passes_before + 1 + passes, min(rest * per_batch, length)
        return self._passes_before, min(self.start + done * per_batch, length)

    def batches_until(self, position: int) -> int:
        """How many batches of an epoch on this layout come before ``position``.

        If it falls inside a batch, the result is the count from which the remaining batches reach the epoch's end.
        """
        if (length := length_of(self.order)) is None:
            return -(-position // (self.data_size * self.batch_size))
        return self._batches(length) - self._batches(max(0, length - position))

    def state_dict(self, batches: int) -> dict[str, Any]:
        """The place after ``batches`` batches of this epoch; equal on all ranks."""
        passes, position = self._pass_and_position(batches)
        return {"epoch": self.epoch, "pass": passes, "position": position, "unit": self._unit, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a place saved on any layout, in the order of the seed it was saved with; call :meth:`begin` next."""
        if state["unit"] != self._unit:
            raise StateMismatchError(
                f"the checkpoint's place in the data counts {state['unit']}, and this DataLoader deals {self._unit}:"
                " resume with the kind of sampler (batch_sampler= or not) that the checkpoint was written with."
            )
        self.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self.start = self.next_start = state["position"]
        self._passes = self._passes_before = state.get("pass", 0)
        self._batches_before = None
        self._seed_workers()

    def skip(self, epoch: int, batches: int) -> None:
        """Go to the place after ``batches`` batches of an epoch on this layout; call :meth:`begin` next."""
        self.set_epoch(epoch)
        self.start = self._batches_before = self._passes_before = 0
        passes, self.start = self._pass_and_position(batches)
        self._passes = self._passes_before = passes

    def begin(self, epoch: int, batches: int) -> None:
        """Begin ``epoch`` at the loaded place if it is in it, else at 0. The loop has counted ``batches`` so far."""
        is_same = epoch == self.epoch
        self.set_epoch(epoch)
        self.next_start, self._passes = self.start, self._passes_before
        self._batches_before = batches if is_same else 0
        self._seed_workers()

    @property
    def is_loaded(self) -> bool:
        """Whether a place was loaded but not begun from yet."""
        return self._batches_before is None

    def _share(self, positions: int) -> int:
        """How many of this many positions each rank takes."""
        return positions // self.data_size if self.drop_last else -(-positions // self.data_size)

    def _batches(self, positions: int) -> int:
        share = self._share(positions)
        return share // self.batch_size if self.drop_last else -(-share // self.batch_size)


def length_of(sized: Any) -> int | None:
    """The length of a sampler or a loader, if it has one."""
    try:
        return len(sized)
    except (TypeError, NotImplementedError):
        return None


@contextmanager
def drawing_apart(seed: int) -> Iterator[None]:
    """Inside, draws come from CPU generators with this seed; afterwards, the generators are restored."""
    with randomness.preserved(_CPU):
        # not torch.manual_seed: that also seeds the devices' generators, which aren't restored here
        torch.random.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
