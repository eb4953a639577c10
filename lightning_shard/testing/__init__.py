"""Test utilities: run code on several ranks of this machine, and compare a module's training between layouts.

- :func:`assert_trains_alike`: compares a LightningModule on layouts with one plain process (``alike``).
- :func:`run_ranks`, :func:`ranks`: run a function, or a test's body, on several processes (``processes``).
"""

from lightning_shard.testing.alike import TrainsDifferently, assert_trains_alike
from lightning_shard.testing.processes import RanksFailed, preload, ranks, run_ranks

__all__ = ["RanksFailed", "TrainsDifferently", "assert_trains_alike", "preload", "ranks", "run_ranks"]
