"""What a run replaces in torch, Lightning and others is as it was when the run has ended."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import lightning as L
import pytest

from lightning_shard.testing import run_ranks
from tests.parity import Model, layout, loader, trainer_of
from tests.training.replaced import callables, replaced

OF_READER = re.compile(r".*\.(pl_load|_atomic_save|Strategy\.load_checkpoint|LightningCLI\._parse_ckpt_path)")
"""What opens checkpoints: the reader of folders is registered with Lightning's (``lightning_private.py``)."""
OF_DTENSORS = re.compile(r"torch\.distributed\.tensor\..*(OpDispatcher|DTensor)\.|torch\.nn\..*Parameter\.data$")
"""A module that was trained keeps DTensors, which go on being read and written as plain tensors."""


class OnPurpose(Exception):
    pass


class Fails(Model):
    def on_train_batch_end(self, *_: object) -> None:
        raise OnPurpose


class Looks(L.Callback):
    """For functions that are there as before, within a run and within a step's hooks, but with other code."""

    def __init__(self, before: Mapping[tuple[str, ...], Any]) -> None:
        self.before = before
        self.swapped: list[str] = []

    def on_before_optimizer_step(self, *_: object) -> None:
        now = callables()
        same = (path for path in self.before if path[-1] == "__code__" and now.get(path[:-1]) is self.before[path[:-1]])
        self.swapped += [".".join(path) for path in same if now[path] is not self.before[path]]


def fit(sizes: dict[str, int]) -> tuple[list[str], list[str]]:
    """What is another thing after a run, and after one that has failed."""
    found = []
    for kind in (Model, Fails):
        looks = Looks(before := callables())
        trainer = trainer_of(sizes, max_steps=2, callbacks=[looks])
        with suppress(OnPurpose):
            trainer.fit(kind(), loader(8), loader(8))
        assert looks.swapped == []
        found.append(replaced(before))
    return found[0], found[1]


@pytest.mark.parametrize(
    "sizes", [layout(pipeline=2), pytest.param(layout(data=2), marks=pytest.mark.long)], ids=["pp2", "dp2"]
)
def test_no_function_has_other_code_in_a_run_and_nothing_but_dtensors_is_another_thing_after_it(
    sizes: dict[str, int],
) -> None:
    for after_run, after_failure in run_ranks(partial(fit, sizes), 2, elastic=True):
        assert [name for name in (*after_run, *after_failure) if not OF_DTENSORS.match(name)] == []


AT_IMPORT = """
import lightning, torch.distributed.fsdp, torch.distributed.tensor.parallel, torchmetrics
from tests.training.replaced import callables, replaced
before = callables()
import lightning_shard
lightning_shard.HybridShardStrategy, lightning_shard.ModelCheckpoint
print(*replaced(before))
"""


def test_importing_the_package_replaces_nothing_but_what_opens_checkpoints() -> None:
    done = subprocess.run([sys.executable, "-c", AT_IMPORT], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if not OF_READER.match(name)] == []
