"""All code that depends on Lightning: the strategy, and how it handles modules, steps, loaders and checkpoints."""
