"""What all tests share: one server of forks, which imports the heavy packages once per session; and a ledger of the
faults that were tried, of which docs/reliability.md is made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from lightning_shard.testing import preload

preload(
    "s3fs",
    "torch.distributed.pipelining",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)

# a loaded machine is no failure
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

LEDGER = "RELIABILITY_LEDGER"
"""The variable that names a folder to keep the ledger in; without it nothing is kept."""


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Callable[..., None]:
    """``ledger(group, fault, tried=, lost=0, note="")``: one row, of a fault tried at so many points.

    ``group`` is a heading such as "Crash"; ``fault`` says what was done to what, in one line; ``lost`` counts the
    points after which something that was promised did not hold. The row is kept first, then ``lost`` must be 0.
    ``system`` names another program that the same fault was tried on: its row stands beside ours of the same group and
    fault, and what it lost is told, not asserted. ``sample`` says that a longer test tries all points of this row.
    """

    def enter(
        group: str, fault: str, *, tried: int, lost: int = 0, note: str = "", system: str = "", sample: bool = False
    ) -> None:
        assert tried > 0, f"{fault}: nothing was tried"
        if folder := os.environ.get(LEDGER):
            row = {
                "group": group,
                "fault": fault,
                "tried": tried,
                "lost": lost,
                "note": note,
                "system": system,
                "sample": sample,
                "test": request.node.nodeid,
            }
            with Path(folder, f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        assert lost == 0 or system, f"{fault}: {lost} of {tried} did not hold"

    return enter
