"""Chunks as columns are the chunks that one gets one by one, and text that is laid out otherwise is refused."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.checkpoint.ahead import in_order
from lightning_shard.checkpoint.format.columns import parse_columns
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest
from lightning_shard.checkpoint.format.text import _ALL_CHUNKS, chunk_text, chunk_texts, place_text
from lightning_shard.errors import CorruptCheckpointError

ROWS, COLUMNS, WIDTH, HEADER, BLOCK = 64, 3, 4, 4096, 64
CHUNK_BYTES = COLUMNS * WIDTH
FILES = 5


def texts(**changed: int) -> list[bytes]:
    """A chunk for each row of a tensor."""
    found = []
    for row in range(ROWS):
        file, begin = row % FILES, HEADER + row // FILES * CHUNK_BYTES
        end, digits = begin + CHUNK_BYTES, 32
        if row == ROWS // 2:
            file, begin, end = changed.get("file", file), changed.get("begin", begin), changed.get("end", end)
            digits = changed.get("digits", digits)
        found.append(chunk_text(file, begin, end, place_text((row, 0), (1, COLUMNS)), f"{row:032x}"[:digits]).encode())
    return found


def manifest(chunks: list[bytes]) -> Manifest:
    size = HEADER + -(-ROWS // FILES) * CHUNK_BYTES
    files = [FileEntry(f"model/{number}.safetensors", size, HEADER, "0" * 32) for number in range(FILES)]
    line = b'{"dtype":"F32","shape":[%d,%d],"chunks":[%b]}' % (ROWS, COLUMNS, b",".join(chunks))
    made = Manifest("0123456789ab", files, writer="a test", block_bytes=BLOCK)
    head, _, rest = made.to_bytes().partition(b'"model":{}')
    body = head + b'"model":{\n"w":%b\n}' % line + rest[: rest.rindex(b",\n")] + b"\n}\n"
    return Manifest.from_bytes(body)


def test_columns_are_the_chunks() -> None:
    entry = manifest(texts()).model["w"]
    columns = entry.columns()
    assert [columns.chunk(number) for number in range(len(columns))] == [*entry.chunks]
    assert len(columns) == ROWS
    assert columns.tiling.in_row_major_order == [*range(ROWS)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"file": FILES}, f"refers to file {FILES} of {FILES}"),
        ({"begin": HEADER - 1}, "has a chunk at bytes 4095"),
        ({"end": 2**40}, "has a chunk at bytes"),
        ({"begin": 2**40, "end": 2**40 + CHUNK_BYTES}, "has a chunk at bytes"),
        ({"digits": 0}, "has 0 digits of digests for 1 blocks"),
        ({"digits": 31}, "has 31 digits of digests for 1 blocks"),
        ({"end": 10**30}, "has a chunk at bytes"),
    ],
)
def test_numbers_that_dont_fit_are_refused_as_one_by_one(changed: dict[str, int], message: str) -> None:
    entry = manifest(texts(**changed)).model["w"]
    with pytest.raises(CorruptCheckpointError, match=message):
        entry.columns()


@pytest.mark.parametrize("wrong", ["a row is lacking", "a row is there twice"])
def test_chunks_that_dont_make_up_the_tensor_are_refused(wrong: str) -> None:
    rows = texts()
    rows = rows[:-1] if wrong == "a row is lacking" else [*rows, rows[0]]
    with pytest.raises(CorruptCheckpointError, match="don't make it up"):
        manifest(rows).model["w"].columns()


numbers = st.one_of(st.integers(0, 20), st.integers(0, 10**18 - 1))
lists = st.lists(numbers, max_size=3)
chunks = st.builds(
    lambda file, begin, end, offsets, sizes, digest, blocks: chunk_text(
        file, begin, end, place_text(offsets, sizes), digest * blocks
    ).encode(),
    *(numbers, numbers, numbers, lists, lists, st.text("0123456789abcdef", min_size=32, max_size=32)),
    st.integers(1, 3),
)


@given(st.lists(chunks, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_text_is_taken_apart_as_by_the_expression(made: list[bytes]) -> None:
    text = b",".join(made)
    parsed = parse_columns(text)
    assert parsed is not None
    files, begins, ends, places, digests = zip(*chunk_texts(text), strict=True)
    assert parsed.files.tolist() == [*map(int, files)]
    assert parsed.spans.tolist() == [[int(begin), int(end)] for begin, end in zip(begins, ends, strict=True)]
    assert (parsed.places, parsed.digests) == (places, b"".join(digests))
    assert parsed.digits.tolist() == [*map(len, digests)]


@given(st.lists(chunks, min_size=1, max_size=3), st.data())
@settings(max_examples=400, deadline=None)
def test_nothing_is_taken_that_the_expression_refuses(made: list[bytes], data: st.DataObject) -> None:
    text = b",".join(made)
    marks = [match.start() for match in re.finditer(rb'["\[\]{},:]', text)]
    at = data.draw(st.one_of(st.integers(0, len(text)), st.sampled_from(marks)))
    put = data.draw(
        st.sampled_from([b"", b'"', b",", b":", b"[", b"]", b"{", b"}", b"0", b"-", b" ", b'""', b'",:1,"'])
    )
    changed = text[:at] + put + text[at + data.draw(st.integers(0, 2)) :]
    if parse_columns(changed) is not None:
        assert _ALL_CHUNKS.fullmatch(changed)


def test_results_come_in_order_and_few_items_are_taken_ahead() -> None:
    from concurrent.futures import ThreadPoolExecutor

    taken = []

    def items():  # type: ignore[no-untyped-def]
        for item in range(20):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(3) as pool:
        found = []
        for item, result in in_order(pool, lambda item: item * item, items(), 4):
            found.append((item, result))
            assert len(taken) <= len(found) + 3
    assert found == [(item, item * item) for item in range(20)]
