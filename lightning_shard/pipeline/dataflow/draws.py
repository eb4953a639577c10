"""Notes whether code draws random numbers from torch's generators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NotesDraws(TorchDispatchMode):
    """While it is active, notes whether any operation draws random numbers.

    torch marks these operations. Attention is marked also where its dropout is 0. Generators of numpy and Python aren't
    seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in function.tags and _dropout(function, args, kwargs) != 0:
            self.has_drawn = True
        return function(*args, **kwargs)


def _dropout(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> float | None:
    """The operation's argument ``dropout_p``; ``None`` if it has none."""
    for place, argument in enumerate(function._schema.arguments):
        if argument.name == "dropout_p":
            value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
            return float(value)
    return None
