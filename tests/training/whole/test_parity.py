"""Every layout computes what one plain process computes: losses, gradients, their norm, parameters after AdamW steps.

Tolerances. All is in fp32; a layout changes only the order in which numbers are added (microbatches, ranks' partial
sums), which moves a loss of about 4 by a few units in its last place (2⁻²² ≈ 2.4e-7 relative) and gradients of up to
0.05 by less than 1e-7. AdamW divides a gradient by its own size, so where a gradient is near zero its rounding moves
the parameter by a visible part of the learning rate (1e-3): 2e-5 after three steps is 2 % of one.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_shard.testing import run_ranks
from tests.parity import EXACT, LAYOUTS, NETWORKS, Case, Model, Seen, combine, compare, train, world


@pytest.fixture(scope="module")
def plain() -> dict[str, Seen]:
    return {network: train(network) for network in NETWORKS}


def with_its_schedules(network: str, layout: str) -> dict[str, Seen]:
    schedules = ["1F1B"]
    if layout in ("pp4", "pp2×dp2"):
        schedules += ["GPipe"]
    if (layout, network) == ("pp2", "llama"):
        schedules += ["Interleaved1F1B"]
    return {schedule: train(network, LAYOUTS[layout], schedule=schedule) for schedule in schedules}


ON_ALL = ("gpt", "llama")
ALWAYS = {("pp2", "llama"), ("dp2×tp2", "llama"), ("pp2×dp2", "gpt")}
"""What is always trained; the rest is long. On three axes test_resume.py trains one."""


@pytest.mark.parametrize(
    ("layout", "network"),
    [
        pytest.param(layout, network, marks=[] if (layout, network) in ALWAYS else pytest.mark.long)
        for layout in LAYOUTS
        for network in NETWORKS
    ],
)
def test_a_layout_computes_what_one_process_computes(layout: str, network: str, plain: dict[str, Seen]) -> None:
    sizes, reference = LAYOUTS[layout], plain[network]
    per_rank = run_ranks(with_its_schedules, world(sizes), network, layout, elastic=True)
    for schedule in per_rank[0]:
        ours = combine([runs[schedule] for runs in per_rank], sizes)
        assert len(ours.losses) == 3, schedule
        compare(ours, reference, Case(**EXACT), schedule)
        # built with real weights: exactly these, on every layout
        assert all(torch.equal(ours.initial[name], reference.initial[name]) for name in reference.initial), schedule


def initial_from_meta(layout: str, networks: Sequence[str]) -> dict[str, Seen]:
    return {
        network: train(network, LAYOUTS[layout], steps=1, module=lambda n=network: Model(n, on_meta=True))
        for network in networks
    }


def whole_from_meta(layout: str, networks: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    sizes = LAYOUTS[layout]
    per_rank = run_ranks(initial_from_meta, world(sizes), layout, networks, elastic=True)
    return {network: combine([runs[network] for runs in per_rank], sizes).initial for network in networks}


@pytest.fixture(scope="module")
def from_meta() -> dict[str, dict[str, Tensor]]:
    return whole_from_meta("tp2", ON_ALL)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[] if name == "pp2" else pytest.mark.long)
        for name in ("pp2", "dp4", "dp2×tp2", "pp2×dp2×tp2")
    ],
)
def test_a_seed_gives_the_same_weights_from_meta_on_every_layout(
    layout: str, from_meta: dict[str, dict[str, Tensor]]
) -> None:
    for network, ours in whole_from_meta(layout, ON_ALL).items():
        first = from_meta[network]
        assert ours.keys() == first.keys()
        different = [name for name in first if not torch.equal(ours[name], first[name])]
        assert not different, f"{network}: {different}"
    assert all(tensor.std() > 0 for name, tensor in from_meta["llama"].items() if "proj" in name)
