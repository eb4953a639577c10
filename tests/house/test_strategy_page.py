"""docs/strategy.md lists all arguments with their defaults."""

from __future__ import annotations

import inspect
import re
from datetime import timedelta

import pytest

from lightning_shard import HybridShardStrategy, ShardedCheckpointIO
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "strategy.md").read_text().partition("\n## ")[0]


@pytest.mark.parametrize(("made", "table"), [(HybridShardStrategy, 0), (ShardedCheckpointIO, 1)])
def test_the_page_has_each_argument_and_its_default(made: type, table: int) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", PAGE.split("`ShardedCheckpointIO`:")[table], re.MULTILINE)
    parameters = dict(inspect.signature(made).parameters)
    assert [name for name, _ in rows] == list(parameters)
    for name, shown in rows:
        default = parameters[name].default
        assert shown == ("30 minutes" if default == timedelta(minutes=30) else f"`{default!r}`"), name
