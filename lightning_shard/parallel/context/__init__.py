"""Context parallelism: blocks run on each rank's part of a sequence, and attention on the whole sequence."""
