"""What is said of a quantity that a layout computes otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_shard.testing.compare import Apart, Facts, Parting, hint
from lightning_shard.testing.layouts import parse


@pytest.mark.parametrize(("ratio", "is_a_sum"), [(0.25, True), (4.0, True), (0.2503, True), (0.9, False), (2.0, False)])
def test_a_sum_is_suspected_only_of_a_factor_that_is_the_number_of_parts(ratio: float, is_a_sum: bool) -> None:
    values: dict[str, Any] = {
        "kind": "output",
        "name": "loss",
        "expected": "1",
        "found": str(ratio),
        "relative": 1.0,
        "ranks": (),
    }
    parting = Parting("training batch 0", [Apart(**values, ratio=ratio)])
    said = hint(parting, Facts(), parse("pp2", {}))  # two microbatches for each stage
    assert ("reduction='sum'" in said) is is_a_sum
