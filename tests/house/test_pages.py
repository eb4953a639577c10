"""The site: all pages are in its navigation, links lead to something, guides are short, and what pages name exists."""

from __future__ import annotations

import ast
import inspect
import re
from datetime import timedelta
from pathlib import Path

import pytest

from benchmarks.lib import numbers
from lightning_shard import HybridShardStrategy, ShardedCheckpointIO
from tests.paths import ROOT

TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
SHORT = [page for page in PAGES if page.parent.name in ("start", "guides", "moving")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)]*)?\)")
FENCE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
WORDS = 25_000
"""Of all pages but the list of architectures, code included: what has a letter or a digit."""


def anchors(page: Path) -> set[str]:
    """As mkdocs makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {f"#{re.sub(r'[^a-z0-9_ -]', '', heading.lower()).strip().replace(' ', '-')}" for heading in headings}


@pytest.mark.parametrize("page", [*TOP, *PAGES], ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_something(page: Path) -> None:
    for target, anchor in LINK.findall(FENCE.sub("", page.read_text())):
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked), f"{target}{anchor}"


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    made = {"index.md", "contributing.md", "changes.md"}
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.parent.name != "decisions"}
    assert sorted(listed) == sorted(there | made)


def test_guides_and_the_readme_are_short_and_all_pages_together_too() -> None:
    assert len(SHORT) >= 18
    assert [page.name for page in SHORT if len(page.read_text().splitlines()) > 80] == []
    assert len(TOP[0].read_text().splitlines()) <= 120
    written = [page for page in (*TOP, *PAGES) if page.name != "models.md"]
    words = [word for page in written for word in page.read_text().split() if re.search(r"\w", word)]
    assert len(words) <= WORDS


ARGUMENTS = (ROOT / "docs" / "strategy.md").read_text().partition("\n## ")[0]


@pytest.mark.parametrize(("made", "table"), [(HybridShardStrategy, 0), (ShardedCheckpointIO, 1)])
def test_the_page_has_each_argument_and_its_default(made: type, table: int) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", ARGUMENTS.split("`ShardedCheckpointIO`:")[table], re.MULTILINE)
    parameters = dict(inspect.signature(made).parameters)
    assert [name for name, _ in rows] == list(parameters)
    for name, shown in rows:
        default = parameters[name].default
        assert shown == ("30 minutes" if default == timedelta(minutes=30) else f"`{default!r}`"), name


ARCHITECTURE = ROOT / "docs" / "architecture.md"
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("*.md"))
NAMED = re.compile(r"`([\w/]+\.py)(?:: ([\w.]+))?`")


def defined_in(file: Path) -> set[str]:
    """Functions, classes and assigned names of a module, and of its classes as ``Class.name``."""

    def names(body: list[ast.stmt], prefix: str) -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                found |= names(node.body, f"{prefix}{node.name}.")
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            found |= {prefix + target.id for target in targets if isinstance(target, ast.Name)}
        return found

    return names(ast.parse(file.read_text()).body, "")


def test_each_file_and_function_that_the_architecture_page_names_exists() -> None:
    named = set(NAMED.findall(ARCHITECTURE.read_text()))
    assert len(named) > 50
    missing = []
    for path, name in sorted(named):
        file = next((base / path for base in (ROOT / "lightning_shard", ROOT) if (base / path).is_file()), None)
        if file is None or (name and name not in defined_in(file)):
            missing.append(f"{path}: {name}")
    assert not missing


def test_the_architecture_page_and_each_decision_are_short_enough_to_read() -> None:
    assert len(ARCHITECTURE.read_text().splitlines()) <= 250
    assert DECISIONS
    lines = {page.name: len(page.read_text().splitlines()) for page in DECISIONS}
    assert max(lines.values()) <= 40, lines


@pytest.mark.parametrize(
    ("page", "table"), [(numbers.README, numbers.headlines), (numbers.PAGE, numbers.table)], ids=["README", "numbers"]
)
def test_the_pages_say_what_was_measured(page: numbers.Path, table: object) -> None:
    assert callable(table)
    assert numbers.renewed(page, table()) == page.read_text(), "write it: python -m benchmarks.lib.numbers"


def test_the_first_screen_has_the_number_of_two_pipeline_stages() -> None:
    [speed] = [
        one.speed
        for machine, group in numbers.comparisons().items()
        for one in group
        if machine.startswith("CPU") and (one.what, one.against) == ("a training step, pp2", "plain torch, by hand")
    ]
    assert f"two pipeline stages runs at **{speed:.2f}×**" in numbers.README.read_text()
