"""Optimizers over sharded parameters, and those that can't be."""
