"""Lightning's state to and from checkpoints."""
