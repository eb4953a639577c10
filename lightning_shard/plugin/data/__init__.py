"""The user's loaders: dealt to data ranks, and resumed in mid-epoch."""
