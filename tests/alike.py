"""Many modules that train on layouts as on one process: ``assert_trains_alike`` for each, on ranks that start once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L

from lightning_shard.testing import run_ranks
from lightning_shard.testing.alike import TOLERANCE
from lightning_shard.testing.compare import Record, first_parting
from lightning_shard.testing.layouts import NamedLayout, parse, parse_all
from lightning_shard.testing.recorder import Run, on_a_layout, on_one_process

Layouts = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]


@dataclass(frozen=True)
class Trains:
    """What ``assert_trains_alike`` is given.

    Attributes:
        options: Of the strategy, on all layouts.
    """

    make: Callable[[], L.LightningModule]
    batches: Callable[[], Iterable[Any]]
    layouts: Layouts = "pp2"
    steps: int = 3
    trainer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE
    seed: int = 0

    @property
    def run(self) -> Run:
        return Run(self.make, self.batches, self.steps, self.seed, self.trainer)


def assert_train_alike(cases: Mapping[str, Trains]) -> None:
    """Each case on one process, then each on its layouts, one after the other; all that differ are told."""
    limit_s = 60 + 10 * len(cases)
    [alone] = run_ranks(_alone, 1, {name: case.run for name, case in cases.items()}, timeout_s=limit_s, init=False)
    apart = {}
    for name, (first, again) in alone.items():
        assert any(moment.startswith("training batch") for moment in first), name
        if parting := first_parting(first, [again], parse("dp1", {}), 0.0):
            apart[f"{name}, with other random numbers"] = parting
    by_size: dict[int, list[tuple[str, NamedLayout]]] = defaultdict(list)
    for name, case in cases.items():
        for layout in parse_all(case.layouts, case.options):
            by_size[layout.world_size].append((name, layout))
    for size, pairs in by_size.items():
        runs = [(name, cases[name].run, layout) for name, layout in pairs]
        per_rank = run_ranks(_on_layouts, size, runs, elastic=True, timeout_s=limit_s)
        for (name, layout), *ranks in zip(pairs, *per_rank, strict=True):
            if parting := first_parting(alone[name][0], ranks, layout, cases[name].tolerance):
                apart[f"{name}, on {layout.name}"] = parting
    assert not apart, "\n".join(f"{name} first differs at {each.moment}: {each.apart}" for name, each in apart.items())


def _alone(runs: Mapping[str, Run]) -> dict[str, tuple[Record, Record]]:
    return {name: _noted(name, lambda run=run: on_one_process(run)[:2]) for name, run in runs.items()}


def _on_layouts(runs: Sequence[tuple[str, Run, NamedLayout]]) -> list[Record]:
    return [_noted(name, lambda run=run, at=layout: on_a_layout(run, at)) for name, run, layout in runs]


def _noted(name: str, record: Callable[[], Any]) -> Any:
    try:
        return record()
    except BaseException as error:
        error.add_note(f"This was {name!r}.")
        raise
