"""Makes random numbers independent of the layout.

In a step, the generators are seeded from the run's seed, the step, the microbatch and the data rank. So every stage and
tensor rank of one pipeline draws the same numbers, and a resumed run draws those that the uninterrupted one would have.
After the step the generators are restored. In a pipeline, blocks have seeds of their own, and generators that a module
itself holds are treated the same, each with its own seed, since stages would draw different amounts from them.

Generators that a step makes without a seed (``np.random.default_rng()``, ``random.Random()``) draw from the operating
system, and another number whenever a microbatch runs: the rehearsal refuses a step whose result depends on them.
"""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.state.tree_state import remember_own
from lightning_shard.state.walk import OwnGenerator, own_generators

_numpy: Any = np.random
_NONE: Mapping[str, OwnGenerator] = {}


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


def seed_all(seed: int, own: Mapping[str, OwnGenerator] = _NONE) -> None:
    """Seed torch (on the CPU and on CUDA devices), numpy and Python, and a module's ``own`` generators."""
    # torch.manual_seed formats a stack trace for each uninitialized kind of device: a tenth of a small step's time
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    for name, generator in own.items():
        seed_own(generator, derive(seed, name))


def remember(
    device: torch.device, own: Mapping[str, OwnGenerator] = _NONE, for_numpy: np.random.MT19937 | None = None
) -> Callable[[], None]:
    """Snapshot the states of all global generators and these; returns a function that restores them.

    Args:
        for_numpy: Numpy's global functions draw from it until then. Such a replacement takes 0.2 µs, a snapshot of
            numpy's 624 numbers and their restoring 50 µs; it drops the second Gaussian number that a draw may have
            cached.
    """
    cpu, set_cpu = torch.default_generator.get_state(), torch.default_generator.set_state
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python, generator = random.getstate(), _numpy.get_bit_generator()
    numpys = _numpy.get_state(legacy=False) if for_numpy is None else None
    if for_numpy is not None:
        _numpy.set_bit_generator(for_numpy)
    put_own_back = [*map(remember_own, own.values())]

    def put_back() -> None:
        set_cpu(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        random.setstate(python)
        _numpy.set_bit_generator(generator)
        if numpys is not None:
            _numpy.set_state(numpys)
        for put_one_back in put_own_back:
            put_one_back()

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
def preserved(device: torch.device, own: Mapping[str, OwnGenerator] = _NONE) -> Iterator[None]:
    """Restore all generators at the end, whatever is drawn or seeded inside."""
    put_back = remember(device, own)
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


class Seeds:
    """The seeds of one module's steps on this rank's stages: a microbatch's, and of each block in it."""

    def __init__(self, module: nn.Module, stages: Iterable[Stage], device: torch.device, data_rank: int) -> None:
        self._module = module
        self._device = device
        self._data_rank = data_rank
        self._own: Mapping[str, OwnGenerator] = {}
        self.may_have_new_generators = True
        for stage in stages:
            stage.draws = partial(self._seed_block, stage)
        self._numpys: defaultdict[int, np.random.MT19937] = defaultdict(partial(np.random.MT19937, 0))

    def seed(self, seed: int) -> None:
        seed_all(seed, self._own)

    def remember(self, for_numpy: np.random.MT19937 | None = None) -> Callable[[], None]:
        return remember(self._device, self._own, for_numpy)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore all generators after the steps that run inside."""
        if self.may_have_new_generators:
            self._own = own_generators(self._module)
            self.may_have_new_generators = False
        with preserved(self._device, self._own):
            yield

    def of_parts(self, draw: int, parts: int) -> list[int]:
        """The seeds of so many microbatches of the step with this seed."""
        return [derive(draw, part, self._data_rank) for part in range(parts)]

    def after_call(self, seed: int, calls: int) -> None:
        """After so many calls of the network, seed the generators equally on all ranks, from the microbatch's seed."""
        self.seed(derive(seed, "call", calls))

    def _seed_block(self, stage: Stage, index: int) -> Callable[[], None] | None:
        """Seed the generators for a block; returns a function that restores them for the code around it.

        For a block of another stage only the second Gaussian number that numpy may have cached is dropped, as it is for
        the stage's own, and there is nothing to restore.
        """
        if index not in stage.owned and len(stage.places[stage.blocks[index]]) == 1:
            _numpy.set_bit_generator(_numpy.get_bit_generator())
            return None
        calls = stage.calls.count if stage.calls is not None else 0
        put_back = remember(self._device, self._own, self._numpys[index])
        seed_all(stage.seed ^ _of_block(index, calls), self._own)
        return put_back


@lru_cache(maxsize=2**16)
def _of_block(place: int, call: int) -> int:
    """The difference between the seeds of a block in a call of the network, and of the microbatch."""
    return derive("block", place, call)
