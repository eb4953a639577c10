"""Hints: the usual cause of a quantity that differs between a layout and one process."""

from __future__ import annotations

import math

from lightning_shard.arguments import few
from lightning_shard.testing.compare import Facts, Parting
from lightning_shard.testing.layouts import NamedLayout

_ROUNDING = 1e-2
"""Rounding error of bf16 after a few layers, relative to a gradient's largest value."""


def hint(parting: Parting, facts: Facts, layout: NamedLayout) -> str:
    """A sentence or two about the likeliest cause."""
    first = parting.apart[0]
    stages = layout.arguments.get("pipeline_parallel_size", 1)
    data = layout.arguments.get("data_parallel_size", 1)
    parts = data * (layout.arguments.get("microbatches") or 2 * stages if stages > 1 else 1)
    kinds = {apart.kind for apart in parting.apart}

    if parting.moment == "before training":
        return (
            "make_module must make the same weights each time: have it draw from torch's, numpy's or random's global"
            " generators only, which are seeded before it is called."
        )
    if facts.precision != "32-true" and first.relative < _ROUNDING:
        return f"With precision={facts.precision!r} rounding is larger: try tolerance={_ROUNDING:g}."
    if facts.batch_norms and parts > 1:
        return (
            f"{few(facts.batch_norms, 3)} computes statistics over the samples of one call: a microbatch with pipeline"
            " stages, the rank's part of the batch with data parallelism. Use GroupNorm or LayerNorm, or"
            " microbatches=1 on stages, or accept the difference, as with any data parallelism."
        )
    if facts.draws:
        return (
            f"Random numbers are drawn by {few(facts.draws, 3)}; each layout draws others. Set such layers to 0 for"
            " this test if they have an effect."
        )
    if kinds == {"log"}:
        return _of_logs(first.ratio, parts, stages, data)
    is_weighted = layout.arguments.get("loss_weight") is not None
    if facts.padded and parts > 1 and kinds & {"output", "gradient"} and not is_weighted:
        return (
            f"{facts.padded}: if the loss is a mean over what counts, each part's mean weighs the same, whatever it is"
            " over. Weigh them by their numbers (HybridShardStrategy(loss_weight=…)), give all samples equally many for"
            " this test, or divide a sum by a number that doesn't depend on the part."
        )
    if parts > 1 and _is_of_a_sum(first.ratio, parts) and first.kind in ("output", "gradient", "gradient norm"):
        return (
            f"It is {first.ratio:.4g} times as large. A batch is cut into {parts} parts here, whose losses and numbers"
            " are averaged: a sum (reduction='sum'), or a count of samples, becomes a mean of the parts' sums. Divide"
            " by the number of samples."
        )
    if parts > 1 and first.kind == "output":
        return (
            f"A batch is cut into {parts} parts here, and the step sees one at a time: a loss that compares samples of"
            " a batch with each other, or averages over a number that varies between parts, has another value."
        )
    if layout.arguments.get("tensor_parallel_size", 1) > 1:
        return (
            "Look at the tensor-parallel plan: what is split by features (colwise) must meet the layer that is split by"
            " its input (rowwise), and what runs between them must work on each feature by itself."
        )
    return "If nothing in the module explains it, please report it with this text."


def _is_of_a_sum(ratio: float | None, parts: int) -> bool:
    """Whether a quantity is as many times as large, or as small, as there are parts."""
    return ratio is not None and any(math.isclose(abs(ratio), of, rel_tol=0.05) for of in (parts, 1 / parts))


def _of_logs(ratio: float | None, parts: int, stages: int, data: int) -> str:
    if stages > 1:
        scaled = f"It is {ratio:.4g} times as large. " if ratio is not None and abs(ratio - 1) > 1e-3 else ""
        return (
            f"{scaled}Everything else is equal, so the difference comes from what is logged, and how. A step runs for"
            f" each of {parts} parts of a batch: self.log averages over them (a count of samples becomes that of a"
            " part; reduce_fx sums over parts, not batches), and what a step keeps itself after calling the network is"
            " kept once for each part."
        )
    if data > 1:
        return (
            "Everything else is equal, so the difference comes from logging: each data rank logs its own, and the"
            " ranks' mean was compared. Log with sync_dist=True, and a count with reduce_fx='sum'."
        )
    return "Everything else is equal, so the difference comes from what is logged, and how."
