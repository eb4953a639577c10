"""Steps on stages that append to files are told of once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_shard import HybridShardStrategy
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, layout, loader


class Writes(Model):
    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__("gpt")
        self.kind, self.folder = kind, folder

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = float(self.loss(batch))
        if self.kind == "appended":
            with (self.folder / "appended").open("a") as file:
                file.write(f"{loss}\n")
        if self.kind == "anew":
            (self.folder / str(batch_idx)).write_text(str(loss))
        if self.kind == "read":
            assert (self.folder / "given").read_text() == "x"


def evaluate(kind: str, folder: Path, sizes: dict[str, int]) -> list[str]:
    trainer = L.Trainer(strategy=HybridShardStrategy(**sizes), **{**QUIET, "devices": 2})
    data: Any = loader(8)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.test(Writes(kind, folder), data)
    return [text for each in said if "A step appends to" in (text := str(each.message))]


@pytest.mark.parametrize("kind", ["appended", "anew", "read"])
def test_what_would_be_there_several_times_is_told_of_once(kind: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text("x")
    told, other = run_ranks(evaluate, 2, kind, tmp_path, layout(pipeline=2), elastic=True)
    assert [f"A step appends to {tmp_path / kind}. With" in text for text in told] == [True] * (kind == "appended")
    assert other == []


def test_data_ranks_are_not(tmp_path: Path) -> None:
    assert run_ranks(evaluate, 2, "appended", tmp_path, layout(data=2), elastic=True) == [[], []]
