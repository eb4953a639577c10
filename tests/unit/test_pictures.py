"""Pictures of a step: each action is in them, at its place, and a page needs nothing but itself."""

from __future__ import annotations

import builtins
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_shard.dryrun.pictures.drawing import Picture, save, stacked, to_svg
from lightning_shard.dryrun.pictures.page import page
from lightning_shard.dryrun.pictures.timelines import (
    draw_balance,
    draw_memory,
    draw_timeline,
    gibibytes,
    kept,
    percent,
    seconds,
    ticks,
)
from lightning_shard.errors import ConfigurationError
from lightning_shard.pipeline.schedules.named import SCHEDULES, build
from lightning_shard.pipeline.schedules.simulate import Costs, Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"
some = settings(max_examples=15, deadline=None)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    ranks = draw(st.integers(1, 4))
    schedule = build(draw(st.sampled_from(sorted(SCHEDULES))), ranks, draw(st.integers(2 * ranks, 3 * ranks)))
    costs = [float(draw(st.integers(1, 9))) for _ in range(schedule.stages)]
    return simulate(schedule, Costs.of_forwards(costs, draw(st.sampled_from([0.0, 1.5]))))


def even(name: str = "1F1B", ranks: int = 2, microbatches: int = 4) -> Timeline:
    schedule = build(name, ranks, microbatches)
    return simulate(schedule, Costs.of_forwards([1.0] * schedule.stages))


def tips(svg: str, prefix: str = "") -> list[str]:
    titles = [title.text or "" for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    return [title for title in titles if title.startswith(prefix)]


@some
@given(timeline=timelines())
def test_each_action_is_in_the_picture_once_at_its_time(timeline: Timeline) -> None:
    picture = draw_timeline(timeline, unit=percent)
    root = ElementTree.fromstring(to_svg(picture))
    found = [
        (title.text.partition(":")[0], rect)
        for rect in root.iter(f"{SVG}rect")
        if (title := rect.find(f"{SVG}title")) is not None and title.text
    ]
    assert sorted(name for name, _ in found) == sorted(str(event.action) for event in timeline.events)
    boxes = dict(found)
    places = [(float(boxes[str(e.action)].get("x", "")), e.start) for e in timeline.events]
    by_x, by_time = sorted(places), sorted(places, key=lambda place: place[1])
    assert [start for _, start in by_x] == [start for _, start in by_time]
    rows = {e.rank: boxes[str(e.action)].get("y") for e in timeline.events}
    assert len(set(rows.values())) == len(rows)  # a rank a row
    assert all(boxes[str(e.action)].get("y") == rows[e.rank] for e in timeline.events)
    assert len(picture.facts[1]) == len(timeline.events)


@some
@given(timeline=timelines(), nbytes=st.integers(1, 1000))
def test_what_is_kept_is_the_microbatches_in_flight_and_nothing_is_left(timeline: Timeline, nbytes: int) -> None:
    for rank in range(len(timeline.schedule.rows)):
        curve = kept(timeline, rank, [float(nbytes)] * timeline.schedule.stages)
        assert max(most for _, most in curve) == nbytes * timeline.schedule.in_flight(rank)
        assert curve[-1][1] == 0
        assert [time for time, _ in curve] == sorted({time for time, _ in curve})


@some
@given(timeline=timelines())
def test_sends_arrive_before_what_needs_them_begins(timeline: Timeline) -> None:
    root = ElementTree.fromstring(to_svg(draw_timeline(timeline)))
    lines = [line for line in root.iter(f"{SVG}polyline") if "--send" in line.get("style", "")]
    schedule = timeline.schedule
    crossing = [
        need
        for row in schedule.rows
        for action in row
        for need in action.needs(schedule.stages)
        if schedule.rank_of[need.stage] != schedule.rank_of[action.stage]
    ]
    assert len(lines) == len(crossing) + 1  # and the legend's
    for line in lines:
        (x, _), (to, _) = (map(float, point.split(",")) for point in line.get("points", "").split())
        assert x <= to + 0.01


def test_memory_says_who_has_too_little() -> None:
    timeline = even(microbatches=4)
    picture = draw_memory(timeline, [2.0**30, 2.0**30], base_bytes=[2.0**30, 2.0**31], limit_bytes=3.0 * 2**30)
    svg = to_svg(picture)
    assert "peak 3 GiB<" in svg
    assert svg.count("GiB !<") == 0
    assert "peak 3 GiB !" in to_svg(draw_memory(timeline, [2.0**30] * 2, base_bytes=[2.0**30] * 2, limit_bytes=2**31))
    assert picture.facts[1][1] == ("stage 1", "2 GiB", "1 GiB", "3 GiB")


def test_numbers_that_arent_of_the_stages_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="a number for each of the 2 stages of 1F1B"):
        draw_memory(even(), [1.0])
    with pytest.raises(ConfigurationError, match="must have a number for each stage"):
        draw_balance("Memory", {"parameters": [1.0, 2.0], "gradients": [1.0]})


def test_a_balance_says_each_part_and_each_stage() -> None:
    picture = draw_balance("Memory", {"parameters": [2.0**30, 3.0 * 2**30], "caches": [0.0, 2.0**30]}, limit=2.0**33)
    assert "stage 1, parameters: 3 GiB" in tips(to_svg(picture))
    assert picture.facts == (
        ("row", "parameters", "caches", "in all"),
        [["stage 0", "1 GiB", "0 B", "1 GiB"], ["stage 1", "3 GiB", "1 GiB", "4 GiB"]],
    )


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_needs_no_network_and_has_a_row_for_each_action() -> None:
    timeline = even(ranks=2, microbatches=3)
    html = page(
        "A <b> & c",
        [draw_timeline(timeline), draw_memory(timeline, [1e9, 1e9])],
        text="a < b",
        tables=[("T", (["x"], [["<y>"]]))],
    )
    seen = Page()
    seen.feed(html)
    assert seen.open == []
    assert seen.links == []
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    assert "@import" not in html
    assert "url(" not in html
    assert set(re.findall(r"https?://[^\"' ]*", html)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert seen.tags["tr"] == (1 + 12) + (1 + 2) + (1 + 1)
    assert "A &lt;b&gt; &amp; c" in html
    assert "&lt;y&gt;" in html
    assert "prefers-color-scheme:dark" in html


def test_a_png_is_one(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    timeline = even()
    save(stacked("A step", [draw_timeline(timeline), draw_memory(timeline, [1e9, 2e9])]), tmp_path / "step.png")
    data = (tmp_path / "step.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert width > 1000
    assert height > 300


def test_without_matplotlib_a_png_is_refused_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = builtins.__import__

    def lacking(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(f"No module named {name!r}")
        return known(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ConfigurationError, match=r"pip install 'lightning-shard\[plot\]'"):
        save(draw_timeline(even()), tmp_path / "step.png")
    save(draw_timeline(even()), tmp_path / "step.svg")
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag == f"{SVG}svg"


def test_other_endings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"ends with \.svg or \.png"):
        save(Picture("nothing", 1, 1), tmp_path / "step.pdf")


def test_stages_that_take_no_time_can_be_drawn() -> None:
    timeline = simulate(build("1F1B", 2), Costs.of_forwards([0.0, 0.0]))
    assert ElementTree.fromstring(to_svg(draw_timeline(timeline))) is not None


@given(most=st.floats(1e-9, 1e12), count=st.integers(1, 40))
def test_ticks_are_round_and_about_as_many(most: float, count: int) -> None:
    found = ticks(most, count)
    assert found[0] == 0
    assert found[-1] <= most * (1 + 1e-6)
    assert count / 3 <= len(found) <= count + 2


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0"), (1.5, "1.5 s"), (0.0123, "12.3 ms"), (2.5e-6, "2.5 µs"), (250.0, "250 s")]
)
def test_seconds_as_text(value: float, text: str) -> None:
    assert seconds(value) == text


def test_bytes_are_told_in_three_digits() -> None:
    told = [gibibytes(value) for value in (0, 999, 1020, 999 * 2**10, 1020 * 2**10, 2**30, 1000 * 2**30)]
    assert told == ["0 B", "999 B", "0.996 KiB", "999 KiB", "0.996 MiB", "1 GiB", "0.977 TiB"]
