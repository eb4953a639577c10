"""Reads from the source of a class in which order its code uses attributes, and which of them in loops.

That is how the order of a network's parts is guessed where it can't be run (``blocks.py``).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from functools import cache
from typing import Any

from torch import nn

_SELF = ("self",)
_SUPER = "super()."
_STEPS = ("training_step", "validation_step", "test_step", "predict_step", "forward")
_LIBRARIES = ("torch.", "lightning.")
_CHILDREN = {"children", "named_children", "_modules"}
_QUESTIONS = {"callable", "hasattr", "id", "isinstance", "len", "type"}
"""Builtins that don't run their arguments."""


def attributes_used(cls: type, method: str, depth: int, after: type | None = None) -> Iterator[str]:
    """Names of attributes in the order in which a method's code uses them, with a user's methods inlined.

    A call comes after its arguments: ``self.head(self.blocks(x))`` uses the blocks first.

    Args:
        depth: How many levels of calls are inlined.
        after: For ``super()``: look the method up in the classes after this one in the method resolution order.
    """
    bases = cls.__mro__[cls.__mro__.index(after) + 1 if after else 0 :]
    owner = next((base for base in bases if method in vars(base)), None)
    if owner is None:
        return
    for name in _names_on_paths(code_of(vars(owner)[method])):
        inherited = name.removeprefix(_SUPER)
        if depth and inherited != name:
            yield from attributes_used(cls, inherited, depth - 1, owner)
        elif depth and name != method and _is_own_method(inspect.getattr_static(cls, name, None)):
            yield from attributes_used(cls, name, depth - 1)
        else:
            yield name


def _is_own_method(value: Any) -> bool:
    return inspect.isfunction(value) and not value.__module__.startswith(_LIBRARIES)


def _dotted(node: ast.Attribute) -> Iterator[str]:
    """A chain of attributes as one name: ``"model.embed"`` for ``self.model.embed``."""
    names = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        names.append(inner.attr)
        inner = inner.value
    is_of_element = isinstance(inner, ast.Subscript) and names[-1] != "forward"  # self.layers[0].weight runs no layer
    yield from _names_used([inner.slice if is_of_element and isinstance(inner, ast.Subscript) else inner])
    is_inherited = isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "super"
    yield _SUPER * is_inherited + ".".join(reversed(names))


def methods_run(root: nn.Module) -> Set[str]:
    """The names of methods that may run in a step: those that code names which itself may run in one.

    A network has methods of other uses, too, such as one that collects features of each layer.
    """
    return _methods_run(frozenset(type(module) for module in root.modules()))


@cache
def _methods_run(classes: Set[type]) -> Set[str]:
    bodies: dict[str, list[ast.AST]] = {}
    for base in {base for cls in classes for base in cls.__mro__ if not base.__module__.startswith(_LIBRARIES)}:
        for name, value in vars(base).items():
            if inspect.isfunction(value):
                bodies.setdefault(name, []).extend(code_of(value))
    run: set[str] = set()
    found = set(_STEPS)
    while found:
        run |= found
        found = {named for name in found for node in bodies.get(name, ()) for named in _named_in(node)} - run
    return run


def _named_in(code: ast.AST) -> Iterator[str]:
    for node in ast.walk(code):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # getattr(self, "encode")
            yield node.value


def loops(cls: type, run: Set[str]) -> list[set[str]]:
    """For each ``for`` loop in a class's methods and inherited forwards, the names of the attributes that it uses.

    It also uses what the variables that it loops over were made of: ``pairs = zip(self.layers, self.norms)``.

    Args:
        run: The names of methods that may run; all, if none of the class's own does.
    """
    own = {name: value for name, value in vars(cls).items() if inspect.isfunction(value)}
    methods = [value for name, value in own.items() if name in run] or [*own.values()]
    inherited = (vars(base).get("forward") for base in cls.__mro__[1:])
    bodies = map(code_of, [*methods, *(value for value in inherited if inspect.isfunction(value))])
    return [used for body in bodies for used in _loops_in(body)]


def loops_first(cls: type, used: Sequence[str], carriers: Collection[str], names: Set[str], run: Set[str]) -> list[str]:
    """``used`` with modules that the loop over the blocks calls, or takes a parameter of, moved before the blocks.

    They run between all blocks, so the earliest stage that needs one holds it.

    Args:
        used: Names of attributes, in order.
        carriers: Those that contain blocks.
        names: Of all modules and parameters below; what else a loop names (``self.norm.parameters()``) isn't used so.
        run: The names of methods that may run (:func:`methods_run`).
    """
    order = list(used)
    for loop in loops(cls, run):
        within = {name.partition(".")[0] for name in loop & names}
        places = [order.index(name) for name in carriers if name in within and name in order]
        for name in (
            [name for name in order[min(places) :] if name in within and name not in carriers] if places else ()
        ):
            order.remove(name)
            order.insert(min(places), name)
    return order


def _loops_in(body: Sequence[ast.stmt]) -> Iterator[set[str]]:
    nodes = [node for statement in body for node in ast.walk(statement)]
    made_of: dict[str, set[str]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            names, variables = _held_by(node.value)
            names = names.union(*(made_of.get(name, ()) for name in variables))
            for target in node.targets:
                if isinstance(target, ast.Name):
                    made_of.setdefault(target.id, set()).update(names)
    for node in nodes:
        if isinstance(node, ast.For):
            _, variables = _held_by(node.iter)
            yield {*_names_used([node])}.union(*(made_of.get(name, ()) for name in variables))


def _held_by(value: ast.AST) -> tuple[set[str], set[str]]:
    """The attributes and the variables that an expression holds; not those that it calls."""
    called = {id(node) for call in ast.walk(value) if isinstance(call, ast.Call) for node in ast.walk(call.func)}
    held = [node for node in ast.walk(value) if id(node) not in called]
    attributes = {name for node in held if isinstance(node, ast.Attribute) for name in _dotted(node)}
    return attributes, {node.id for node in held if isinstance(node, ast.Name)}


def loops_over_children(module: nn.Module) -> bool:
    """Whether a module runs what it holds as a list does: ``for block in self.children(): x = block(x)``."""
    kind: Any = type(module)
    return bool(_loops_over_children(kind))


@cache
def _loops_over_children(cls: type) -> bool:
    nodes = (node for statement in code_of(cls.__dict__.get("forward")) for node in ast.walk(statement))
    iterated = (each for node in nodes if isinstance(node, ast.For) for each in _names_used([node.iter]))
    return any(name.partition(".")[0] in _CHILDREN for name in iterated)


def code_of(function: Any) -> list[ast.stmt]:
    """The statements of a function's body; empty if its source isn't available."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    return definition.body if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) else []


def _names_on_paths(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Names of attributes in an order that fits each way through a function.

    What a branch uses that returns doesn't run before what follows. With ``if c is None: return self.blocks(x)`` and
    ``return self.blocks(x, self.condition(c))`` the condition comes first.
    """
    for place, statement in enumerate(statements):
        rest = statements[place + 1 :]
        if isinstance(statement, ast.If) and _returns(statement.body):
            yield from _names_used([statement.test])
            yield from _merged([*_names_on_paths(statement.body)], [*_names_on_paths([*statement.orelse, *rest])])
            return
        if isinstance(statement, ast.With):
            yield from _names_used(statement.items)
            yield from _names_on_paths([*statement.body, *rest])
            return
        yield from _names_used([statement])


def _returns(body: Sequence[ast.stmt]) -> bool:
    last = body[-1]
    return isinstance(last, (ast.Return, ast.Raise)) or (isinstance(last, ast.With) and _returns(last.body))


def _merged(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """``one``, and each further name of ``other`` before what comes next there and is in ``one``; else at the end."""
    merged, waiting = list(dict.fromkeys(one)), list[str]()
    for name in dict.fromkeys(other):
        if name not in merged:
            waiting.append(name)
        elif waiting:
            place = merged.index(name)
            merged[place:place] = waiting
            waiting = []
    return [*merged, *waiting]


def _names_used(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Names of attributes in order of evaluation; ``"forward"`` for a call of ``self`` itself."""
    for node in nodes:
        if _only_asks(node):
            continue
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


def _only_asks(node: ast.AST) -> bool:
    """Whether code doesn't run what it names: ``isinstance(self.layers, Decoder)``, ``self.layers is not None``."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _QUESTIONS
    return isinstance(node, ast.Compare) and all(isinstance(each, (ast.Is, ast.IsNot)) for each in node.ops)
