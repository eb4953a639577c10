"""Hybrid-sharded training of unmodified LightningModules, and checkpoints that load on any layout.

Importing registers ``Trainer(strategy="hybrid_shard")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.plugin.checkpoint_io import ShardedCheckpointIO
from lightning_shard.plugin.strategy import HybridShardStrategy

if HybridShardStrategy.strategy_name not in StrategyRegistry:
    StrategyRegistry.register(
        HybridShardStrategy.strategy_name,
        HybridShardStrategy,
        description="Fully sharded data, tensor and pipeline parallelism of unmodified LightningModules.",
    )

__all__ = ["HybridShardStrategy", "ShardedCheckpointIO"]
