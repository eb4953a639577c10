"""Random combinations of what users write in networks and steps train as on one process (``random_networks``)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.testing import run_ranks
from lightning_shard.testing.alike import TOLERANCE
from lightning_shard.testing.compare import Record, first_parting
from lightning_shard.testing.layouts import NamedLayout, parse
from tests.training.random_networks.source import source

TOGETHER = 6
"""How many networks the same processes train, one after the other."""
LAYOUTS = {
    "pp2": "pp2",
    "interleaved": {"pipeline_parallel_size": 2, "schedule": "Interleaved1F1B"},
    "whole batches": {"pipeline_parallel_size": 2, "microbatches": 1},
    "dp2": "dp2",
    "pp2 x dp2": "pp2 x dp2",
}


def records(folder: Path, seeds: range, layout: NamedLayout | None) -> list[Record]:
    """What this rank records of each seed's network; of one process without a layout."""
    from lightning_shard.testing import recorder

    sys.path.insert(0, os.fspath(folder))
    found = []
    for seed in seeds:
        text = import_module(f"network_{seed}")
        run = recorder.Run(text.Module, text.batches, steps=4, seed=seed, trainer=text.TRAINER)
        try:
            found.append(recorder.on_a_layout(run, layout) if layout else recorder.on_one_process(run)[0])
        except BaseException as error:
            error.add_note(f"This was the network of seed {seed}:\n{source(seed)}")
            raise
    return found


@pytest.fixture(scope="module")
def on_one_process(tmp_path_factory: pytest.TempPathFactory) -> Callable[[range], tuple[Path, list[Record]]]:
    """A folder with the networks of some seeds, and what each computes on one process."""

    @cache
    def made(seeds: range) -> tuple[Path, list[Record]]:
        folder = tmp_path_factory.mktemp("networks")
        for seed in seeds:
            (folder / f"network_{seed}.py").write_text(source(seed))
        [alone] = run_ranks(records, 1, folder, seeds, None, init=False, timeout_s=120)
        return folder, alone

    return made


def check(folder: Path, alone: list[Record], seeds: range, arguments: Any) -> None:
    layout = parse(arguments, {})
    ranks = run_ranks(records, layout.world_size, folder, seeds, layout, elastic=True, timeout_s=120)
    for number, seed in enumerate(seeds):
        parting = first_parting(alone[number], [each[number] for each in ranks], layout, TOLERANCE)
        assert parting is None, f"the network of seed {seed} first differs at {parting}:\n{source(seed)}"


def test_a_few_train_alike(on_one_process: Any) -> None:
    seeds = range(TOGETHER // 2)
    check(*on_one_process(seeds), seeds, LAYOUTS["interleaved"])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("first", range(0, 16 * TOGETHER, TOGETHER))
def test_many_train_alike(layout: str, first: int, on_one_process: Any) -> None:
    seeds = range(first, first + TOGETHER)
    check(*on_one_process(seeds), seeds, LAYOUTS[layout])
