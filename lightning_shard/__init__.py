"""Hybrid-sharded training of unmodified LightningModules, and checkpoints that load on any layout.

Importing registers ``Trainer(strategy="hybrid_shard")``. Where Lightning isn't installed,
``lightning_shard.checkpoint`` and the command line work all the same.
"""

from importlib.util import find_spec

__all__ = ["HybridShardStrategy", "ModelCheckpoint", "ShardedCheckpointIO"]

if find_spec("lightning") is not None:
    from lightning.pytorch.strategies import StrategyRegistry

    from lightning_shard.plugin.checkpoint_io import ShardedCheckpointIO
    from lightning_shard.plugin.model_checkpoint import ModelCheckpoint
    from lightning_shard.plugin.strategy import HybridShardStrategy

    if HybridShardStrategy.strategy_name not in StrategyRegistry:
        StrategyRegistry.register(
            HybridShardStrategy.strategy_name,
            HybridShardStrategy,
            description="Fully sharded data, tensor and pipeline parallelism of unmodified LightningModules.",
        )
