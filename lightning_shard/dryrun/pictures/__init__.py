"""Draws timelines and plans."""
