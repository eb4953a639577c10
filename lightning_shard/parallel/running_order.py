"""In which order a network's modules run: a guess from the source of their classes, where they can't be run.

A wrong guess costs communication or is refused, but can't give wrong numbers: a value that a stage doesn't hold is
unknown there (``pipeline/dataflow/taint.py``), and a part may not change buffers there.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from functools import cache, lru_cache
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_shard.parallel.containers import has_forward

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def is_list(module: nn.Module) -> bool:
    return isinstance(module, LISTS) or loops_over_children(module)


def children_of(root: nn.Module, path: str) -> list[str]:
    """Names of a list's modules, each by its first name in ``root``; for any other module, its own name."""
    module = root.get_submodule(path)
    if not is_list(module):
        return [path]
    named = first_names(root)
    return [named[id(child)] for child in held_by(module)]


def first_names(root: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in root.named_modules()}


def held_by(listed: nn.Module) -> Iterator[nn.Module]:
    """A list's modules, repeated ones as often as they are in it. A place may hold ``None``, and is left out."""
    return (module for module in listed._modules.values() if module is not None)


def run_in_turn(root: nn.Module, one: str, other: str) -> bool:
    """Whether one loop runs two lists of one length: ``for a, f in zip(self.attentions, self.feedforwards)``."""
    parent, _, name = one.rpartition(".")
    other_parent, _, other_name = other.rpartition(".")
    if parent != other_parent or len(children_of(root, one)) != len(children_of(root, other)):
        return False
    inside = loops(type(root.get_submodule(parent)))
    return any(name in used and other_name in used for used in inside)


def trains(module: nn.Module) -> bool:
    """Whether a module has trained parameters; used since a frozen teacher may have more blocks than the network."""
    return any(parameter.requires_grad for parameter in module.parameters())


_SELF = ("self",)
_SUPER = "super()."
_LIBRARIES = ("torch.", "lightning.")
_CHILDREN = {"children", "named_children", "_modules"}
_QUESTIONS = {"callable", "hasattr", "id", "isinstance", "len", "setattr", "type"}
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
    for name in _names_used(code_of(vars(owner)[method])):
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


def loops(cls: type) -> list[set[str]]:
    """For each ``for`` loop in a class's methods and inherited forwards, the names of the attributes that it uses."""
    inherited = (vars(base).get("forward") for base in cls.__mro__[1:])
    methods = [value for value in (*vars(cls).values(), *inherited) if inspect.isfunction(value)]
    nodes = (node for method in methods for statement in code_of(method) for node in ast.walk(statement))
    return [{*_names_used([node])} for node in nodes if isinstance(node, ast.For)]


def loops_first(cls: type, used: Sequence[str], carriers: Collection[str], names: Set[str]) -> list[str]:
    """``used`` with modules that the loop over the blocks calls, or takes a parameter of, moved before the blocks.

    They run between all blocks, so the earliest stage that needs one holds it.

    Args:
        used: Names of attributes, in order.
        carriers: Those that contain blocks.
        names: Of all modules and parameters below; what else a loop names (``self.norm.parameters()``) isn't used so.
    """
    order = list(used)
    for loop in loops(cls):
        within = {name.partition(".")[0] for name in loop & names}
        places = [order.index(name) for name in carriers if name in within and name in order]
        for name in (
            [name for name in order[min(places) :] if name in within and name not in carriers] if places else ()
        ):
            order.remove(name)
            order.insert(min(places), name)
    return order


def loops_over_children(module: nn.Module) -> bool:
    """Whether a module runs what it holds as a list does: ``for block in self.children(): x = block(x)``."""
    kind: Any = type(module)
    return bool(_loops_over_children(kind))


@cache
def _loops_over_children(cls: type) -> bool:
    nodes = (node for statement in code_of(cls.__dict__.get("forward")) for node in ast.walk(statement))
    iterated = (each for node in nodes if isinstance(node, ast.For) for each in _names_used([node.iter]))
    return any(name.partition(".")[0] in _CHILDREN for name in iterated)


@lru_cache(maxsize=4096)
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
        if _only_asks(node):
            continue
        if isinstance(node, ast.Call):
            # what is handed on runs after what the other arguments call: ``run(self.blocks, self.embed(x))``
            yield from _names_used([*sorted([*node.args, *node.keywords], key=_calls_nothing), node.func])
            if isinstance(node.func, ast.Name) and node.func.id in _SELF:
                yield "forward"
        elif isinstance(node, ast.Attribute):
            yield from _dotted(node)
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)) and node.value is not None:
            yield from _names_used([node.value])
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            loops = [each for each in node.generators if _runs_elements(each.target, [*node.generators, node.elt])]
            yield from _names_used([*loops, node.elt])
        elif isinstance(node, ast.For):
            is_run = _runs_elements(node.target, node.body)
            yield from _names_used([*([node.iter] if is_run else ()), *node.body, *node.orelse])
        else:
            yield from _names_used(ast.iter_child_nodes(node))


def _calls_nothing(node: ast.AST) -> bool:
    return not any(isinstance(each, ast.Call) for each in ast.walk(node))


def _runs_elements(target: ast.AST, body: Sequence[ast.AST]) -> bool:
    """Whether a loop may run what it loops over, and doesn't only reset it, as by ``block.loss = None``."""
    names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}

    def taken(node: ast.AST) -> Sequence[ast.AST]:
        """The parts of code that compute with what they name."""
        if isinstance(node, ast.Call) and not _only_asks(node):
            given = [*node.args, *node.keywords]
            is_reset = isinstance(node.func, ast.Attribute) and not given
            return given if is_reset else [*given, node.func]
        if isinstance(node, (ast.For, ast.comprehension)):
            return [node.iter]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Name, ast.Tuple)):
            return [node.value] if isinstance(node.value, ast.Name) else []  # ``embed, blocks = level``
        return [node.left, node.right] if isinstance(node, ast.BinOp) else []

    parts = [part for each in body for node in ast.walk(each) for part in taken(node)]
    return any(isinstance(node, ast.Name) and node.id in names for part in parts for node in ast.walk(part))


def _only_asks(node: ast.AST) -> bool:
    """Whether code doesn't run what it names: ``isinstance(self.layers, Decoder)``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _QUESTIONS


def lay_out(root: nn.Module, groups: dict[str, list[str]], network: str) -> tuple[list[str], list[tuple[str, int]]]:
    """All blocks in running order, and the parts around them with the indices of the blocks that they run before."""
    names: list[str] = []
    parts: list[tuple[str, int]] = []

    def add(name: str) -> None:
        module = root.get_submodule(name) if name not in own else None
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            parts.append((name, len(names)))
            return
        beside = next((path for path in groups if run_in_turn(root, path, name)), None)
        for child, block in zip(children_of(root, name), groups.get(beside or "", [""] * len(module))):
            if beside is None:
                add(child)
            else:
                turns.append((child, block))

    own = {name for name, _ in root.named_parameters()}
    turns: list[tuple[str, str]] = []
    named = first_names(root)
    blocks = {id(root.get_submodule(name)) for group in groups.values() for name in group}

    def holds_listed(module: nn.Module) -> bool:
        """Whether it holds blocks that are listed elsewhere: a level of a U, which holds the next level too."""
        return id(module) not in blocks and any(id(each) in blocks for each in module.modules())

    def visit(path: str, *, listed_elsewhere: bool = False) -> None:
        if path in groups:
            names.extend(groups[path])
            return
        level = root.get_submodule(path)
        prefix = f"{path}." if path else ""
        children = [name for name, _ in level.named_children()]
        bare = [name for name, _ in level.named_parameters(recurse=False)]
        own_lists = [n for n in children if any(g == prefix + n or g.startswith(f"{prefix}{n}.") for g in groups)]
        carriers = [n for n in children if n in own_lists or holds_listed(level.get_submodule(n))]

        def runs(name: str, rest: str) -> bool:
            """Whether code that uses ``name.rest`` may run it, or blocks in it: not so for ``self.model.embed(x)``."""
            if name in children and rest in dict(level.get_submodule(name).named_buffers()):
                return False  # all stages have buffers
            full = f"{prefix}{name}.{rest}"
            return name not in own_lists or not rest or any(g.startswith(full) or full.startswith(g) for g in groups)

        for name in _running_order(level, children, bare, carriers, runs):
            if name in carriers:
                visit(prefix + name, listed_elsewhere=listed_elsewhere or name not in own_lists)
            elif name in bare:
                add(prefix + name)
            elif id(child := level.get_submodule(name)) in blocks:
                continue
            elif _is_part(child, outside=not path, beside=bool(network)):
                add(named[id(child)] if listed_elsewhere else prefix + name)

    visit("")
    return names, [*parts, *((part, names.index(block)) for part, block in turns)]


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
    level: nn.Module,
    children: list[str],
    bare: list[str],
    carriers: list[str],
    runs: Callable[[str, str], bool],
) -> list[str]:
    """A module's children and bare parameters, in the order in which its code first uses them.

    Of those that the code doesn't name, bare parameters come first, and a child keeps its registration order relative
    to the children with blocks.

    Args:
        carriers: The children that contain blocks.
        runs: Whether a use of attribute ``rest`` of a child counts as running it.
    """
    held = {*children, *bare}
    used: list[str] = []
    for method in ("training_step", "forward"):
        names = (name.partition(".") for name in attributes_used(type(level), method, depth=4))
        used = list(dict.fromkeys(name for name, _, rest in names if name in held and runs(name, rest)))
        if any(name in carriers for name in used):
            break
    else:
        used = []
    below = {*dict(level.named_modules(remove_duplicate=False)), *dict(level.named_parameters(remove_duplicate=False))}
    order = loops_first(type(level), used, carriers, below)
    for name in [child for child in carriers if child not in order]:
        order.append(name)
    place = {name: index for index, name in enumerate(children)}
    for name in reversed([child for child in children if child not in order]):
        earlier = [order.index(carrier) for carrier in carriers if place[carrier] < place[name]]
        order.insert(max(earlier) + 1 if earlier else 0, name)
    return [*(name for name in bare if name not in order), *order]
