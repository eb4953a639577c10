"""Detects, in the first steps, what would be silently wrong on a layout, and refuses it or warns of it."""
