"""Tensor parallelism: plans, styles, and the checks that a plan fits the code it splits."""
