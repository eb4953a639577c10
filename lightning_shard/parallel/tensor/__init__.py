"""Tensor parallelism: plans, styles, and checks that a split model computes what the whole one does."""
