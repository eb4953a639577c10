"""Runs a step over microbatches: executes the schedule, communicates with neighbouring stages, and merges results."""
