"""Experts dealt to ranks, beside settings of memory and other schedules: what one process computes, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_shard.testing import run_ranks
from tests.parity import combine, layout, world
from tests.training.mixtures import Mixed, assert_same, trained
from tests.training.parallel.test_memory_settings import CLIPPED, HALF, SETTINGS, assert_close

EP2 = {**layout(data=2), "expert_parallel_size": 2}
ON_STAGES = {**layout(pipeline=2, data=2), "expert_parallel_size": 2}
LIST = "list, called where chosen"
TOGETHER = {key: value for key, value in SETTINGS["together"].items() if key != "compile_blocks"}
"""Compiled blocks aren't taken beside dealt experts."""

Way = tuple[list[str], Mapping[str, Any]]
"""Networks, and the strategy's options."""
MEMORY: dict[str, Way] = {
    "recomputed": (["deepseek-v3", "own"], SETTINGS["recomputed"]),
    "every second recomputed": (["mixtral"], SETTINGS["every second recomputed"]),
    "selective": (["deepseek-v3", "mixtral", "own"], SETTINGS["selective"]),
    "offloaded": (["mixtral", "own", LIST], SETTINGS["offloaded"]),
    "reduced each": (["mixtral", LIST], SETTINGS["reduced each"]),
    "resharded": (["mixtral", LIST], SETTINGS["resharded"]),
    "together": (["deepseek-v3", "own"], TOGETHER),
}
SCHEDULES: dict[str, Way] = {
    "interleaved": (["mixtral", "own"], {"schedule": "Interleaved1F1B"}),
    "in two parts": (["deepseek-v3", "own"], {"schedule": "InterleavedZeroBubble"}),
    "zero bubbles": (["qwen3", LIST], {"schedule": "ZBVZeroBubble"}),
    "dual": (["mixtral", "own"], {"schedule": "DualPipeV"}),
    "dual, recomputed": (["mixtral"], {"schedule": "DualPipeV", "activation_checkpointing": 2}),
}
ON_STAGES_TOO = ("recomputed", "selective", "offloaded", "together")


@pytest.mark.long
@pytest.mark.parametrize(
    ("sizes", "kinds", "options"),
    [
        *(pytest.param(EP2, *of, id=way) for way, of in MEMORY.items()),
        *(pytest.param(ON_STAGES, *of, id=f"stages: {way}") for way, of in SCHEDULES.items()),
        *(pytest.param(ON_STAGES, MEMORY[way][0][:1], MEMORY[way][1], id=f"stages: {way}") for way in ON_STAGES_TOO),
    ],
)
def test_settings_of_memory_and_schedules(sizes: dict[str, int], kinds: list[str], options: Mapping[str, Any]) -> None:
    ours = run_ranks(trained, world(sizes), sizes, kinds, trainer=CLIPPED, elastic=True, timeout_s=400, **options)
    plain = trained(None, kinds, trainer=CLIPPED)
    for kind in kinds:
        assert_same([rank[kind] for rank in ours], plain[kind], sizes, kind)


def in_halves(sizes: dict[str, int] | None) -> dict[str, Mixed]:
    return trained(sizes, ["mixtral", LIST], trainer={**CLIPPED, "precision": "bf16-mixed"}, steps=1)


@pytest.mark.long
def test_mixed_precision_on_stages() -> None:
    """One step: later, near ties of a router may fall otherwise."""
    ours, plain = run_ranks(in_halves, 4, ON_STAGES, elastic=True, timeout_s=300), in_halves(None)
    for kind in plain:
        assert_close(combine([rank[kind] for rank in ours], ON_STAGES), plain[kind], *HALF["bf16-mixed"], kind)
