"""All that knows Lightning: the strategy, and what it does with the user's module, steps, loaders and checkpoints."""
