"""Classes stay small enough to be read: what constructors take, and how much state a class has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_shard

ROOM = Path(lightning_shard.__file__).parent
SETTINGS = {"HybridShardStrategy"}
"""Takes its public settings."""


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for path in ROOM.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                yield f"{path.relative_to(ROOM)}: {node.name}", node


def attributes(node: ast.ClassDef) -> set[str]:
    declared = {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    return declared | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }


def parameters(node: ast.ClassDef) -> int:
    made = [each.args for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
    return max((len(each.posonlyargs + each.args + each.kwonlyargs) - 1 for each in made), default=0)


def test_constructors_take_at_most_eight_arguments() -> None:
    assert not [name for name, node in classes() if parameters(node) > 8 and node.name not in SETTINGS]


def test_classes_with_more_than_twelve_attributes_say_why() -> None:
    found = [
        name
        for name, node in classes()
        if len(attributes(node)) > 12 and "many attributes" not in (ast.get_docstring(node) or "")
    ]
    assert not found
