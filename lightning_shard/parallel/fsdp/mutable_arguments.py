"""Let FSDP2 units change lists, dicts and dataclasses that they get as arguments, as modules can without sharding.

With gradients enabled, FSDP2 passes copies of such containers to a unit (torch 2.11 to 2.14). So code around the unit
wouldn't see the unit's changes, and would use the old entries. The entries of a changed copy are put into the original,
and originals take the place of copies in these and in what the unit returns, at any depth. Gradients of entries that
the unit doesn't return enter it elsewhere than at its output (``bypassed_units.py``). Tensors that it changes in place
are in ``changed_tensors.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.changed_tensors import ChangedTensors, note_late_change
from lightning_shard.parallel.fsdp.units import class_name

_LOOKS_INTO_DATACLASSES = torch.__version__ >= "2.12"


def write_back_arguments(units: Iterable[nn.Module]) -> None:
    """Make changes by FSDP2 units of their arguments reach the caller's containers, in place.

    Raises:
        StepError: In a call of a unit, before torch 2.12: it returns or changes a dataclass.
    """
    for unit in units:
        assert isinstance(unit, nn.Module)
        call = _Call()
        unit.register_forward_pre_hook(call.begins, prepend=True, with_kwargs=True)  # before FSDP2 copies
        unit.register_forward_pre_hook(call.copied, with_kwargs=True)
        unit.register_forward_hook(call.ends)
        unit.register_forward_hook(note_late_change, always_call=True)  # also where the unit fails


class _Call:
    """One call of a unit: the caller's containers, FSDP2's copies of them, and the copies' entries before the call."""

    def __init__(self) -> None:
        self._given: list[Any] = []
        self._copies: list[tuple[Any, Any, list[Any]]] = []
        self._tensors = ChangedTensors()

    def begins(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._given = [*tree.containers((args, kwargs))]
        self._tensors.begins((args, kwargs))

    def copied(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._tensors.handed((args, kwargs))
        pairs = zip(self._given, tree.containers((args, kwargs)))
        self._copies = [(given, copy, _entries(copy)) for given, copy in pairs if given is not copy or _isnt_seen(copy)]
        return args, kwargs

    def ends(self, unit: nn.Module, _: Any, output: Any) -> Any:
        copies, self._given, self._copies = self._copies, [], []
        changed = self._tensors.ends(unit)
        _refuse_unseen(unit, [*tree.containers(output), *(c for _, c, old in copies if _differs(old, c))])
        if not copies and not changed:
            return output
        originals = _Originals({id(copy): given for given, copy, _ in copies} | changed)
        for given, copy, before in copies:
            if _differs(before, copy):
                _fill(given, copy)
                originals.put_into(given)
        return originals.of(output)


class _Originals:
    """Puts the caller's containers in the place of their copies.

    Args:
        given_for: The caller's, by the ids of the copies.
    """

    def __init__(self, given_for: Mapping[int, Any]) -> None:
        self._given_for = given_for
        self._done = set(map(id, given_for.values()))  # those that have changed are filled by themselves

    def of(self, value: Any) -> Any:
        """The value; the original of a copy; or a new tuple, if there are copies in it."""
        if id(value) in self._given_for:
            return self._given_for[id(value)]
        if isinstance(value, tuple):
            entries = _entries(value)
            originals = [self.of(each) for each in entries]
            return value if tree.same_entries(entries, originals) else tree.rebuild(value, originals)
        if id(value) not in self._done:
            self._done.add(id(value))
            self.put_into(value)
        return value

    def put_into(self, container: Any) -> None:
        """Replace copies among the entries, and in containers that the unit has made."""
        if isinstance(container, list):
            container[:] = map(self.of, container)
        elif isinstance(container, dict):
            container.update({key: self.of(each) for key, each in container.items()})
        elif dataclasses.is_dataclass(container) and not isinstance(container, type):
            for field in dataclasses.fields(container):
                object.__setattr__(container, field.name, self.of(getattr(container, field.name)))


def _isnt_seen(container: Any) -> bool:
    return dataclasses.is_dataclass(container) and not _LOOKS_INTO_DATACLASSES


def _refuse_unseen(unit: nn.Module, filled: Iterable[Any]) -> None:
    for each in filled:
        if _isnt_seen(each) and any(tensor.requires_grad for tensor in tree.tensors(each)):
            raise StepError(
                f"A {class_name(unit)} returns or changes a {type(each).__name__}, and FSDP2 of"
                f" torch {torch.__version__} looks into no dataclasses, so its backward can't be run: install torch"
                " 2.12 or newer, or have the block return tensors, a tuple or a dict."
            )


def _differs(before: list[Any], container: Any) -> bool:
    return not tree.same_entries(before, _entries(container))


def _entries(container: Any) -> list[Any]:
    return [child for _, child in tree.children(container)]


def _fill(given: Any, copy: Any) -> None:
    """Replace the entries of ``given`` by those of ``copy``, a container of the same type."""
    if isinstance(given, dict):
        given.clear()
        given.update(copy)
    elif isinstance(given, list):
        given[:] = copy
    else:
        for field in dataclasses.fields(given):
            object.__setattr__(given, field.name, getattr(copy, field.name))
