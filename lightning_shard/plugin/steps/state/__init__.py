"""State that a step changes other than gradients: snapshots, restoring, and sending changes to other stages."""
