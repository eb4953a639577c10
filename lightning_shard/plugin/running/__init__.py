"""Processes: how they meet, fail and end together."""
