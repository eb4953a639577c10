"""Settings that can't work with any model are refused where the strategy is made, before a process is started."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch.torch_version import TorchVersion

from lightning_shard import HybridShardStrategy
from lightning_shard.errors import ConfigurationError, LayoutError, PlacementError, PlanError, StepError
from lightning_shard.layout import Layout
from lightning_shard.plugin.assembly.assemble import Assembly
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps.loss_weight import LossWeights
from lightning_shard.testing import run_ranks
from tests.parity import QUIET, Model, loader

PP2 = {"pipeline_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({**PP2, "schedule": "1f1b"}, ConfigurationError, "schedule='1f1b' isn't one of"),
        ({**PP2, "microbatches": 0}, ConfigurationError, r"microbatches \(0\) must be an integer of at least 1"),
        ({**PP2, "microbatches": 10**9}, ConfigurationError, r"microbatches \(1000000000\) .* is more than \d+"),
        ({"data_parallel_size": np.ones(2)}, LayoutError, r"data_parallel_size \(array.*or \"auto\""),
        ({"pipeline_parallel_size": 10**9}, ConfigurationError, r"pipeline_parallel_size \(1000000000\) is more than"),
        ({"activation_checkpointing": np.ones(2)}, ConfigurationError, "activation_checkpointing=array"),
        ({"tensor_parallel_plan": {3: "colwise"}}, PlanError, "3 is no pattern"),
        ({"compile_blocks": np.ones(2)}, ConfigurationError, "compile_blocks=array.* isn't known"),
        ({"reshard_after_forward": 0}, ConfigurationError, "reshard_after_forward=0 is neither True nor False"),
        ({**PP2, "placement": "best"}, PlacementError, r"placement \('best'\) must be"),
        ({**PP2, "placement": [0, 4]}, PlacementError, "every stage at least 1 block"),
        ({**PP2, "placement": [1, 2, 3]}, PlacementError, "has 3 numbers, and schedule='1F1B' .* has 2 stages"),
        (
            {**PP2, "placement": [2, 2, 2], "schedule": "auto"},
            PlacementError,
            'has 3 numbers, and schedule="auto" .* has 2 or 4 stages',
        ),
        ({"placement": [1, 3]}, PlacementError, r"has 2 numbers, and pipeline_parallel_size=1 has one stage: set"),
        (
            {**PP2, "placement": [1, 3], "schedule": "DualPipeV"},
            PlacementError,
            r"has 2 numbers, and schedule='DualPipeV' .* has 4 stages: give one for each",
        ),
        (
            {**PP2, "microbatches": 2, "schedule": "ZBVZeroBubble"},
            ConfigurationError,
            r"at least 2 × pipeline_parallel_size \(2\).*use 4 or more",
        ),
        ({"pipeline_blocks": 3}, PlacementError, "pipeline_blocks=3 must be the name of a list"),
        ({"tensor_parallel_plan": "colwise"}, PlanError, "tensor_parallel_plan='colwise' must be a mapping"),
        (
            {"tensor_parallel_plan": {"a": "columnwise"}},
            PlanError,
            r"'columnwise'; known are .*ParallelStyle",
        ),
        ({"expert_parallel_plan": ["experts"]}, PlanError, r'such as \{"layers\.\*\.name": "experts"\}'),
        ({"expert_parallel_plan": {"a": "colwise"}}, PlanError, r"'a' has style 'colwise'; known are \['experts'\]"),
        ({"loss_weight": "tokens"}, ConfigurationError, "loss_weight='tokens' must be a function"),
        ({"timeout": 30}, ConfigurationError, "timeout=30 must be a datetime.timedelta"),
        ({"timeout": timedelta(0)}, ConfigurationError, "more than 0 s"),
        ({"cpu_offload": 1}, ConfigurationError, "cpu_offload=1 is neither True nor False"),
        ({"context_parallel_size": 2, "compile_blocks": True}, ConfigurationError, "compile_blocks with context"),
    ],
)
def test_what_cannot_work_is_refused_at_once(settings: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        HybridShardStrategy(**settings)


@pytest.mark.parametrize("strategy", [HybridShardStrategy, lambda: "hybrid_shard"], ids=["instance", "name"])
@pytest.mark.parametrize(
    ("precision", "says"),
    [
        ("transformer-engine", "'transformer-engine' isn't supported by HybridShardStrategy"),
        ("16-mixed", "'16-mixed' isn't done on the CPU .* use precision='bf16-mixed'"),
    ],
)
def test_precisions_are_refused_by_name_where_a_trainer_is_made(precision: Any, says: str, strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match=says):
        L.Trainer(strategy=strategy(), precision=precision, accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("many", "gave 'many' for a batch"),
        (None, "gave None"),
        (torch.ones(2, 3), r"gave a tensor of shape \(2, 3\)"),
        (-1, "gave -1"),
        (float("nan"), "gave nan"),
    ],
)
def test_a_loss_weight_that_is_no_number_is_refused(given: Any, told: str) -> None:
    weights = LossWeights(lambda _: given, None, torch.device("cpu"))  # type: ignore[arg-type]
    with pytest.raises(StepError, match=told):
        weights.of([{}])


def test_compiled_blocks_on_stages_and_tensor_ranks_need_a_newer_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**PP2, "tensor_parallel_size": 2}
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0+cu130"))
    with pytest.raises(ConfigurationError, match=r"fails within torch 2\.11.*install torch 2\.12 or newer"):
        HybridShardStrategy(**sizes, compile_blocks=True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.0"))
    HybridShardStrategy(**sizes, compile_blocks=True)


def test_another_trainer_with_other_settings_is_told_which_differ() -> None:
    old, new = Settings("auto", None, None), Settings("auto", None, None, compile_blocks=True)
    assembly: Any = SimpleNamespace(layout=Layout(tensor_parallel_size=2), settings=old)
    with pytest.raises(ConfigurationError) as caught:
        Assembly.lay_out_again(assembly, Layout(), new, ())
    assert str(caught.value) == (
        "An earlier Trainer has sharded this module with tensor_parallel_size=2, compile_blocks=False, and it can't be"
        " resharded to tensor_parallel_size=1, compile_blocks=True: build a new module."
    )


def held_without_a_pipeline() -> list[list[tuple[str, ...]]]:
    held = []
    for schedule in ("1F1B", "Interleaved1F1B", "DualPipeV"):
        strategy = HybridShardStrategy(schedule=schedule)
        L.Trainer(strategy=strategy, devices=1, max_steps=1, **QUIET).fit(Model(), loader(4))
        held.append([stage.names for stage in strategy.placement.stages])
    return held


@pytest.mark.long
def test_without_a_pipeline_one_stage_has_all_blocks_whatever_the_schedule() -> None:
    [[plain, *others]] = run_ranks(held_without_a_pipeline, 1, elastic=True)
    assert len(plain) == 1
    assert others == [plain, plain]
