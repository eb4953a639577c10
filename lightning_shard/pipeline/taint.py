"""Values that aren't known on this stage: parameters that another stage holds, and whatever is computed from them.

On a stage, the user's code runs around blocks that are elsewhere, and most of what it computes there is thrown away. So
such a value may be computed, in any dtype and through any operation: it is :class:`Unknown`, and says from what. Where
it would count, it is missing: as an input of a block that is here, in a loss, a log or a result, and where Python asks
for it as a number. What is missing is had from the stage before (``crossing.py``), or refused.

A tensor is told apart by its class, at no cost to known ones: no value is looked at, and no device waited for.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError

_AS_NUMBERS = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("storage", "__dlpack__", "__reduce_ex__"),
}
"""What gives Python a tensor's values."""
_AS_TEXT = {"__repr__", "__format__"}
_SHAPED_BY_VALUES = {
    *("nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere"),
    *("histc", "nonzero_static", "_pack_padded_sequence", "_pad_packed_sequence"),
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm"),
}
"""What gives tensors whose sizes depend on values."""
_SIZED_BY_NUMBERS = {
    *("narrow", "view", "reshape", "unflatten", "expand", "repeat", "tile", "split", "tensor_split", "chunk"),
    *("topk", "pad", "unfold", "diagonal", "diag_embed", "one_hot", "interpolate"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
}
"""What gives tensors whose sizes depend on further arguments, which may be tensors of one integer."""
_TO_INTEGERS = {"long", "int", "short", "char", "byte", "to", "type", "type_as", "floor_divide", "round", "bucketize"}
"""What makes integers of floating-point numbers."""
_WITHOUT_VALUES = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full", "new_tensor"),
}
_LIKE_OTHERS = {"expand_as", "view_as", "reshape_as", "type_as", "to", "resize_as_"}
"""Of the first argument the former take shape, dtype and device only; the latter of all but the first."""
_TAKES_SOME = _WITHOUT_VALUES | _LIKE_OTHERS

REMEDY = (
    "With several pipeline stages, a stage has what its blocks hand on and what earlier stages compute: use"
    " pipeline_parallel_size=1, or tell us of this network."
)


@dataclass(frozen=True)
class Origin:
    """Why values are unknown.

    Attributes:
        text: As the object of a sentence: "what is computed from …".
        on_missing: Raises for values that are needed here; is given them, and the sentence that refuses them.
    """

    text: str
    on_missing: Callable[[Sequence[Unknown], str], NoReturn]

    @property
    def at_end(self) -> str:
        """The text where nothing follows."""
        return self.text.rstrip(",")


class _Met(threading.local):
    found: list[Unknown] | None = None


_met = _Met()


class Unknown(torch.Tensor):
    """A tensor whose values aren't known here.

    ``value`` says how it was computed, where that is recorded (``crossing.py``).
    """

    origin: Origin
    value: Any = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = _leaves_of_call(args, kwargs)
        taken = given if name not in _TAKES_SOME else leaves(_taken(name, args, kwargs))
        unknown = next((leaf for leaf in taken if isinstance(leaf, Unknown)), None)
        if unknown is not None and _met.found is not None:
            _met.found += [leaf for leaf in taken if isinstance(leaf, Unknown)]
        if unknown is not None and name in _AS_NUMBERS:
            _miss([unknown], f"The step asks for {unknown.origin.text} as a number ({name}). {REMEDY}")
        if unknown is not None and name in _AS_TEXT:
            return _as_text(unknown)
        is_written = bool(args) and writes(name)
        if is_written and isinstance(args[0], Unknown) and has_no_memory(args[0]):
            return args[0]  # a module that another stage holds is initialised, or changed by the user's code
        if unknown is not None and (_is_shaped_by_values(name, args, kwargs) or _selects(name, args)):
            _miss([unknown], f"The size of what {name} gives depends on {unknown.origin.at_end}. {REMEDY}")
        try:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            if unknown is None:
                raise
            _miss([unknown], f"{name} can't be computed of {unknown.origin.at_end} ({error}). {REMEDY}")
        if unknown is None:
            return result
        if is_written or "out" in kwargs:
            for written in [*args[:is_written], *leaves(kwargs.get("out", ()))]:
                if isinstance(written, Tensor):
                    _mark_written(written, unknown.origin)
        known = [*map(id, given)]  # what is handed back as it came stays so
        for leaf in leaves(result):
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                if name in _TO_INTEGERS and not leaf.dtype.is_floating_point and not has_no_memory(leaf):
                    leaf.zero_()  # NaN as an index would be out of range: on CUDA that ends the process
                mark(leaf, unknown.origin)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Unknown:
        return self


class Hollow(Unknown):
    """A parameter that another stage holds: its shape and dtype over one NaN.

    Its gradient is None; but to code that is ``given_gradients``, where it trains, one that isn't known here.
    """

    fqn: str
    holder: int
    trains: bool
    _gives: Callable[[Mapping[str, Any]], bool] | None = None

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        if not self.trains or Hollow._gives is None or not Hollow._gives(sys._getframe(1).f_globals):
            return None
        nan = _nan_like(self, self.device)
        nan.origin = Origin(f"the gradient of {self.fqn}, which stage {self.holder} holds,", self.origin.on_missing)
        nan.fqn, nan.holder, nan.trains = self.fqn, self.holder, False
        return nan

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        """Whoever holds it has set it there."""

    @grad.deleter
    def grad(self) -> None:
        """As setting it."""

    @staticmethod
    @contextmanager
    def given_gradients(gives: Callable[[Mapping[str, Any]], bool]) -> Iterator[None]:
        """Inside, gradients aren't None to code among whose global names ``gives`` is true."""
        before, Hollow._gives = Hollow._gives, gives
        try:
            yield
        finally:
            Hollow._gives = before

    @staticmethod
    def of(
        parameter: Tensor,
        device: torch.device,
        name: str,
        stage: int,
        on_missing: Callable[[Sequence[Unknown], str], NoReturn],
    ) -> Hollow:
        hollow = _nan_like(parameter, device)
        hollow.origin = Origin(f"what is computed from {name}, which stage {stage} holds,", on_missing)
        hollow.fqn, hollow.holder, hollow.trains = name, stage, parameter.requires_grad
        return hollow

    @torch.no_grad()
    def fill(self, value: float) -> None:
        """Have its one element be this."""
        with torch._C.DisableTorchFunctionSubclass():
            if self.is_floating_point() or self.is_complex():
                self.as_strided((1,), (1,), 0).fill_(value)


def _nan_like(tensor: Tensor, device: torch.device) -> Hollow:
    nan = torch.full((), torch.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)
    return torch.Tensor._make_subclass(Hollow, nan)


def mark(tensor: Tensor, origin: Origin) -> Tensor:
    """Have a new tensor be unknown from now on; it is returned.

    Raises:
        StepError: It is of another class, such as a DTensor, and what is computed from it couldn't be followed.
    """
    if isinstance(tensor, Unknown):
        return tensor
    if type(tensor) is not Tensor:
        raise StepError(f"A {type(tensor).__name__} is made of {origin.text} on a stage that doesn't know it. {REMEDY}")
    tensor.__class__ = Unknown  # as torch's own lazy parameters change theirs
    tensor.origin = origin  # type: ignore[attr-defined]
    return tensor


def fill(tensor: Tensor, values: Tensor) -> None:
    """Have a tensor that was written to, and may be unknown, be known from now on, with these values."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.__class__ = Tensor  # type: ignore[assignment]
        tensor.copy_(values)


def _mark_written(tensor: Tensor, origin: Origin) -> None:
    """A tensor that was changed in place, and what it is a part of."""
    mark(tensor, origin)
    base = base_of(tensor)
    if base is not None:
        mark(base, origin)


def _taken(name: str, args: Any, kwargs: Any) -> Any:
    """The arguments of a torch function whose values matter."""
    if name in _WITHOUT_VALUES:
        return args[1:], kwargs
    return args[:1] if name in _LIKE_OTHERS else (args, kwargs)


def _as_text(unknown: Unknown) -> str:
    """A text in place of a value to show; the value itself is asked for where it can be had."""
    try:
        _miss([unknown], f"The step shows {unknown.origin.text} as a text. {REMEDY}")
    except StepError:
        return f"<{unknown.origin.at_end}: not known on this pipeline stage>"


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """What one of torch's functions gives, also of what isn't known.

    Most take numbers from tensors where numbers are due (``torch.zeros(n)``, ``full(…, x)``, ``clamp(…, 0, x)``), and
    ask no class of tensors about that: then the values are missing.
    """
    name = getattr(func, "__name__", "")
    unknown = first_unknown(_taken(name, args, kwargs))
    if unknown is None:
        return func(*args, **kwargs)
    sentence = f"{name} takes {unknown.origin.text} as a number. {REMEDY}"
    try:
        result = func(*args, **kwargs)
    except StepError:
        raise  # it says so by itself
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        _miss([unknown], f"{sentence[: -len(REMEDY)]}It gives: {error}. {REMEDY}")
    given = {id(leaf) for leaf in leaves((args, kwargs))}
    if any(
        isinstance(leaf, Tensor) and not isinstance(leaf, Unknown) and id(leaf) not in given for leaf in leaves(result)
    ):
        _miss([unknown], sentence)
    return result


def _is_shaped_by_values(name: str, args: Any, kwargs: Any) -> bool:
    if name in _SIZED_BY_NUMBERS:
        return first_unknown((args[1:], kwargs)) is not None
    if "dim" in kwargs and first_unknown(kwargs["dim"]) is not None:
        return True
    if name == "repeat_interleave":  # of a number of times or a tensor of them; that may be all it's given
        return isinstance(kwargs["repeats"] if "repeats" in kwargs else args[:2][-1], Unknown)
    return name in _SHAPED_BY_VALUES


def _selects(name: str, args: Sequence[Any]) -> bool:
    """Whether a function takes those elements where an unknown mask is true."""
    if name == "where" and len(args) == 1:
        return True
    if name not in ("__getitem__", "index"):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(leaf, Unknown) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves(args[1:]))


def has_no_memory(tensor: Tensor) -> bool:
    """Whether it is a hollow parameter or an alias of one."""
    with torch._C.DisableTorchFunctionSubclass():
        return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.size()))


def base_of(tensor: Tensor) -> Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._base


def memory_of(tensor: Tensor) -> int:
    """What tensors that share their memory have in common."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def refuse(value: Any, where: str) -> None:
    """Raise where a value, of any nesting, holds unknown ones.

    Args:
        where: What takes it, as the beginning of the sentence.
    """
    if [leaf for leaf in tree.leaves(value) if isinstance(leaf, Unknown)]:
        unknown = [(path, leaf) for path, leaf in tree.walk(value) if isinstance(leaf, Unknown)]
        path, first = unknown[0]
        place = f" ({'.'.join(path)})" if path else ""
        _miss(
            [leaf for _, leaf in unknown], f"{where} takes {first.origin.text}{place} which isn't known there. {REMEDY}"
        )


def _miss(values: Sequence[Unknown], sentence: str) -> NoReturn:
    values[0].origin.on_missing(values, sentence)


@contextmanager
def met_inside(given: Any) -> Iterator[list[Unknown]]:
    """Yields, filled as it goes, the unknown values of what is given and of what torch's functions get inside."""
    outer, _met.found = _met.found, all_unknown(given)
    try:
        yield _met.found
    finally:
        if outer is not None:
            outer += _met.found
        _met.found = outer


def mark_all(value: Any, origin: Origin) -> None:
    """Have all tensors of a nesting be unknown from now on."""
    for leaf in tree.tensors(value):
        mark(leaf, origin)


def all_unknown(value: Any) -> list[Unknown]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Unknown)]


def first_unknown(value: Any) -> Unknown | None:
    return next((leaf for leaf in leaves(value) if isinstance(leaf, Unknown)), None)


def leaves(value: Any) -> list[Any]:
    """The arguments of a torch function: tensors are at most in lists, tuples and dicts of these."""
    if not isinstance(value, (dict, list, tuple)) or isinstance(value, torch.Size):
        return [value]
    found: list[Any] = []
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, (dict, list, tuple)):
            found += leaves(child)
        else:
            found.append(child)
    return found


def _leaves_of_call(args: Any, kwargs: Any) -> list[Any]:
    return leaves(args) + leaves(kwargs) if kwargs else leaves(args)


def writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and not name.endswith("__")
