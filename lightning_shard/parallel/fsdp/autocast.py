"""Find the weights that autocast is certain to cast, so that they can be all-gathered in its 16-bit dtype.

To all-gather a weight in 32 bits is always correct, since autocast casts it where it is used. To all-gather it in 16
bits is correct only if nothing else uses it. This is decided before anything runs, from the classes of the modules that
hold weights and from the names in the code that a block runs.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from lightning_shard.namespaces import package_of
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.running_order import code_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SWITCHES = {"autocast", "maybe_autocast", "decorate_autocast", "decorate_fwd"}
"""Names in code that sets autocast itself: ``maybe_autocast`` is transformers', ``decorate_*`` are torch.amp's."""
_STARTS = ("forward", "training_step", "validation_step", "test_step", "predict_step")

_FEW = 16
"""A module with at most ``1 / _FEW`` of a block's elements may be all-gathered in 32 bits, in the root's unit.

It stays unsharded for the whole step then.
"""


def cast_units(root: nn.Module, units: Iterable[nn.Module], besides: Collection[nn.Parameter] = ()) -> set[nn.Module]:
    """The units in which, for each parameter, it is known whether autocast casts it.

    It isn't known if:

    - a module holds parameters beside other modules, such as the decay of a state-space model or a table of positions:
      they belong to no layer, and may need all 32 bits;
    - parameters aren't float32, or are tied;
    - layers aren't torch's own, linear or convolutions, or transformers' ``Conv1D``, or other code names their weights;
    - code sets autocast itself, in the unit or around it.

    Args:
        root: The model.
        units: Modules that are to be FSDP2's units.
        besides: Parameters that belong to no unit.
    """
    outside: set[nn.Module] = set()
    for module in root.modules():
        kind: Any = type(module)
        _, names = _names_in_code(kind)
        outside.update(*(child.modules() for name, child in module.named_children() if name in names))
    return {unit for unit in units if unit not in outside and _is_known_of_all(unit, besides)}


def _is_known_of_all(unit: nn.Module, besides: Collection[nn.Parameter]) -> bool:
    held = [p for p in unit.parameters() if p not in besides]
    if any(p.dtype != torch.float32 for p in held) or tied_parameters(unit):
        return False
    alone = _left_alone(unit)
    return all(module in alone or _is_known(module) for module in unit.modules())


def not_cast(unit: nn.Module) -> set[nn.Parameter]:
    """The parameters of a unit that autocast doesn't cast, or may not: those of embeddings, and of modules of vectors.

    They include small matrices of which it isn't known, such as a router's. So the rest of the unit can still be
    all-gathered in 16 bits.
    """
    return {parameter for module in _left_alone(unit) for parameter in module.parameters(recurse=False)}


def _left_alone(unit: nn.Module) -> set[nn.Module]:
    """The modules in a unit whose own parameters aren't all-gathered in 16 bits with it."""
    few = sum(p.numel() for p in unit.parameters()) / _FEW
    found: set[nn.Module] = set()
    for module in unit.modules():
        own = list(module.parameters(recurse=False))
        if module is unit or _holds_holders(module):
            continue
        is_small = sum(p.numel() for p in own) <= few and not _is_known(module)
        if is_small or isinstance(module, nn.Embedding) or all(p.ndim < 2 for p in own):
            found.add(module)
    return found


def _holds_holders(module: nn.Module) -> bool:
    return any(True for child in module.children() for _ in child.parameters())


def _is_known(module: nn.Module) -> bool:
    """Whether a module uses weights, its own and its inner modules', in nothing but products that autocast casts."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    inside = {
        part for name, _ in module.named_parameters() for part in (name.partition(".")[0], name.rpartition(".")[2])
    }
    kind: Any = type(module)
    names, names_beside_autocast = _names_in_code(kind)
    if names_beside_autocast & inside:
        return False
    if _holds_holders(module):
        weights = {name.rpartition(".")[2] for name, _ in module.named_parameters()} - set(module._buffers)
        return isinstance(module, nn.MultiheadAttention) or not (own or names & weights)
    if not own:
        return True
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and package_of(kind.forward) == "torch":
        return own <= {"weight", "bias"}  # with other names, a hook computes the weight from them
    return bool(kind.__name__ == "Conv1D" and package_of(kind) == "transformers")


@lru_cache(maxsize=1024)
def _names_in_code(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """All names that a class's forward and steps use, and those used where the code has set autocast itself.

    Follows calls of the class's methods and of functions, but not into torch.
    """
    seen = _functions_of(cls)
    beside: set[str] = set()
    for function in seen:
        names = _where_autocast_is_set(function)
        beside.update(names)
        for found in _called(names, function, cls):
            beside.update(*map(_names, _functions(found, cls, set())))
    return frozenset(name for function in seen for name in _names(function)), frozenset(beside)


def _where_autocast_is_set(function: FunctionType) -> set[str]:
    """Names used under a ``with`` that sets autocast; all names of the function if it sets autocast in another way."""
    if not _SWITCHES & _names(function):
        return set()
    nodes = [node for statement in code_of(function) for node in ast.walk(statement)]
    setting = [node for node in nodes if isinstance(node, ast.With) and _SWITCHES & _of_nodes(node.items)]
    if function.__code__.co_name in _SWITCHES or not setting:
        return {*_names(function), *_names(inspect.unwrap(function))}
    return {name for node in setting for name in _of_nodes(node.body)}


def _of_nodes(nodes: Iterable[ast.AST]) -> set[str]:
    inner = [node for outer in nodes for node in ast.walk(outer)]
    return {node.attr for node in inner if isinstance(node, ast.Attribute)} | {
        node.id for node in inner if isinstance(node, ast.Name)
    }


def _functions_of(cls: Any) -> set[FunctionType]:
    """Those that a class's forward and steps call, directly or not."""
    return {each for start in _STARTS for each in _functions(getattr(cls, start, None), cls, set())}


def _functions(function: Any, cls: type, seen: set[FunctionType]) -> Iterator[FunctionType]:
    """A function and all functions that it calls, directly or not; without torch's."""
    function = getattr(function, "__func__", function)  # of a staticmethod
    if not isinstance(function, FunctionType) or function in seen or package_of(function) == "torch":
        return
    seen.add(function)
    yield function
    for found in _called(_names(function), function, cls):
        yield from _functions(found, cls, seen)
    yield from _functions(getattr(function, "__wrapped__", None), cls, seen)


def _called(names: Iterable[str], function: FunctionType, cls: type) -> Iterator[Any]:
    """The methods and globals that names in a function's code refer to, as far as that is known."""
    inherits = "super" in names or "super" in _names(inspect.unwrap(function))
    for name in names:
        of_bases = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        yield from (of_bases if inherits else of_bases[:1]) or [function.__globals__.get(name)]


@lru_cache(maxsize=4096)
def _names(function: FunctionType) -> frozenset[str]:
    return frozenset(_of_code(function.__code__))


def _of_code(code: CodeType) -> Iterator[str]:
    """Names in a function's code, and the function's own name, by which torch's decorators are recognised."""
    yield from (code.co_name, *code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
