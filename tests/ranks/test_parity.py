"""Every layout computes what one plain process computes: losses, gradients, their norm, parameters after AdamW steps.

Tolerances. All is in fp32; a layout changes only the order in which numbers are added (microbatches, ranks' partial
sums), which moves a loss of about 4 by a few units in its last place (2⁻²² ≈ 2.4e-7 relative) and gradients of up to
0.05 by less than 1e-7. AdamW divides a gradient by its own size, so where a gradient is near zero its rounding moves
the parameter by a visible part of the learning rate (1e-3): 2e-5 after three steps is 2 % of one.
"""

from __future__ import annotations

import pytest
import torch

from lightning_shard.testing import run_ranks
from tests.parity import LAYOUTS, NETWORKS, Model, Seen, combine, largest_difference, train, world

LOSS, GRADIENT, PARAMETER = 2e-6, 1e-7, 2e-5


@pytest.fixture(scope="module")
def plain() -> dict[str, Seen]:
    return {network: train(network) for network in NETWORKS}


def with_every_schedule(network: str, layout: str) -> dict[str, Seen]:
    sizes = LAYOUTS[layout]
    schedules = ["1F1B", "GPipe"] if sizes["pipeline_parallel_size"] > 1 else ["1F1B"]
    return {schedule: train(network, sizes, schedule=schedule) for schedule in schedules}


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_computes_what_one_process_computes(layout: str, network: str, plain: dict[str, Seen]) -> None:
    sizes, reference = LAYOUTS[layout], plain[network]
    per_rank = run_ranks(with_every_schedule, world(sizes), network, layout, elastic=True)
    for schedule in per_rank[0]:
        ours = combine([runs[schedule] for runs in per_rank], sizes)
        assert len(ours.losses) == 3, schedule
        assert ours.losses == pytest.approx(reference.losses, rel=LOSS), schedule
        assert ours.metrics == pytest.approx(reference.metrics, rel=LOSS), schedule
        assert ours.norm == pytest.approx(reference.norm, rel=1e-6), schedule
        assert largest_difference(ours.gradients, reference.gradients) < GRADIENT, schedule
        assert largest_difference(ours.parameters, reference.parameters) < PARAMETER, schedule
        # built with real weights: exactly these, on every layout
        assert all(torch.equal(ours.initial[name], reference.initial[name]) for name in reference.initial), schedule


def initial_from_meta(layout: str) -> dict[str, Seen]:
    return {
        network: train(network, LAYOUTS[layout], steps=1, module=lambda n=network: Model(n, on_meta=True))
        for network in NETWORKS
    }


def test_a_seed_gives_the_same_weights_from_meta_on_every_layout() -> None:
    weights = {}
    for layout, sizes in LAYOUTS.items():
        per_rank = run_ranks(initial_from_meta, world(sizes), layout, elastic=True)
        for network in per_rank[0]:
            ours = combine([runs[network] for runs in per_rank], sizes).initial
            first = weights.setdefault(network, ours)
            assert ours.keys() == first.keys()
            different = [name for name in first if not torch.equal(ours[name], first[name])]
            assert not different, f"{network} on {layout}: {different}"
    assert all(tensor.std() > 0 for name, tensor in weights["llama"].items() if "proj" in name)
