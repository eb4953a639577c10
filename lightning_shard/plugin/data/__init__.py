"""Distributes the user's loaders over data ranks, and resumes them in mid-epoch."""
