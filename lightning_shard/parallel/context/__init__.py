"""Context parallelism: blocks on parts of sequences, attention over whole ones."""
