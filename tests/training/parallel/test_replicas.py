"""Parameters sharded within replicas (HSDP), beside every other axis, another schedule and settings of memory."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity import EXACT, Case, assert_alike, layout
from tests.training.parallel.test_memory_settings import CLIPPED

IN_TWO_PARTS = {"schedule": "ZBVZeroBubble"}
REPLICAS = {"data_parallel_replicas": 2}
DEAR = {"activation_checkpointing": True, "reduce_each_microbatch": True, "reshard_after_forward": True}
ROWS: dict[str, tuple[dict[str, int], str, list[dict[str, Any]]]] = {
    "dp4": (layout(data=4), "gpt", [{}, DEAR, {"cpu_offload": True}]),
    "pp2×dp2": (layout(pipeline=2, data=2), "gpt", [{}, {"cpu_offload": True}, IN_TWO_PARTS]),
    "pp2×dp4": (layout(pipeline=2, data=4), "gpt", [{}, {"schedule": "DualPipeV"}, DEAR]),
    "dp4×tp2": (layout(data=4, tensor=2), "llama", [{}]),
}


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS)
def test_replicas_compute_what_one_process_computes(row: str) -> None:
    sizes, network, options = ROWS[row]
    own = {"trainer": CLIPPED}
    assert_alike(sizes, *(Case(None, network, own, strategy={**REPLICAS, **more}, **EXACT) for more in options))
