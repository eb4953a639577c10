"""Expert parallelism: experts as stacked matrices or as a list of modules, and the exchange of tokens."""
