"""Timelines and plans, drawn."""
