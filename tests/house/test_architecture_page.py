"""docs/architecture.md names files and functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.paths import ROOT

PAGE = ROOT / "docs" / "architecture.md"
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
    named = set(NAMED.findall(PAGE.read_text()))
    assert len(named) > 50
    missing = []
    for path, name in sorted(named):
        file = next((base / path for base in (ROOT / "lightning_shard", ROOT) if (base / path).is_file()), None)
        if file is None or (name and name not in defined_in(file)):
            missing.append(f"{path}: {name}")
    assert not missing


def test_the_architecture_page_and_each_decision_are_short_enough_to_read() -> None:
    assert len(PAGE.read_text().splitlines()) <= 250
    assert DECISIONS
    lines = {page.name: len(page.read_text().splitlines()) for page in DECISIONS}
    assert max(lines.values()) <= 40, lines
