"""The fastest layout of all that there are."""
