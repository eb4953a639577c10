"""What tests of models and of programs on several processes need: processes that are ranks, and a comparison.

- :func:`run_ranks`, :func:`ranks`: a function, or a test's body, on several processes of this machine (``processes``).
"""

from lightning_shard.testing.processes import RanksFailed, preload, ranks, run_ranks

__all__ = ["RanksFailed", "preload", "ranks", "run_ranks"]
