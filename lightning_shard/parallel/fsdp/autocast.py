"""Which weights of a block autocast casts, so that they can be gathered in its type.

To gather a weight in 32 bits is always right, since autocast casts it where it is used; in 16 bits it is only where
nothing else is done with it. That is told from the modules that hold weights and from the code that runs in a block,
before anything has run.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Iterator
from dis import get_instructions
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from lightning_shard.parallel.blocks import code_of, tied_parameters

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_MATRIX_PRODUCT = "@"
_SWITCHES = {"autocast", "maybe_autocast", "decorate_autocast", "decorate_fwd"}
"""Names in code that sets autocast itself; the second is transformers', the others those of torch.amp's decorators."""
_PRODUCTS = {
    *("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "bilinear", _MATRIX_PRODUCT),
    *(f"conv{transposed}{dims}d" for transposed in ("", "_transpose") for dims in (1, 2, 3)),
}
"""What autocast computes in its type, by names in code."""
_STARTS = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_HARMLESS = {
    *("forward", "torch", "nn", "functional", "F", "super", "Tensor", "None", "len", "int", "dtype", "device", "to"),
    *("size", "shape", "view", "reshape", "flatten", "transpose", "permute", "T", "mT", "t", "contiguous", "unsqueeze"),
}
"""What code does around such a product, and not to weights' values."""

_FEW = 16
"""Up to one of so many of a block's elements may be gathered beside the blocks, and stay gathered for the step."""


def cast_units(root: nn.Module, units: Iterable[nn.Module], besides: Collection[nn.Parameter] = ()) -> set[nn.Module]:
    """Those of which it is known of each parameter if autocast casts it or leaves it alone.

    It isn't where a module holds parameters beside other modules, such as the decay of a state-space model or a table
    of positions; these are nobody's weights, and may need all their bits. Neither is it where parameters aren't in
    32 bits, or are tied, where code computes with weights otherwise than by products, or where it sets autocast itself,
    in a unit or around it.
    """
    outside: set[nn.Module] = set()
    for module in root.modules():
        _, names = _names_in_code(_class_of(module))
        outside.update(*(child.modules() for name, child in module.named_children() if name in names))
    return {unit for unit in units if unit not in outside and _is_known_of_all(unit, besides)}


def _is_known_of_all(unit: nn.Module, besides: Collection[nn.Parameter]) -> bool:
    held = [p for p in unit.parameters() if p not in besides]
    if any(p.dtype != torch.float32 for p in held) or tied_parameters(unit):
        return False
    alone = _left_alone(unit)
    return all(module in alone or _is_known(module) for module in unit.modules())


def not_cast(unit: nn.Module) -> set[nn.Parameter]:
    """The parameters of a unit that autocast leaves alone, or may: of holders of vectors, of embeddings.

    So are small matrices of which it isn't known, such as a router's: a unit isn't gathered in 32 bits for these.
    """
    return {parameter for module in _left_alone(unit) for parameter in module.parameters(recurse=False)}


def _left_alone(unit: nn.Module) -> set[nn.Module]:
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
    """Whether all that it does with weights, its own and those of modules inside, is to have autocast multiply."""
    own = {name for name, _ in module.named_parameters(recurse=False)}
    inside = {
        part for name, _ in module.named_parameters() for part in (name.partition(".")[0], name.rpartition(".")[2])
    }
    names, names_beside_autocast = _names_in_code(_class_of(module))
    if names_beside_autocast & inside:
        return False
    if _holds_holders(module):
        weights = {name.rpartition(".")[2] for name, _ in module.named_parameters()} - set(module._buffers)
        return isinstance(module, nn.MultiheadAttention) or not (own or names & weights)
    if not own:
        return True
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)) and type(module).forward.__module__.startswith("torch."):
        return own <= {"weight", "bias"}  # else a hook makes them, of what is held
    return bool(names & _PRODUCTS) and names <= _PRODUCTS | _HARMLESS | set(dir(module))


def _class_of(module: nn.Module) -> Any:
    return type(module)


@lru_cache(maxsize=1024)
def _names_in_code(cls: Any) -> tuple[frozenset[str], frozenset[str]]:
    """All names that a module's forward or its steps use; and those that they use where they have set autocast.

    With its class's methods and the functions that it calls, but for torch's own.
    """
    seen: set[FunctionType] = set()
    for method in _STARTS:
        seen.update(_functions(getattr(cls, method, None), cls, set()))
    beside: set[str] = set()
    for function in seen:
        names = _where_autocast_is_set(function)
        beside.update(names)
        for found in _called(names, function, cls):
            beside.update(*map(_names, _functions(found, cls, set())))
    return frozenset(name for function in seen for name in _names(function)), frozenset(beside)


def _where_autocast_is_set(function: FunctionType) -> set[str]:
    """Names in the blocks of its ``with`` statements; where it is set otherwise, all names of the function."""
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


def _functions(function: Any, cls: type, seen: set[FunctionType]) -> Iterator[FunctionType]:
    """A function and all that it calls."""
    function = getattr(function, "__func__", function)  # of a static method
    if not isinstance(function, FunctionType) or function in seen or function.__module__.startswith("torch."):
        return
    seen.add(function)
    yield function
    for found in _called(_names(function), function, cls):
        yield from _functions(found, cls, seen)
    yield from _functions(getattr(function, "__wrapped__", None), cls, seen)


def _called(names: Iterable[str], function: FunctionType, cls: type) -> Iterator[Any]:
    """What names in a function's code stand for, as far as it is known."""
    inherits = "super" in names or "super" in _names(inspect.unwrap(function))
    for name in names:
        of_bases = [vars(base)[name] for base in cls.__mro__ if name in vars(base)]
        found: Any = function.__globals__.get(name)
        is_operation = isinstance(found, type) and issubclass(found, torch.autograd.Function)
        yield from (of_bases if inherits else of_bases[:1]) or [found.forward if is_operation else found]


@lru_cache(maxsize=4096)
def _names(function: FunctionType) -> frozenset[str]:
    return frozenset(_of_code(function.__code__))


def _of_code(code: CodeType) -> Iterator[str]:
    """Names in a function's code, its own name, by which torch's decorators are known, and ``"@"``."""
    yield from (code.co_name, *code.co_names)
    if any(step.opname == "BINARY_OP" and step.argrepr.startswith(_MATRIX_PRODUCT) for step in get_instructions(code)):
        yield _MATRIX_PRODUCT
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _of_code(constant)
