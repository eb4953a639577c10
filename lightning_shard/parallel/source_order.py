"""Reads from the source of a class in which order its code uses attributes, and which of them in loops.

That is how the order of a network's parts is guessed where it can't be run (``blocks.py``).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

_SELF = ("self",)
_SUPER = "super()."


def attributes_used(cls: type, method: str, depth: int, after: type | None = None) -> Iterator[str]:
    """Names of attributes in the order in which a method's code uses them, with the class's own methods inlined.

    A call comes after its arguments: ``self.head(self.blocks(x))`` uses the blocks first.

    Args:
        depth: How many levels of calls are inlined.
        after: For ``super()``: look the method up in the classes after this one in the method resolution order.
    """
    bases = cls.__mro__[cls.__mro__.index(after) + 1 if after else 0 :]
    owner = next((base for base in bases if method in vars(base)), None)
    if owner is None:
        return
    for name in _names_used(code_of(vars(owner)[method])):
        inherited = name.removeprefix(_SUPER)
        if depth and inherited != name:
            yield from attributes_used(cls, inherited, depth - 1, owner)
        elif depth and name != method and inspect.isfunction(inspect.getattr_static(cls, name, None)):
            yield from attributes_used(cls, name, depth - 1)
        else:
            yield name


def _dotted(node: ast.Attribute) -> Iterator[str]:
    """A chain of attributes as one name: ``"model.embed"`` for ``self.model.embed``."""
    names = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    yield from _names_used([inner])
    is_inherited = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super"
    yield _SUPER * is_inherited + ".".join(reversed(names))


def loops(cls: type) -> list[set[str]]:
    """For each ``for`` loop in a class's methods and inherited forwards, the names of the attributes that it uses."""
    inherited = [vars(base).get("forward") for base in cls.__mro__[1:]]
    methods = (code_of(value) for value in [*vars(cls).values(), *inherited] if inspect.isfunction(value))
    nodes = (node for body in methods for statement in body for node in ast.walk(statement))
    return [set(_names_used([node])) for node in nodes if isinstance(node, ast.For)]


def code_of(function: Any) -> list[ast.stmt]:
    """The statements of a function's body; empty if its source isn't available."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    return definition.body if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) else []


def _names_used(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of attributes in order of evaluation; ``"forward"`` for a call of ``self`` itself."""
    for node in nodes:
        if isinstance(node, ast.Call):
            yield from _names_used([*node.args, *node.keywords, node.func])
            if isinstance(node.func, ast.Name) and node.func.id in _SELF:
                yield "forward"
        elif isinstance(node, ast.Attribute):
            yield from _dotted(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            yield from _names_used([node.value])
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            yield from _names_used([*node.generators, node.elt])
        elif isinstance(node, ast.For):
            yield from _names_used([node.iter, *node.body, *node.orelse])
        else:
            yield from _names_used(ast.iter_child_nodes(node))
