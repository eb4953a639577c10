"""Makes the random numbers that torch draws for a sample independent of how many samples are computed at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_IN_PLACE = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
}
_OF_SIZE = {"rand", "randn", "randint", "normal"}
_LIKE = {"rand_like", "randn_like", "randint_like"}
_BY_ITSELF = {"randperm"}
"""Drawn as without the mode: an order of the samples compares them."""


class DrawsByRow(TorchDispatchMode):
    """While it is active, each operation draws one row, along the last dimension, and repeats it over all others.

    A vector, or what may have its samples last, gets one number. So a microbatch, and two of them joined, draw the same
    for each sample from the same state of the generators, wherever a tensor has its samples. Dropout, noise and drawn
    time steps still vary over features and from operation to operation.

    Args:
        samples: The number in a microbatch.

    Attributes:
        is_blind: Whether an operation drew in another way: of tensors of probabilities, of a kernel's own generator, or
            of tensor subclasses. Draws of numpy and Python aren't seen.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()
        self._sizes = (1, samples, 2 * samples)
        self.is_blind = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in function.tags or _dropout(function, args, kwargs) == 0:
            return function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            result = None if types else self._by_row(name, function, args, dict(kwargs))
            if result is not None:
                return result
            self.is_blind = self.is_blind or name not in _BY_ITSELF
            return function(*args, **kwargs)

    def _by_row(self, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The operation's result with one row drawn; ``None`` for operations that aren't known here."""
        of = args[0] if args else None
        rest = args[1:]
        if name in _OF_SIZE and (place := _place_of_size(function)) is not None and place < len(args):
            size = torch.Size(args[place])
            row = function(*args[:place], self._row(size), *args[place + 1 :], **kwargs)
            return row.expand(size).clone()
        if not isinstance(of, Tensor) or any(isinstance(each, Tensor) for each in rest):
            return None
        row = of.new_empty(self._row(of.shape))
        if name in _IN_PLACE:
            return of.copy_(function(row, *rest, **kwargs))
        if name in _LIKE:
            kwargs.pop("memory_format", None)
            drawn = function(row, *rest, **kwargs)
            return torch.empty_like(of, dtype=drawn.dtype, device=drawn.device).copy_(drawn)
        if name == "native_dropout" and rest[1] is not False:
            kept = row.bernoulli_(1 - rest[0])
            return of * (kept / (1 - rest[0]) if rest[0] < 1 else kept), kept.bool().expand(of.shape)
        if name == "bernoulli" and not rest:
            return (row.uniform_(generator=kwargs.get("generator")) < of).to(of.dtype)
        return None

    def _row(self, shape: Sequence[int]) -> list[int]:
        return [shape[-1]] if len(shape) > 1 and shape[-1] not in self._sizes else [1] * min(1, len(shape))


def _place_of_size(function: Any) -> int | None:
    return next((n for n, argument in enumerate(function._schema.arguments) if argument.name == "size"), None)


def _dropout(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The operation's argument ``dropout_p``, or ``dropout``; ``None`` if it has none."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return float(value)
    return None
