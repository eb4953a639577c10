"""Has a change of a parameter's ``data`` in a step be seen as one of the parameter.

``p.data.mul_(…)`` doesn't change the version of ``p``, and so autograd takes no notice. Where parameters are gathered
for a step, and the change is lost when they are freed, or where a step runs once for each microbatch, checks of
versions would miss it: a momentum encoder would keep its old values. So of these parameters what ``data`` gives is
kept, beside a copy, until they are checked. What writes nothing new, as a clamp of weights that are within its bounds,
is allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_DATA: Any = torch.Tensor.data
_SHOWN = WeakIdKeyDictionary()
TAKEN = WeakIdKeyDictionary()
"""Of each parameter whose ``data`` was taken since it was checked: a copy of it as it was, and all that was given.
Empty, there is nothing to check."""


def show_writes(parameter: Tensor) -> None:
    """Have changes of this parameter's ``data`` be seen by :func:`was_written`."""
    _SHOWN[parameter] = True


def was_written(parameter: Tensor) -> bool:
    """Whether its ``data`` was taken since the last call, and its values were changed by that; not if they are freed.

    Waits for the device only where something was written.
    """
    if parameter not in TAKEN:
        return False
    before, given = TAKEN.pop(parameter)
    with torch._C.DisableTorchFunction():
        is_there = _local(given[0]).untyped_storage().nbytes() > 0
        return is_there and any(data._version for data in given) and _differ(given[0], before)


def data_of(tensor: Any) -> Tensor:
    """``tensor.data``."""
    data: Any = _DATA.__get__(tensor)
    if tensor in _SHOWN:
        with torch._C.DisableTorchFunction(), torch.no_grad():
            if tensor not in TAKEN:
                TAKEN[tensor] = (_local(data).clone(), [])
            TAKEN[tensor][1].append(data)
    return data  # type: ignore[no-any-return]


def watch_data() -> None:
    """Patch ``nn.Parameter.data``, of all parameters of this process; ``as_tensors.py`` patches DTensor's."""
    watched: Any = nn.Parameter
    watched.data = property(data_of, _DATA.__set__)


def _local(data: Any) -> Tensor:
    return getattr(data, "_local_tensor", data)  # type: ignore[no-any-return]


def _differ(data: Tensor, before: Tensor) -> bool:
    now = _local(data)
    return bool(((now != before) & ~(now.isnan() & before.isnan())).any())
