"""What crosses a cut: unknown values, the trace that names them, the search that finds what a stage misses."""
