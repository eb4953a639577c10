"""Where things lie in this repository."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "checkpoint" / "golden" / "v2"
"""Checkpoints that an earlier version wrote."""
SCHEDULE_IN_A_V = ROOT / "tests" / "training" / "pipeline" / "v.csv"
SCHEDULE_AHEAD = ROOT / "tests" / "training" / "pipeline" / "ahead.csv"
"""Schedules as users write them: an order of actions for each rank."""
