"""Replaces parameters, and their ids, in what a module or a callback has kept of them before the module was laid out.

Such as ``self.head = {id(p) for p in …}`` in ``__init__``, asked in ``configure_optimizers``; a dict by parameter; or a
list whose gradients a hook scales. Laying a module out puts other parameters in place of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_shard.pipeline.dataflow.taint import Hollow

_DEEPEST = 4
"""Containers within containers."""
_LARGEST = 2**17
"""A container of more entries isn't one of parameters."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_HOLDERS = (list, tuple, dict, set, frozenset)


def names_by_id(module: nn.Module) -> dict[int, str]:
    """Of a module that isn't laid out yet."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def replace_kept(module: nn.Module, names: Mapping[int, str], others: Iterable[object] = ()) -> None:
    """Replace them in attributes of all modules of one that was laid out, and of other objects.

    Entries of containers are replaced in place, but for tuples and frozen sets.

    Args:
        names: Those of the parameters before, by id. Nothing else can have had that id.
    """
    now = _named(module)
    found = {key: now[name] for key, name in names.items() if name in now and key != id(now[name])}
    for holder in (*module.modules(), *others) if found else ():
        attributes: dict[str, Any] = getattr(holder, "__dict__", {})
        for name, value in attributes.items():
            if name not in _OF_MODULES and isinstance(value, _HOLDERS):
                attributes[name] = _replaced(value, found, _DEEPEST)


def _named(module: nn.Module) -> dict[str, Tensor]:
    """Parameters by all of their names, other stages' too."""
    named: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for path, part in module.named_modules():
        inner = {f"{path}.{name}" if path else name: each for name, each in vars(part).items()}
        named |= {name: each for name, each in inner.items() if isinstance(each, Hollow)}
    return named


def _replaced(value: Any, found: Mapping[int, Tensor], depth: int) -> Any:
    """The value with other entries; the same object if it can be changed, or nothing in it is replaced."""
    if type(value) is int:
        return id(found[value]) if value in found else value
    if isinstance(value, nn.Parameter):
        return found.get(id(value), value)
    if not depth or not isinstance(value, _HOLDERS) or len(value) > _LARGEST:
        return value
    entries = [*value.items()] if isinstance(value, dict) else [*value]
    replaced = [_replaced(entry, found, depth - 1 + isinstance(value, dict)) for entry in entries]
    if all(one is other for one, other in zip(entries, replaced)):
        return value
    if isinstance(value, list):
        value[:] = replaced
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(replaced)
    else:
        return tuple.__new__(type(value), replaced) if isinstance(value, tuple) else type(value)(replaced)
    return value
