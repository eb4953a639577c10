"""Let FSDP2 units change tensors in place that they get as arguments (``x += y``, a ReLU with ``inplace=True``).

With gradients enabled, FSDP2 passes views of such tensors to a unit, made by an autograd function of its own, and
autograd refuses to change these in place. So the first call of a unit gets tensors of the same memory that are no
views. What the unit has changed of them then takes its place in the history of the caller's tensors, which is what a
change in place is without sharding. A unit that changes none gets FSDP2's views from then on.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.parallel.fsdp.units import class_name

_OF_A_VIEW = re.compile("RegisterPostBackwardFunction(Backward)? is a view")
"""What autograd says of FSDP2's views; the longer name on torch 2.11."""


class _Handed(NamedTuple):
    given: Tensor
    """The caller's."""
    alias: Tensor
    """The unit's, of the same memory and version."""
    version: int


class ChangedTensors:
    """The tensors of a unit's calls."""

    def __init__(self) -> None:
        self._is_open = True
        self._given: list[Tensor] = []
        self._handed: list[_Handed] = []

    def begins(self, arguments: Any) -> None:
        """A call begins, with the caller's arguments."""
        self._handed = []
        self._given = tree.tensors(arguments) if self._is_open and torch.is_grad_enabled() else []

    def handed(self, arguments: Any) -> Any:
        """What the unit is given in place of FSDP2's arguments."""
        given, self._given = self._given, []
        views = {id(view): (view, own) for own, view in zip(given, tree.tensors(arguments)) if _is_view_of(view, own)}
        if not views:
            return arguments
        with torch._C.DisableTorchFunction():  # stages count operations, and must not count these
            made = _Alias.apply(*(view for view, _ in views.values()))  # type: ignore[no-untyped-call]
        alias_of: dict[int, Tensor] = {}
        for (_, own), alias in zip(views.values(), made):
            if id(own) not in alias_of:  # given twice, it is one tensor
                alias_of[id(own)] = alias
                self._handed.append(_Handed(own, alias, alias._version))
        return tree.map_leaves(lambda leaf: alias_of[id(views[id(leaf)][1])] if id(leaf) in views else leaf, arguments)

    def ends(self, unit: nn.Module) -> dict[int, Tensor]:
        """The unit has returned: make its changes the caller's.

        Returns:
            The caller's tensors that were changed, by the ids of the unit's.

        Raises:
            StepError: One that was changed shares its memory with another argument.
        """
        handed, self._handed = self._handed, []
        changed = [each for each in handed if each.alias._version != each.version]
        self._is_open = not handed or bool(changed)
        if changed:
            _refuse_overlaps(unit, changed, handed)
        for given, alias, _ in changed:
            # the memory holds the values already: only the history is new, and what is saved for backwards is as it was
            with torch._C.DisableTorchFunction(), torch.autograd._unsafe_preserve_version_counter(given):
                given.copy_(alias)
        return {id(alias): given for given, alias, _ in changed}


def note_late_change(unit: nn.Module, _: Any, output: Any) -> None:
    """Forward hook, also of calls that fail: explain the error, if autograd has refused a change in place."""
    error = sys.exc_info()[1] if output is None else None
    if isinstance(error, RuntimeError) and _OF_A_VIEW.search(str(error)):
        error.add_note(
            f"A {class_name(unit)} changes an argument in place here, and changed none in its first call, which shows"
            " what FSDP2 has to hand it: write x = x + y in place of x += y (inplace=False), or use"
            " data_parallel_size=1."
        )


class _Alias(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


def _is_view_of(view: Tensor, own: Tensor) -> bool:
    """Whether FSDP2 has made ``view`` of the caller's tensor."""
    return view is not own and type(view) is Tensor and view.requires_grad and view.data_ptr() == own.data_ptr()


def _refuse_overlaps(unit: nn.Module, changed: Iterable[_Handed], handed: Iterable[_Handed]) -> None:
    for one in changed:
        for other in handed:
            if other is not one and one.alias.untyped_storage()._cdata == other.alias.untyped_storage()._cdata:
                raise StepError(
                    f"A {class_name(unit)} changes an argument in place that shares its memory with another one, as a"
                    " view does. FSDP2 hands it both as tensors of their own, and the gradient of the other one would"
                    " miss the change: write x = x + y in place of x += y, or copy one of them (clone())."
                )
