"""The plans by which ``conf/`` splits the recipes' networks, for tests and benchmarks of the same networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

_STRATEGY: Any = OmegaConf.load(Path(__file__).parents[1] / "conf" / "strategy" / "hybrid_shard.yaml")

#: Of the GPT in ``gpt.py``, over tensor ranks: names in the network, and how each is split.
GPT: dict[str, str] = {**_STRATEGY.tensor_parallel_plan}
#: Of the mixture in ``moe.py``, over expert ranks.
EXPERTS: dict[str, str] = {**_STRATEGY.expert_parallel_plan}
