"""Expert parallelism for experts in stacked matrices or in a list of modules, and the all-to-alls of their tokens."""
