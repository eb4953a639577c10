"""Reduce a model to this rank's part, one folder per parallel axis: FSDP2 (data), tensor, expert, context."""
