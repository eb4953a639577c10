"""Random combinations of what users write in networks and steps train as on one process (``random_networks``)."""

from __future__ import annotations

import os
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.alike import Trains, assert_train_alike
from tests.training.random_networks.source import source

TOGETHER = 6
"""How many networks the same processes train, one after the other."""
INTERLEAVED = {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"}
LAYOUTS = ["pp2", INTERLEAVED, {"pipeline_parallel_size": 2, "microbatches": 1}, "dp2", "pp2 x dp2"]


def written(folder: Path, seed: int) -> ModuleType:
    """The source of a seed's network, imported in whichever process asks for it."""
    file = folder / f"network_{seed}.py"
    if not file.exists():  # as this process writes it, before others read it
        file.write_text(source(seed))
    if os.fspath(folder) not in sys.path:
        sys.path.insert(0, os.fspath(folder))
    return import_module(f"network_{seed}")


def made(folder: Path, seed: int) -> Any:
    return written(folder, seed).Module()


def batches(folder: Path, seed: int) -> Any:
    return written(folder, seed).batches()


def assert_networks_train_alike(folder: Path, seeds: range, layouts: Any) -> None:
    """The name of each is its source, which is told where it differs."""
    assert_train_alike(
        {
            f"the network of seed {seed}:\n{source(seed)}": Trains(
                partial(made, folder, seed),
                partial(batches, folder, seed),
                layouts,
                steps=4,
                trainer=written(folder, seed).TRAINER,
                seed=seed,
            )
            for seed in seeds
        }
    )


def test_a_few_train_alike(tmp_path: Path) -> None:
    assert_networks_train_alike(tmp_path, range(TOGETHER // 2), INTERLEAVED)


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 16 * TOGETHER, TOGETHER))
def test_many_train_alike(first: int, tmp_path: Path) -> None:
    assert_networks_train_alike(tmp_path, range(first, first + TOGETHER), LAYOUTS)
