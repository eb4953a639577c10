"""Values that aren't known on this stage: parameters that another stage holds, and whatever is computed from them.

On a stage, the user's code runs around blocks that are elsewhere, and most of what it computes there is thrown away. So
such a value may be computed, in any dtype and through any operation: it is :class:`Unknown`, and says from what. It is
refused where it would count: as an input of a block that is here, in a loss, a log or a result, and where Python
asks for it as a number.

A tensor is told apart by its class, at no cost to known ones: no value is looked at, and no device waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree

_AS_NUMBERS = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
}
"""What gives Python a tensor's values."""
_WITHOUT_VALUES = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full", "new_tensor"),
}
_LIKE_OTHERS = {"expand_as", "view_as", "reshape_as", "type_as", "to", "resize_as_"}
"""Of the first argument the former take shape, dtype and device only; the latter of all but the first."""


class Unknown(torch.Tensor):
    """A tensor whose values aren't known here; ``source`` says why."""

    source: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        taken = args[1:] if name in _WITHOUT_VALUES else args[:1] if name in _LIKE_OTHERS else (args, kwargs)
        unknown = _first_unknown(taken)
        reads = name == "__get__"  # an attribute, such as .shape or .dtype, or .T
        if unknown is not None and not reads:
            for tensor in _parameters_in(taken):
                tensor.refuse_if_wrong()
            if name in _AS_NUMBERS:
                raise StepError(f"The step asks for {unknown.source} as a number ({name}). {REMEDY}")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if unknown is None:
            return result
        known = {id(leaf) for leaf in _leaves((args, kwargs))}  # what is handed back as it came stays so
        for written in [*args[: _writes(name)], *_leaves(kwargs.get("out", ()))]:
            if isinstance(written, Tensor):
                _mark_written(written, unknown.source)
        for leaf in _leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                mark(leaf, unknown.source)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Unknown:
        return self


class Hollow(Unknown):
    """A parameter that another stage holds: its shape and dtype over one NaN; using it on the wrong side raises."""

    _refuse: Callable[[], str | None]

    @staticmethod
    def of(parameter: Tensor, device: torch.device, name: str, stage: int, refuse: Callable[[], str | None]) -> Hollow:
        nan = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
        hollow = torch.Tensor._make_subclass(Hollow, nan)
        hollow.source = f"what is computed from {name}, which stage {stage} holds,"
        hollow._refuse = refuse
        return hollow

    def refuse_if_wrong(self) -> None:
        problem = self._refuse()
        if problem:
            raise StepError(problem)


REMEDY = (
    "With several pipeline stages only what the blocks hand on reaches the next stage: return it from the blocks as"
    " part of the hidden state, or use pipeline_parallel_size=1."
)


def mark(tensor: Tensor, source: str) -> Tensor:
    """Have a new tensor be unknown from now on; it is returned.

    Raises:
        StepError: It is of another class, such as a DTensor, and what is computed from it couldn't be followed.
    """
    if isinstance(tensor, Unknown):
        return tensor
    if type(tensor) is not Tensor:
        raise StepError(f"A {type(tensor).__name__} is made of {source} on a stage that doesn't know it. {REMEDY}")
    tensor.__class__ = Unknown  # as torch's own lazy parameters change theirs
    tensor.source = source  # type: ignore[attr-defined]
    return tensor


def _mark_written(tensor: Tensor, source: str) -> None:
    """A tensor that was changed in place, and what it is a part of."""
    mark(tensor, source)
    with torch._C.DisableTorchFunctionSubclass():
        base = tensor._base
    if base is not None:
        mark(base, source)


def refuse(value: Any, where: str) -> None:
    """Raise StepError where a value, of any nesting, holds an unknown one.

    Args:
        where: What takes it, as the beginning of the sentence.
    """
    for path, leaf in tree.walk(value):
        if isinstance(leaf, Unknown):
            place = f" ({'.'.join(path)})" if path else ""
            raise StepError(f"{where} takes {leaf.source}{place} which isn't known there. {REMEDY}")


def _first_unknown(value: Any) -> Unknown | None:
    return next((leaf for leaf in _leaves(value) if isinstance(leaf, Unknown)), None)


def _parameters_in(value: Any) -> list[Hollow]:
    return [leaf for leaf in _leaves(value) if isinstance(leaf, Hollow)]


def _leaves(value: Any) -> list[Any]:
    """The arguments of a torch function: tensors are at most in lists, tuples and dicts of these."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)) or isinstance(value, torch.Size):
        return [value]
    return [leaf for child in value for leaf in _leaves(child)]


def _writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and not name.endswith("__")
