"""Estimates a step's time on a device from the counts of one microbatch."""
