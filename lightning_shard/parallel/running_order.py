"""In which order a network's modules run: a guess from the source of their classes, where they can't be run.

A part runs before blocks if the code names it before it names these for the last time. So in doubt it is placed too
early, and its parameters are sent to the stage that runs it. A part that is placed too late is refused there. Neither
can give wrong numbers: a value that a stage doesn't hold is unknown there (``pipeline/dataflow/taint.py``), and a part
may not change buffers there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_shard.parallel.containers import has_forward

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_LIBRARIES = ("torch.", "lightning.")
_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.GeneratorExp)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
_DEPTH = 4
"""How many levels of calls are followed."""


def children_of(root: nn.Module, path: str) -> list[str]:
    """Names of a list's modules, each by its first name in ``root``; for any other module, its own name."""
    module = root.get_submodule(path)
    if not isinstance(module, LISTS):
        return [path]
    named = first_names(root)
    return [named[id(child)] for child in held_by(module)]


def first_names(root: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in root.named_modules()}


def held_by(listed: nn.Module) -> Iterator[nn.Module]:
    """A list's modules, repeated ones as often as they are in it. A place may hold ``None``, and is left out."""
    return (module for module in listed._modules.values() if module is not None)


def trains(module: nn.Module) -> bool:
    """Whether a module has trained parameters; used since a frozen teacher may have more blocks than the network."""
    return any(parameter.requires_grad for parameter in module.parameters())


def lay_out(root: nn.Module, groups: dict[str, list[str]], network: str) -> tuple[list[str], list[tuple[str, int]]]:
    """All blocks in running order, and the parts around them with the indices of the blocks that they run before."""
    names: list[str] = []
    parts: list[tuple[str, int]] = []
    turns: list[tuple[str, str]] = []
    named = first_names(root)
    blocks = {id(root.get_submodule(name)) for group in groups.values() for name in group}

    def add(name: str) -> None:
        if not isinstance(root.get_submodule(name), (nn.ModuleList, nn.ModuleDict)):
            parts.append((name, len(names)))
            return
        beside = next((path for path in groups if run_in_turn(root, path, name)), None)
        if beside is not None:
            turns.extend(zip(children_of(root, name), groups[beside]))
            return
        for child in children_of(root, name):
            add(child)

    def holds_listed(module: nn.Module) -> bool:
        """Whether it holds blocks that are listed elsewhere: a level of a U, which holds the next level too."""
        return id(module) not in blocks and any(id(each) in blocks for each in module.modules())

    def visit(path: str, *, listed_elsewhere: bool = False) -> None:
        if path in groups:
            names.extend(groups[path])
            return
        level = root.get_submodule(path)
        prefix = f"{path}." if path else ""
        children = dict(level.named_children())
        own_lists = [n for n in children if any(f"{g}.".startswith(f"{prefix}{n}.") for g in groups)]
        carriers = [n for n, child in children.items() if n in own_lists or holds_listed(child)]
        bare = [n for n, _ in level.named_parameters(recurse=False)]

        def runs(name: str, rest: str) -> bool:
            """Whether code that names ``name.rest`` may run blocks in it: not so for ``self.model.embed(x)``."""
            full = f"{prefix}{name}.{rest}"
            return name not in own_lists or not rest or any(g.startswith(full) or full.startswith(g) for g in groups)

        for name in _running_order(type(level), bare, [*children], carriers, runs):
            if name in carriers:
                visit(prefix + name, listed_elsewhere=listed_elsewhere or name not in own_lists)
            elif name in bare:
                parts.append((prefix + name, len(names)))
            elif id(children[name]) not in blocks and _is_part(children[name], outside=not path, beside=bool(network)):
                add(named[id(children[name])] if listed_elsewhere else prefix + name)

    visit("")
    return names, [*parts, *((part, names.index(block)) for part, block in turns)]


def run_in_turn(root: nn.Module, one: str, other: str) -> bool:
    """Whether code uses two lists of one length in turn: ``for a, f in zip(self.attentions, self.feedforwards)``."""
    parent, _, name = one.rpartition(".")
    other_parent, _, other_name = other.rpartition(".")
    if parent != other_parent or len(children_of(root, one)) != len(children_of(root, other)):
        return False
    both = (name, other_name)
    used = [each for each in names_used(type(root.get_submodule(parent)), both.__contains__) if each in both]
    return used != sorted(used, key=used.index)


def _is_part(module: nn.Module, *, outside: bool, beside: bool) -> bool:
    """Whether a stage holds a module for all; else it belongs to the code around the blocks, which all stages run.

    Args:
        outside: Whether it is the root's own.
        beside: Whether the network is another module of the root's.
    """
    if _counts_only(module):
        return False
    return not outside or trains(module) or (not beside and any(True for _ in module.parameters()))


def _counts_only(module: nn.Module) -> bool:
    """Whether it is a metric, or a container of metrics only."""
    if isinstance(module, (Metric, MetricCollection)):
        return True
    held = list(module.children())
    return bool(held) and not has_forward(module) and all(map(_counts_only, held))


def _running_order(
    cls: type, bare: list[str], children: list[str], carriers: list[str], runs: Callable[[str, str], bool]
) -> list[str]:
    """A module's bare parameters and children as its code names them, each part before the carriers named after it.

    Of those that the code doesn't name, bare parameters come first, and a child keeps its registration order relative
    to the carriers.

    Args:
        carriers: The children that contain blocks.
        runs: Whether code that names attribute ``rest`` of a carrier may run blocks in it.
    """
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def runs_carrier(full: str) -> bool:
        name, _, rest = full.partition(".")
        return name in carriers and runs(name, rest)

    for place, full in enumerate(names_used(cls, runs_carrier)):
        name = full.partition(".")[0]
        if runs_carrier(full) or (name not in carriers and name in {*bare, *children}):
            first.setdefault(name, place)
            last[name] = place
    order = [name for name in first if name in carriers]
    for name in [name for name in first if name not in carriers]:
        later = (at for at, each in enumerate(order) if each in carriers and last[each] > first[name])
        order.insert(next(later, len(order)), name)
    order += [name for name in carriers if name not in order]
    for name in reversed([child for child in children if child not in order]):
        earlier = [order.index(carrier) for carrier in carriers if children.index(carrier) < children.index(name)]
        order.insert(max(earlier) + 1 if earlier else 0, name)
    return [*(name for name in bare if name not in order), *order]


def names_used(cls: type, wanted: Callable[[str], bool]) -> list[str]:
    """Names of attributes as a class's step uses them, or its forward: the first of these that uses a wanted one.

    What it uses in a loop comes twice.
    """
    for method in ("training_step", "forward"):
        names = [*_names_in(cls, method, _DEPTH)]
        if any(map(wanted, names)):
            return names
    return []


def _names_in(cls: type, method: str, depth: int, after: type | None = None) -> Iterator[str]:
    """Names of attributes in the order in which a method's code uses them, with a user's methods inlined.

    Args:
        depth: How many levels of calls are inlined.
        after: For ``super()``: look the method up in the classes after this one in the method resolution order.
    """
    bases = cls.__mro__[cls.__mro__.index(after) + 1 if after else 0 :]
    owner = next((base for base in bases if method in vars(base)), None)
    for of_super, name in _names_used(code_of(vars(owner)[method])) if owner is not None else ():
        if depth and of_super:
            yield from _names_in(cls, name, depth - 1, owner)
        elif depth and name != method and _is_own_method(inspect.getattr_static(cls, name, None)):
            yield from _names_in(cls, name, depth - 1)
        else:
            yield name


def _is_own_method(value: Any) -> bool:
    return inspect.isfunction(value) and not value.__module__.startswith(_LIBRARIES)


@lru_cache(maxsize=4096)
def code_of(function: Any) -> list[ast.stmt]:
    """The statements of a function's body; empty if its source isn't available."""
    try:
        definition = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    return definition.body if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)) else []


def _names_used(nodes: Iterable[ast.AST]) -> Iterator[tuple[bool, str]]:
    """Whether an attribute is of ``super()``, and its name: ``"model.embed"`` for ``self.model.embed``.

    A call comes after its arguments: ``self.head(self.blocks(x))`` uses the blocks first. What a loop uses comes twice,
    since all of it runs before the last of the blocks.
    """
    for node in nodes:
        names, base = list[str](), node
        while isinstance(base, ast.Attribute):
            names.insert(0, base.attr)
            base = base.value
        if names:  # self.layers[0].weight runs no layer
            inner = [base.slice] if isinstance(base, ast.Subscript) and names[-1] != "forward" else [base]
        elif isinstance(node, ast.Call):
            # what is passed on runs after what other arguments call: ``run(self.blocks, self.embed(x))``
            inner = [*sorted([*node.args, *node.keywords], key=_calls_nothing), node.func]
        elif isinstance(node, _ASSIGNMENTS) and node.value is not None:
            inner = [node.value]
        else:
            inner = [*ast.iter_child_nodes(node)]
        for _ in range(1 + isinstance(node, _LOOPS)):
            yield from _names_used(inner)
        if names:
            yield _is_call_of("super", base), ".".join(names)
        elif _is_call_of("self", node):
            yield False, "forward"


def _calls_nothing(node: ast.AST) -> bool:
    return not any(isinstance(each, ast.Call) for each in ast.walk(node))


def _is_call_of(name: str, node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
