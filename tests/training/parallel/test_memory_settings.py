"""Settings of memory and precision: each alone, and all together, computes what one plain process computes.

So do parameters sharded within replicas (HSDP), beside every other axis, and experts dealt to ranks, token by token.

Tolerances. What saves memory computes the same numbers again, so the bounds are those of ``test_parity.py``. In 16 bits
a number is rounded to 2⁻⁹ of its size (bf16) or 2⁻¹² (fp16) by each operation, and sums are cut elsewhere: gradients
agree to some times that of their tensor's largest value, and small ones of fp16, which are subnormal numbers, to less.
In bf16-true that holds for losses too; in bf16-mixed they are means in 32 bits over many samples. AdamW in fp16 divides
by zero in its first step, in plain torch too: one is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightning_shard.testing import run_ranks
from recipes.gpt import MLP
from tests import on_gpu
from tests.parity import EXACT, LAYOUTS, Case, Model, Seen, assert_alike, combine, compare, layout, train, world
from tests.training.mixtures import Mixed, assert_same, trained

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
HALF = {"bf16-mixed": (1e-4, 2e-2), "bf16-true": (3e-2, 6e-2), "16-true": (2e-3, 1e-1)}
STEPS = {"16-true": 1}


#: What other tests don't show on these layouts; the rest is long.
CHOSEN = {
    "dp2": ["selective", "accumulating", *HALF],
    "pp2": ["together", "bf16-mixed, together"],
}
EVERY = [*SETTINGS, "accumulating", *HALF, "bf16-mixed, together"]


def run(network: str, name: str, sizes: Mapping[str, int] | None = None) -> Seen:
    """Of a setting, a precision, or both, on a layout or plainly."""
    precision, _, setting = name.partition(", ") if name.startswith(tuple(HALF)) else ("32-true", "", name)
    trainer = {**CLIPPED, "precision": precision}
    if name == "accumulating":
        setting, trainer["accumulate_grad_batches"] = "together", 2
    options = SETTINGS.get(setting, {}) if sizes is not None else {}
    return train(network, sizes, trainer=trainer, steps=STEPS.get(precision, 3), **options)


def with_settings(sizes: Mapping[str, int], network: str, names: Sequence[str]) -> dict[str, Seen]:
    return {name: run(network, name, sizes) for name in names}


ON_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("pp2", "tp2", "pp2×dp2", "pp2×tp2")},
    "dp2": layout(data=2),
}


@pytest.mark.parametrize(
    ("name", "network", "names"),
    [
        *(pytest.param(name, "gpt", names, id=name) for name, names in CHOSEN.items()),
        *(
            pytest.param(name, network, EVERY, id=f"{name} {network}", marks=pytest.mark.long)
            for name in ON_LAYOUTS
            for network in ("gpt", "llama")
        ),
    ],
)
def test_each_setting_computes_what_one_process_computes(name: str, network: str, names: list[str]) -> None:
    sizes = ON_LAYOUTS[name]
    limit_s = 30 * len(names) * world(sizes)
    per_rank = run_ranks(with_settings, world(sizes), sizes, network, names, elastic=True, timeout_s=limit_s)
    needed = {"32-true", *(each.partition(",")[0] for each in names)}
    plain = {key: run(network, key) for key in ("32-true", "accumulating", *HALF) if key in needed}
    for setting in names:
        ours = combine([runs[setting] for runs in per_rank], sizes)
        precision = setting.partition(",")[0]
        if precision in HALF:
            assert_close(ours, plain[precision], *HALF[precision], setting)
            continue
        expected = plain.get(setting, plain["32-true"])
        compare(ours, expected, Case(**EXACT), setting)


def assert_close(ours: Seen, plain: Seen, loss: float, gradient: float, name: str) -> None:
    assert ours.losses == pytest.approx(plain.losses, rel=loss), name
    assert ours.norm == pytest.approx(plain.norm, rel=gradient), name
    assert ours.gradients.keys() == plain.gradients.keys()
    for key, expected in plain.gradients.items():
        difference = float((ours.gradients[key] - expected).abs().max() / expected.abs().max())
        assert difference < gradient, f"{name}: {key}"


class InWholeBits(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class Islands(Model):
    """Layers of which a block is without autocast crashed, as they were gathered in bf16."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.blocks[::2]:
            block.mlp.__class__ = InWholeBits


def in_bf16_on_one_rank(options: dict[str, Any]) -> dict[str, tuple[Seen, Seen]]:
    """By plain autocast and by ours, with the same kernels on the same shapes."""
    mixed = {"precision": "bf16-mixed"}
    islands = [train("gpt", sizes, trainer=mixed, module=Islands) for sizes in (None, layout())]
    return {"islands": (islands[0], islands[1])} | {
        network: (train(network, trainer=mixed), train(network, layout(), trainer=mixed, **options))
        for network in ("gpt", "llama")
    }


SAVING = {"activation_checkpointing": "selective", "compile_blocks": "aot_eager"}


@pytest.mark.parametrize("options", [{}, pytest.param(SAVING, marks=pytest.mark.long)], ids=["plain", "saving"])
def test_bf16_mixed_is_lightnings_own_bit_for_bit(options: dict[str, Any]) -> None:
    [runs] = run_ranks(in_bf16_on_one_rank, 1, options, elastic=True, timeout_s=200)
    for name, (plain, ours) in runs.items():
        assert ours.losses == plain.losses, name
        assert ours.metrics == plain.metrics, name
        for part in ("gradients", "parameters"):
            own, expected = getattr(ours, part), getattr(plain, part)
            assert own.keys() == expected.keys()
            assert all(torch.equal(own[key], expected[key]) for key in expected), f"{name}: {part}"


class Overflowing(Model):
    """One rank's loss of the second batch is infinite."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.scales: list[float] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 1 and self.trainer.global_rank == self.rank else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]


def scaled(sizes: Mapping[str, int] | None, rank: int, **options: Any) -> tuple[Seen, list[float], dict[str, Any]]:
    """With fp16's scaler; the Trainer itself takes 16-mixed for CUDA only."""
    module = Overflowing(rank)
    plugin = MixedPrecision("16-mixed", on_gpu.device_type())
    seen = train("gpt", sizes, module=lambda: module, steps=3, trainer={"plugins": plugin, **CLIPPED}, **options)
    return seen, module.scales, plugin.state_dict()


@pytest.mark.parametrize(
    "sizes", [pytest.param(layout(data=2), marks=pytest.mark.long), layout(pipeline=2)], ids=["dp2", "pp2"]
)
def test_an_overflow_on_one_rank_has_all_ranks_leave_out_the_step(sizes: dict[str, int]) -> None:
    rank = 1 if sizes["data_parallel_size"] == 2 else 0  # where the loss is
    per_rank = run_ranks(scaled, 2, sizes, rank, elastic=True, timeout_s=200)
    expected, scales, state = scaled(None, 0)
    assert scales == [2.0**16, 2.0**15, 2.0**15]
    assert all(seen[1] == scales and seen[2] == state for seen in per_rank)
    ours = combine([seen[0] for seen in per_rank], sizes)
    assert ours.losses[::2] == pytest.approx(expected.losses[::2], rel=1e-4)
    assert ours.norm == pytest.approx(expected.norm, rel=2e-3)  # unscaled before clipping
    assert all(parameter.isfinite().all() for parameter in ours.parameters.values())


IN_TWO_PARTS = {"schedule": "ZBVZeroBubble"}
REPLICAS = {"data_parallel_replicas": 2}
DEAR = {"activation_checkpointing": True, "reduce_each_microbatch": True, "reshard_after_forward": True}
REPLICATED: dict[str, tuple[dict[str, int], str, list[dict[str, Any]]]] = {
    "dp4": (layout(data=4), "gpt", [{}, DEAR, {"cpu_offload": True}]),
    "pp2×dp2": (layout(pipeline=2, data=2), "gpt", [{}, {"cpu_offload": True}, IN_TWO_PARTS]),
    "pp2×dp4": (layout(pipeline=2, data=4), "gpt", [{}, {"schedule": "DualPipeV"}, DEAR]),
    "dp4×tp2": (layout(data=4, tensor=2), "llama", [{}]),
}


@pytest.mark.long
@pytest.mark.parametrize("row", REPLICATED)
def test_replicas_compute_what_one_process_computes(row: str) -> None:
    sizes, network, options = REPLICATED[row]
    own = {"trainer": CLIPPED}
    assert_alike(sizes, *(Case(None, network, own, strategy={**REPLICAS, **more}, **EXACT) for more in options))


EP2 = {**layout(data=2), "expert_parallel_size": 2}
ON_STAGES = {**layout(pipeline=2, data=2), "expert_parallel_size": 2}
LIST = "list, called where chosen"
UNCOMPILED = {key: value for key, value in SETTINGS["together"].items() if key != "compile_blocks"}
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
    "together": (["deepseek-v3", "own"], UNCOMPILED),
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
