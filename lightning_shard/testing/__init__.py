"""What tests of models and of programs on several processes need: processes that are ranks, and a comparison.

- :func:`assert_trains_alike`: a LightningModule on layouts against one plain process (``alike``).
- :func:`run_ranks`, :func:`ranks`: a function, or a test's body, on several processes of this machine (``processes``).
"""

from lightning_shard.testing.alike import TrainsDifferently, assert_trains_alike
from lightning_shard.testing.processes import RanksFailed, preload, ranks, run_ranks

__all__ = ["RanksFailed", "TrainsDifferently", "assert_trains_alike", "preload", "ranks", "run_ranks"]
