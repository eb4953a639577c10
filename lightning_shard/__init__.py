"""Hybrid-sharded training and trustworthy sharded checkpoints for Lightning."""
