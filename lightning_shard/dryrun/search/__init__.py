"""Searches for the fastest layout of a number of devices."""
