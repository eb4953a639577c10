"""``RecordTimeline`` on two stages: what it writes is what the schedule says."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_shard import RecordTimeline
from lightning_shard.pipeline.schedules.named import build
from lightning_shard.pipeline.schedules.recorded import Recording
from lightning_shard.testing import run_ranks
from tests.parity import Seen, layout, train


def train_recorded(sizes: dict[str, int], folder: str) -> Seen:
    return train("gpt", sizes, steps=4, callbacks=[RecordTimeline(folder, after=1, steps=2)])


@pytest.mark.long
def test_two_steps_of_a_run_are_recorded_in_the_schedules_order(tmp_path: Path) -> None:
    run_ranks(train_recorded, 2, layout(pipeline=2), str(tmp_path), elastic=True)
    recording = Recording.read(tmp_path / "timeline.json")
    assert [(r.step, r.data_rank, r.tensor_rank) for r in recording.steps] == [(1, 0, 0), (2, 0, 0)]
    for recorded in recording.steps:
        assert recorded.timeline.schedule == build("1F1B", 2, 4)
        assert 0 < recorded.timeline.bubble < 1
        assert recorded.skew_s >= 0
    assert (tmp_path / "trace.json").is_file()
    assert "1F1B, batch" in (tmp_path / "timeline.html").read_text()


def test_one_stage_has_nothing_to_record_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="there is one pipeline stage"):
        train_recorded(layout(), str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
