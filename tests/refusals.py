"""Fits that every rank must refuse: many of them one after the other on the same ranks, whose start takes longest."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_shard.testing import run_ranks
from tests.parity import loader, trainer_of, world


@dataclass(frozen=True)
class Refusal:
    """A fit that ends on every rank with an error that has the value, the constraint and the remedy.

    Attributes:
        sizes: A whole layout.
        says: A pattern that is in the error's message.
        options: Of the strategy.
        batches: Makes those of one data rank; without it, tokens, of ``batch`` samples.
        method: The Trainer's.
        ranks: How many there are, where the layout doesn't say so.
    """

    sizes: Mapping[str, Any]
    make: Callable[[], L.LightningModule]
    error: type[Exception]
    says: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: Callable[[], Iterable[Any]] | None = None
    batch: int = 16
    method: str = "fit"
    trainer: Mapping[str, Any] = field(default_factory=dict)
    ranks: int | None = None

    def run(self) -> None:
        L.seed_everything(3)
        options = {**self.sizes, **self.options}
        trainer = trainer_of(options, self.ranks or world(self.sizes), **{"max_steps": 2, **self.trainer})
        data = DataLoader([*self.batches()], batch_size=None) if self.batches else loader(self.batch)
        getattr(trainer, self.method)(self.make(), data)


def _refused_in_turn(cases: Mapping[str, Refusal]) -> dict[str, str]:
    """On this rank, what each is refused with; where it isn't, why not."""
    messages = {}
    for name, case in cases.items():
        try:
            with pytest.raises(case.error) as caught:
                case.run()
            messages[name] = str(caught.value)
        except (Exception, pytest.fail.Exception):
            messages[name] = traceback.format_exc()
    return messages


def assert_refused(cases: Mapping[str, Refusal], ranks: int = 2) -> None:
    per_rank = run_ranks(_refused_in_turn, ranks, cases, elastic=True, timeout_s=50 + 5 * len(cases))
    others = {
        f"{name}, rank {rank}": messages[name]
        for rank, messages in enumerate(per_rank)
        for name, case in cases.items()
        if not re.search(case.says, messages[name], re.DOTALL)
    }
    assert not others, "\n".join(f"{name}: {message}" for name, message in others.items())
