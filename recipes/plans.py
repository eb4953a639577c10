"""The tensor- and expert-parallel plans of ``conf/`` for the recipes' networks, for use in tests and benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_STRATEGY: Any = OmegaConf.load(Path(__file__).parents[1] / "conf" / "strategy" / "hybrid_shard.yaml")

#: The tensor-parallel plan of the GPT in ``gpt.py``: module name to style.
GPT: dict[str, str] = {**_STRATEGY.tensor_parallel_plan}
#: The expert-parallel plan of the mixture in ``moe.py``.
EXPERTS: dict[str, str] = {**_STRATEGY.expert_parallel_plan}
