"""A server of each module's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import Server, serve


@pytest.fixture(scope="module")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve("s3", tmp_path_factory.mktemp("s3") / "data") as server:
        yield server
