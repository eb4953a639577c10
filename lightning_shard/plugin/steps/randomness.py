"""Makes random numbers independent of the layout.

In a step, the generators are seeded from the run's seed, the step, the microbatch and the data rank. So every stage and
tensor rank of one pipeline draws the same numbers, and a resumed run draws those that the uninterrupted one would have.
After the step the generators are restored. In a pipeline, generators that a module itself holds are treated the same,
each with its own seed, since stages would draw different amounts from them. Those that a step makes without a seed get
one too (``unseeded.py``).
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.plugin.steps import unseeded
from lightning_shard.state.tree_state import remember_own
from lightning_shard.state.walk import OwnGenerator

_numpy: Any = np.random


def agree(broadcast: Callable[[int], int]) -> int:
    """The seed of a run (a fit or an evaluation), equal on every rank; a collective call.

    It is drawn from rank 0's generator, and so decided by ``seed_everything`` and another one in each run of a process,
    as one process's numbers are. All ranks' generators are seeded with it: without ``seed_everything`` they differ, and
    ranks that read the same batch must also draw the same augmentations.
    """
    seed = broadcast(int(torch.randint(2**63 - 1, ())))
    torch.manual_seed(seed)  # also of devices that aren't initialized yet
    seed_all(seed)
    return seed


def derive(*parts: object) -> int:
    """A seed of 63 bits, derived from a run's seed and the names that identify the draw."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_all(seed: int, *, torch_alone: bool = False) -> None:
    """Seed torch (on the CPU and on CUDA devices), numpy and Python, and generators that a step makes from here on.

    Args:
        torch_alone: Leave numpy's and Python's global generators, which take most of the time.
    """
    if unseeded.STATE.is_active:
        unseeded.STATE.next = seed, 0
    # torch.manual_seed formats a stack trace for each uninitialized kind of device: a tenth of a small step's time
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    if not torch_alone:
        np.random.seed(seed % 2**32)
        unseeded.seed_python(seed)


def remember(
    device: torch.device, for_numpy: np.random.MT19937 | None = None, *, torch_alone: bool = False
) -> Callable[[], None]:
    """Snapshot the states of all global generators; returns a function that restores them.

    Args:
        for_numpy: Numpy's global functions draw from it until then. Such a replacement takes 0.2 µs, a snapshot of
            numpy's 624 numbers and their restoring 50 µs; it drops the second Gaussian number that a draw may have
            cached.
        torch_alone: Numpy's and Python's global generators are left as they are.
    """
    made, cpu, set_cpu = unseeded.STATE.next, torch.default_generator.get_state(), torch.default_generator.set_state
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python = numpys = None
    generator = _numpy.get_bit_generator()
    if not torch_alone:
        python = random.getstate()
        numpys = _numpy.get_state(legacy=False) if for_numpy is None else None
        if for_numpy is not None:
            _numpy.set_bit_generator(for_numpy)

    def put_back() -> None:
        unseeded.STATE.next = made
        set_cpu(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        if python is not None:
            random.setstate(python)
            _numpy.set_bit_generator(generator)
        if numpys is not None:
            _numpy.set_state(numpys)

    return put_back


def where_others_stand() -> Any:
    """The states of numpy's and Python's generators, for comparison."""
    numpys = tree.map_leaves(lambda leaf: getattr(leaf, "tobytes", lambda: leaf)(), _numpy.get_state(legacy=False))
    return random.getstate(), numpys


def seed_own(generator: OwnGenerator, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    else:
        generator.seed(seed % 2**32)


@contextmanager
def preserved(device: torch.device) -> Iterator[None]:
    """Restore all global generators at the end, whatever is drawn or seeded inside."""
    with AllGenerators(device).preserved():
        yield


@dataclass
class AllGenerators:
    """The global generators, and a module's own by name."""

    device: torch.device
    own: Mapping[str, OwnGenerator] = field(default_factory=dict)

    def seed(self, seed: int) -> None:
        seed_all(seed)
        for name, generator in self.own.items():
            seed_own(generator, derive(seed, name))

    def remember(self, for_numpy: np.random.MT19937 | None = None) -> Callable[[], None]:
        """Snapshot all states, as :func:`remember` does; returns a function that restores them."""
        put_global_back = remember(self.device, for_numpy)
        if not self.own:
            return put_global_back
        notes = [put_global_back, *map(remember_own, self.own.values())]

        def put_back() -> None:
            for note in notes:
                note()

        return put_back

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all of them at the end, whatever is drawn or seeded inside."""
        put_back = self.remember()
        try:
            yield
        finally:
            put_back()


def capture(device: torch.device) -> dict[str, Tensor]:
    """The generators' states as tensors, so that a checkpoint can hold them without pickle."""
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = numpy_state
    assert name == "MT19937"
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words, gauss is not None], dtype=torch.int64),
        "python.gauss": torch.tensor(gauss or 0.0, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor(cached, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore(state: dict[str, Tensor], device: torch.device) -> None:
    """Set the generators to a captured state."""
    torch.set_rng_state(state["torch"])
    version, *words, has_gauss = state["python"].tolist()
    random.setstate((version, tuple(words), state["python.gauss"].item() if has_gauss else None))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy.gauss"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
