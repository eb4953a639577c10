"""Backwards in two parts on every layout and with every setting of memory: training is that of one plain process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_shard.testing import run_ranks
from tests.parity import LAYOUTS, Seen, combine, train, world
from tests.training.mixtures import assert_alike
from tests.training.parallel.test_memory_settings import HALF, assert_close
from tests.training.pipeline.test_several_stages import CLIPPED, check, counting_second_parts

ONE_EACH = {"schedule": "InterleavedZeroBubble", "placement": [2, 2]}
WAYS: dict[str, dict[str, Any]] = {
    "one stage each": ONE_EACH,
    "two stages each": {"schedule": "InterleavedZeroBubble"},
    "zero bubbles": {"schedule": "ZBVZeroBubble"},
    "dual": {"schedule": "DualPipeV"},
    "reduced each": {"schedule": "ZBVZeroBubble", "reduce_each_microbatch": True},
    "dual, reduced each": {"schedule": "DualPipeV", "reduce_each_microbatch": True},
    "every second recomputed": {**ONE_EACH, "activation_checkpointing": 2},
    "recomputed": {**ONE_EACH, "activation_checkpointing": True},
    "resharded": {**ONE_EACH, "reshard_after_forward": True},
    "offloaded": {**ONE_EACH, "cpu_offload": True},
    "bf16-mixed": ONE_EACH,
    "bf16-mixed, dual": {"schedule": "DualPipeV"},
}
WHOLE = ("recomputed", "resharded")
"""Ways whose settings leave nothing for a second part."""
ON_LAYOUTS = {
    "pp2×dp2": ("gpt", [*WAYS]),
    "pp2×tp2": ("llama", ["one stage each", "zero bubbles", "reduced each", "every second recomputed", "bf16-mixed"]),
    "pp4": ("gpt", ["four stages"]),
}


def run(network: str, way: str, sizes: Mapping[str, int] | None = None) -> Seen:
    options = WAYS.get(way, {"schedule": "InterleavedZeroBubble", "placement": [1, 1, 1, 1]})
    precision = "bf16-mixed" if way.startswith("bf16") else "32-true"
    with counting_second_parts() as counted:
        seen = train(network, sizes, trainer={**CLIPPED, "precision": precision}, **(options if sizes else {}))
    assert bool(counted["products"]) == (sizes is not None and way not in WHOLE)
    return seen


def every_way(network: str, ways: list[str], sizes: Mapping[str, int]) -> dict[str, Seen]:
    return {way: run(network, way, sizes) for way in ways}


@pytest.mark.long
def test_with_dealt_experts_too() -> None:
    sizes: dict[str, Any] = {**LAYOUTS["pp2×dp2"], "expert_parallel_size": 2, **ONE_EACH}
    assert_alike(sizes, ["mixtral", "own", "own, all tokens to one expert", "list, called where chosen"])


@pytest.mark.long
@pytest.mark.parametrize("name", ON_LAYOUTS)
def test_training_is_that_of_one_process(name: str) -> None:
    (network, ways), sizes = ON_LAYOUTS[name], LAYOUTS[name]
    per_rank = run_ranks(every_way, world(sizes), network, ways, sizes, elastic=True, timeout_s=500)
    plain = {precision: run(network, precision) for precision in ("32-true", "bf16-mixed")}
    for way in ways:
        ours = combine([ran[way] for ran in per_rank], sizes)
        if way.startswith("bf16"):
            assert_close(ours, plain["bf16-mixed"], *HALF["bf16-mixed"], way)
        else:
            check(ours, plain["32-true"])
