"""Finds which values cross a cut: unknown values (taint), the trace that names them, the search for missing ones."""
