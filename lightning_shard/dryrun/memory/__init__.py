"""Computes a layout's memory from the counts of one microbatch."""
