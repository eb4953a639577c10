"""Each schedule on layouts with stages, of a dense network and of one with tied weights: one process's numbers.

Longer than CI has time for. Shorter ones of the same are in test_parity.py, test_tied.py, test_stages_of_a_rank.py.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_shard.testing import run_ranks
from tests.parity import LAYOUTS, Model, Seen, combine, like_llama, train, world
from tests.training.pipeline.test_several_stages import CLIPPED, check

BLOCKS = 8
LIMIT_S = 600
"""Each fits once by every schedule: two minutes where nothing else runs."""
SCHEDULES = [
    "GPipe",
    "1F1B",
    "Eager1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
    "auto",
]


class Deep(Model):
    """Blocks for two stages on each of four ranks."""

    def __init__(self, tied: bool) -> None:
        import transformers

        super().__init__("llama")
        options = {**like_llama(), "num_hidden_layers": BLOCKS, "tie_word_embeddings": tied}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def deep(tied: bool) -> L.LightningModule:
    L.seed_everything(5)
    return Deep(tied)


def fit(tied: bool, name: str | None = None, **options: Any) -> Seen:
    sizes = LAYOUTS[name] if name else None
    return train("llama", sizes, module=lambda: deep(tied), trainer=CLIPPED, **options)


def every_schedule(tied: bool, name: str) -> dict[str, Seen]:
    return {schedule: fit(tied, name, schedule=schedule) for schedule in SCHEDULES}


@pytest.fixture(scope="module")
def plain() -> dict[bool, Seen]:
    return {tied: fit(tied) for tied in (False, True)}


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("tied", [False, True], ids=["dense", "tied"])
@pytest.mark.parametrize("name", ["pp2", "pp4", "pp2×dp2", "pp2×tp2"])
def test_a_schedule_computes_what_one_process_computes(name: str, tied: bool, plain: dict[bool, Seen]) -> None:
    per_rank = run_ranks(every_schedule, world(LAYOUTS[name]), tied, name, elastic=True, timeout_s=LIMIT_S - 50)
    for schedule in SCHEDULES:
        check(combine([ran[schedule] for ran in per_rank], LAYOUTS[name]), plain[tied])
