"""Each habit of Lightning's users, on two pipeline stages and on two data ranks: as on one process, or refused.

docs/lightning.md lists them. All habits of a layout run in one pair of processes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from lightning_shard.testing import run_ranks
from tests.paths import ROOT
from tests.training.habits import callbacks, flags, hooks, loaders
from tests.training.habits.harness import LAYOUTS, Habit, Outcome, outcomes, problem

KINDS = [callbacks.habit, flags.habit, flags.logging_habit, loaders.habit, hooks.habit]
HABITS = {habit.name: habit for kind in KINDS for habit in kind}
DOCUMENT = ROOT / "docs" / "lightning.md"

Seen = Callable[[str | None, Habit], list[Outcome]]


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Each rank's outcome of a habit; all that pytest has chosen are run when the first is asked for."""
    asked = {item.callspec.params["habit"]: None for item in request.session.items if _is_one(item)}
    chosen = [HABITS[name] for name in asked]
    known: dict[str | None, list[list[Outcome]]] = {}

    def look(layout: str | None, habit: Habit) -> list[Outcome]:
        if layout not in known:
            ranks = 2 if layout else 1
            functions = [habit.function for habit in chosen]
            folder = tmp_path_factory.mktemp("habits")
            known[layout] = run_ranks(
                outcomes, ranks, functions, layout, folder, elastic=layout is not None, init=False, timeout_s=240
            )
        return [of_rank[chosen.index(habit)] for of_rank in known[layout]]

    return look


def _is_one(item: pytest.Item) -> bool:
    return getattr(item, "originalname", "") == "test_a_habit"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "habit",
    [pytest.param(name, marks=[pytest.mark.long] if habit.long else []) for name, habit in HABITS.items()],
)
def test_a_habit(habit: str, layout: str, seen: Seen) -> None:
    found = problem(HABITS[habit], layout, seen(None, HABITS[habit])[0], seen(layout, HABITS[habit]))
    assert not found, found


def test_the_document_lists_them_as_they_are() -> None:
    text = DOCUMENT.read_text()
    for kind in KINDS:
        section = text.partition(f"\n## {kind.title}\n")[2].partition("\n## ")[0]
        rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.M)]
        found = {row[0].replace("`", ""): tuple(row[1:3]) for row in rows[2:]}
        expected = {
            habit.name: tuple("refused" if layout in habit.refused else "✓" for layout in LAYOUTS) for habit in kind
        }
        assert found == expected, kind.title
