"""Writes Lightning's state to checkpoints, and restores it."""
