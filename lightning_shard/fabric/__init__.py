"""Sharded modules and checkpoints for Fabric's loops: ``Fabric(strategy="hybrid_shard")``, or an instance from here."""

from lightning_shard.fabric.strategy import HybridShardStrategy

__all__ = ["HybridShardStrategy"]
