"""Each schedule, and backwards in two parts with every setting of memory, on layouts: training is one process's.

Most is longer than CI has time for. Shorter ones are in test_parity.py, test_tied.py, test_stages_of_a_rank.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard.pipeline.runtime import step
from lightning_shard.pipeline.runtime.split_backward import Product
from lightning_shard.testing import run_ranks
from tests.parity import (
    EXACT,
    LAYOUTS,
    Case,
    Model,
    Seen,
    combine,
    compare,
    largest_difference,
    like_llama,
    train,
    world,
)
from tests.paths import SCHEDULE_IN_A_V
from tests.training.mixtures import assert_alike
from tests.training.parallel.test_memory_settings import HALF, assert_close

CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "val_check_interval": 1}
SAVED = 2
BLOCKS = 8
LIMIT_S = 600
"""Each fits once by every schedule: two minutes where nothing else runs."""
WHOLE = ["GPipe", "1F1B", "Eager1F1B", "Interleaved1F1B"]
IN_TWO_PARTS = ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@contextmanager
def counting_second_parts() -> Iterator[Counter[str]]:
    """How many weights' gradients came later than the rest of their backward."""
    counted: Counter[str] = Counter()
    real = step.backward_of_products

    def count(products: Iterable[Product]) -> None:
        products = [*products]
        counted["products"] += len(products)
        real(products)

    step.backward_of_products = count  # type: ignore[attr-defined]
    try:
        yield counted
    finally:
        step.backward_of_products = real  # type: ignore[attr-defined]


class Deep(Model):
    """Blocks for two stages on each of four ranks."""

    def __init__(self, tied: bool) -> None:
        import transformers

        L.seed_everything(5)
        super().__init__("llama")
        options = {**like_llama(), "num_hidden_layers": BLOCKS, "tie_word_embeddings": tied}
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def fit(tied: bool, name: str | None = None, **options: Any) -> Seen:
    sizes = LAYOUTS[name] if name else None
    return train("llama", sizes, module=lambda: Deep(tied), trainer=CLIPPED, **options)


def every_schedule(tied: bool, name: str) -> dict[str, Seen]:
    seen = {schedule: fit(tied, name, schedule=schedule) for schedule in [*WHOLE, "auto"]}
    if name == "pp2":
        seen["v"] = fit(tied, name, schedule=str(SCHEDULE_IN_A_V))
    for schedule in IN_TWO_PARTS:
        with counting_second_parts() as counted:
            seen[schedule] = fit(tied, name, schedule=schedule)
        assert counted["products"]
    return seen


@pytest.fixture(scope="module")
def plain() -> dict[bool, Seen]:
    return {tied: fit(tied) for tied in (False, True)}


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("tied", [False, True], ids=["dense", "tied"])
@pytest.mark.parametrize("name", ["pp2", "pp4", "pp2×dp2", "pp2×tp2"])
def test_a_schedule_computes_what_one_process_computes(name: str, tied: bool, plain: dict[bool, Seen]) -> None:
    per_rank = run_ranks(every_schedule, world(LAYOUTS[name]), tied, name, elastic=True, timeout_s=LIMIT_S - 50)
    for schedule in per_rank[0]:
        compare(combine([ran[schedule] for ran in per_rank], LAYOUTS[name]), plain[tied], Case(**EXACT), schedule)


# -- backwards in two parts with settings of memory

ONE_EACH = {"schedule": "InterleavedZeroBubble", "placement": [2, 2]}
WAYS: dict[str, dict[str, Any]] = {
    "one stage each": ONE_EACH,
    "reduced each": {"schedule": "ZBVZeroBubble", "reduce_each_microbatch": True},
    "dual, reduced each": {"schedule": "DualPipeV", "reduce_each_microbatch": True},
    "every second recomputed": {**ONE_EACH, "activation_checkpointing": 2},
    "recomputed": {**ONE_EACH, "activation_checkpointing": True},
    "resharded": {**ONE_EACH, "reshard_after_forward": True},
    "offloaded": {**ONE_EACH, "cpu_offload": True},
    "bf16-mixed": ONE_EACH,
    "bf16-mixed, dual": {"schedule": "DualPipeV"},
}
NOT_SPLIT = ("recomputed", "resharded")
"""Ways whose settings leave nothing for a second part."""
ON_LAYOUTS = {
    "pp2×dp2": ("gpt", [*WAYS]),
    "pp2×tp2": ("llama", ["one stage each", "reduced each", "every second recomputed", "bf16-mixed"]),
}


def run(network: str, way: str, name: str | None = None) -> Seen:
    precision = "bf16-mixed" if way.startswith("bf16") else "32-true"
    sizes, options = (LAYOUTS[name], WAYS[way]) if name else (None, {})
    with counting_second_parts() as counted:
        seen = train(network, sizes, trainer={**CLIPPED, "precision": precision}, **options)
    assert bool(counted["products"]) == (name is not None and way not in NOT_SPLIT)
    return seen


def every_way(network: str, ways: list[str], name: str) -> dict[str, Seen]:
    return {way: run(network, way, name) for way in ways}


@pytest.mark.long
def test_backwards_in_two_parts_train_alike_with_dealt_experts() -> None:
    sizes: dict[str, Any] = {**LAYOUTS["pp2×dp2"], "expert_parallel_size": 2, **ONE_EACH}
    assert_alike(sizes, ["mixtral", "own", "own, all tokens to one expert", "list, called where chosen"])


@pytest.mark.long
@pytest.mark.parametrize("name", ON_LAYOUTS)
def test_backwards_in_two_parts_train_alike_with_every_setting_of_memory(name: str) -> None:
    network, ways = ON_LAYOUTS[name]
    per_rank = run_ranks(every_way, world(LAYOUTS[name]), network, ways, name, elastic=True, timeout_s=500)
    plain = {precision: run(network, precision) for precision in ("32-true", "bf16-mixed")}
    for way in ways:
        ours = combine([ran[way] for ran in per_rank], LAYOUTS[name])
        if way.startswith("bf16"):
            assert_close(ours, plain["bf16-mixed"], *HALF["bf16-mixed"], way)
        else:
            compare(ours, plain["32-true"], Case(**EXACT), way)


# -- saved and resumed


def saved(schedule: str, steps: int, folder: str, resume: str | None = None) -> Seen:
    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    options: dict[str, Any] = {"callbacks": [keep], "trainer": {"enable_checkpointing": True}, "shuffle": True}
    return train("gpt", LAYOUTS["pp2"], steps=steps, schedule=schedule, resume=resume, **options)


def saved_and_resumed(folder: str) -> tuple[Seen, Seen, Seen]:
    """By two stages on each rank; from that by one, and from that by two again, placed otherwise."""
    first = saved("Interleaved1F1B", 3 * SAVED, f"{folder}/1")
    second = saved("1F1B", 2 * SAVED, f"{folder}/2", f"{folder}/1/step={SAVED}.ckpt")
    return first, second, saved("ZBVZeroBubble", 3 * SAVED, f"{folder}/3", f"{folder}/2/step={2 * SAVED}.ckpt")


def test_a_checkpoint_goes_on_with_another_number_of_stages(tmp_path: Path) -> None:
    per_rank = run_ranks(saved_and_resumed, 2, str(tmp_path), elastic=True)
    trained, one, several = (combine([*seen], LAYOUTS["pp2"]) for seen in zip(*per_rank))
    assert [*one.losses, *several.losses] == pytest.approx(trained.losses[SAVED:], rel=2e-6)
    assert largest_difference(several.parameters, trained.parameters) < 2e-5
