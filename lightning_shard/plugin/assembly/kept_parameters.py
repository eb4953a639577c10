"""Replaces parameters, and their ids, in what code has kept of them before the module was laid out.

Such as ``self.head = {id(p) for p in …}`` in ``__init__``, asked in ``configure_optimizers``; a dict by parameter; or a
list whose gradients a callback scales. Laying a module out puts other parameters in place of these. Looked through is
the state of modules and callbacks, as ``state/walk.py`` walks it: containers, the user's objects,
closures, and globals that the code uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn

from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.state.walk import CONTAINERS, below, entries, hold_same, put_entries, reachable

_LARGEST = 2**17
"""A container of more entries isn't one of parameters."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


def names_by_id(module: nn.Module) -> dict[int, str]:
    """Of a module that isn't laid out yet."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def replace_kept(module: nn.Module, names: Mapping[int, str], others: Iterable[object] = ()) -> None:
    """Replace them wherever a module that was laid out, and other objects, have kept them; containers in place.

    Args:
        names: Those of the parameters before, by id. Nothing else can have had that id.
    """
    now = _named(module)
    found = {key: now[name] for key, name in names.items() if name in now and key != id(now[name])}
    if not found:
        return
    walks = (reachable(module), *(below("", other) for other in others))
    for holder in {id(each): each for _, each in chain(*walks)}.values():
        _replace_in(holder, found)


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by all of their names, other stages' too."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules():
        inner = {f"{path}.{name}" if path else name: each for name, each in vars(part).items()}
        named |= {name: each for name, each in inner.items() if isinstance(each, Hollow)}
    return named


def _replace_in(holder: Any, found: Mapping[int, Tensor]) -> None:
    if isinstance(holder, Tensor) or (isinstance(holder, CONTAINERS) and len(holder) > _LARGEST):
        return
    is_module, is_dict, held = isinstance(holder, nn.Module), isinstance(holder, dict), entries(holder)
    replaced = {_replaced(key, found) if is_dict else key: _replaced(value, found) for key, value in held.items()}
    if is_module:  # where a hollow one would be taken for the module's own parameter
        replaced = {k: held[k] if k in _OF_MODULES or isinstance(v, Hollow) else v for k, v in replaced.items()}
    if not hold_same(held, replaced):
        put_entries(holder, replaced)


def _replaced(value: Any, found: Mapping[int, Tensor]) -> Any:
    """The value, or what takes its place; a tuple or frozen set with other entries."""
    if type(value) is int:
        return id(found[value]) if value in found else value
    if isinstance(value, nn.Parameter):
        return found.get(id(value), value)
    if not isinstance(value, (tuple, frozenset)) or len(value) > _LARGEST:
        return value
    entries = [*value]
    replaced = [_replaced(entry, found) for entry in entries]
    if all(one is other for one, other in zip(entries, replaced)):
        return value
    return tuple.__new__(type(value), replaced) if isinstance(value, tuple) else type(value)(replaced)
