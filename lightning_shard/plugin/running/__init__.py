"""Connects the processes of a run, and makes them fail and end together."""
