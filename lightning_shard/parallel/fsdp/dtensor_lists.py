"""Changes of lists in place (``torch._foreach_lerp_``) that hold sharded parameters and plain buffers.

So averages of a whole ``state_dict()`` are updated, as by timm's ``ModelEmaV3``. Torch's DTensors (2.11 to 2.14) refuse
such lists. Here the DTensors are changed together, and then the plain tensors, if the other lists have the same kinds
at the same places. ``torch._foreach_copy_``, which they don't have, is ``copy_`` of each.

Private: the handlers of ``DTensor._op_dispatcher``, which are looked up in each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_NAMES = ["lerp", "add", "sub", "mul", "div", "addcmul", "addcdiv", "zero"]
_MIXED = "mixed torch.Tensor and DTensor"


def handlers(known: dict[Any, Any]) -> dict[Any, Callable[..., Any]]:
    """Handlers for ``DTensor._op_dispatcher``.

    Args:
        known: The dispatcher's, where these will be.
    """

    def handle(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = known.pop(operation, None)  # torch handles the calls below
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            if _MIXED not in str(error) or not _agree(args):
                raise
            for sharded in (True, False):
                places = [place for place, each in enumerate(args[0]) if isinstance(each, DTensor) is sharded]
                operation(*(_at(places, each) for each in args), **kwargs)
            return None
        finally:
            known[operation] = own or handle

    packets = [getattr(torch.ops.aten, f"_foreach_{name}_") for name in _NAMES]
    found = {getattr(packet, overload): handle for packet in packets for overload in packet.overloads()}
    return {**found, torch.ops.aten._foreach_copy_.default: _copy}


def _copy(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for target, value in zip(args[0], args[1], strict=True):
        target.copy_(value, *args[2:], **kwargs)


def _agree(args: Sequence[Any]) -> bool:
    """Whether all lists of tensors have DTensors at the same places."""
    lists = [each for each in args if isinstance(each, (list, tuple)) and any(isinstance(t, Tensor) for t in each)]
    return len({tuple(isinstance(tensor, DTensor) for tensor in tensors) for tensors in lists}) == 1


def _at(places: Sequence[int], argument: Any) -> Any:
    return [argument[place] for place in places] if isinstance(argument, (list, tuple)) else argument
