"""Settings of memory and precision: each alone, and all together, computes what one plain process computes.

Tolerances. What saves memory computes the same numbers again, so the bounds are those of ``test_parity.py``. In 16 bits a
number is rounded to 2⁻⁸ of its size (bf16) or 2⁻¹¹ (fp16), at every operation and at other places where a batch is cut
otherwise: gradients agree to some times that of their tensor's largest, losses, which are means over many, to less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lightning_shard.testing import run_ranks
from tests.parity import LAYOUTS, Seen, combine, largest_difference, layout, train, world

LOSS, GRADIENT, PARAMETER = 2e-6, 1e-7, 2e-5

CLIPPED = {"gradient_clip_val": 0.1}
TOGETHER = {
    "activation_checkpointing": "selective",
    "cpu_offload": True,
    "compile_blocks": "aot_eager",
    "reduce_each_microbatch": True,
    "reshard_after_forward": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "recomputed": {"activation_checkpointing": True},
    "every second recomputed": {"activation_checkpointing": 2},
    "selective": {"activation_checkpointing": "selective"},
    "offloaded": {"cpu_offload": True},
    "compiled": {"compile_blocks": "aot_eager"},
    "reduced each": {"reduce_each_microbatch": True},
    "resharded": {"reshard_after_forward": True},
    "kept": {"reshard_after_forward": False},
    "together": TOGETHER,
}

#: Largest relative difference of losses and norm, and of a gradient from its tensor's largest value.
HALF = {"bf16-mixed": (1e-3, 2e-2), "bf16-true": (1e-2, 6e-2), "16-true": (1e-3, 2e-2)}


def with_settings(sizes: Mapping[str, int], network: str) -> dict[str, Seen]:
    accumulating = {"accumulate_grad_batches": 2, **CLIPPED}
    runs = {name: train(network, sizes, trainer=CLIPPED, **options) for name, options in SETTINGS.items()}
    runs["accumulating"] = train(network, sizes, trainer=accumulating, steps=2, **TOGETHER)
    for precision in HALF:
        runs[precision] = train(network, sizes, trainer={**CLIPPED, "precision": precision})
    runs["bf16-mixed, together"] = train(network, sizes, trainer={**CLIPPED, "precision": "bf16-mixed"}, **TOGETHER)
    return runs


def plainly(network: str) -> dict[str, Seen]:
    runs = {precision: train(network, trainer={**CLIPPED, "precision": precision}) for precision in HALF}
    runs["accumulating"] = train(network, trainer={"accumulate_grad_batches": 2, **CLIPPED}, steps=2)
    runs[""] = train(network, trainer=CLIPPED)
    return runs


@pytest.mark.parametrize(
    ("sizes", "network"),
    [
        pytest.param(layout(data=2), "gpt", id="dp2"),
        pytest.param(layout(pipeline=2), "gpt", id="pp2"),
        *(
            pytest.param(sizes, network, id=f"{name} {network}", marks=pytest.mark.long)
            for name, sizes in {**LAYOUTS, "dp2": layout(data=2)}.items()
            if name in ("tp2", "pp2", "dp2", "pp2×dp2", "pp2×tp2")
            for network in ("gpt", "llama")
            if (name, network) not in (("dp2", "gpt"), ("pp2", "gpt"))
        ),
    ],
)
def test_each_setting_computes_what_one_process_computes(sizes: dict[str, int], network: str) -> None:
    plain = plainly(network)
    per_rank = run_ranks(with_settings, world(sizes), sizes, network, elastic=True, timeout_s=600)
    for name in per_rank[0]:
        ours = combine([runs[name] for runs in per_rank], sizes)
        precision = name.partition(",")[0]
        if precision in HALF:
            assert_close(ours, plain[precision], *HALF[precision], name)
            continue
        expected = plain.get(name, plain[""])
        assert ours.losses == pytest.approx(expected.losses, rel=LOSS), name
        assert ours.norm == pytest.approx(expected.norm, rel=1e-6), name
        assert largest_difference(ours.gradients, expected.gradients) < GRADIENT, name
        assert largest_difference(ours.parameters, expected.parameters) < PARAMETER, name


def assert_close(ours: Seen, plain: Seen, loss: float, gradient: float, name: str) -> None:
    assert ours.losses == pytest.approx(plain.losses, rel=loss), name
    assert ours.norm == pytest.approx(plain.norm, rel=gradient), name
    assert ours.gradients.keys() == plain.gradients.keys()
    for key, expected in plain.gradients.items():
        difference = float((ours.gradients[key] - expected).abs().max() / expected.abs().max())
        assert difference < gradient, f"{name}: {key}"
