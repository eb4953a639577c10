"""The site: all pages are in its navigation, all links lead to something, guides are short, and nothing is repeated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
