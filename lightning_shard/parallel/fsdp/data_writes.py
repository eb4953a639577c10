"""Has a change of a parameter's ``data`` in a step be seen as one of the parameter.

``p.data.mul_(…)`` doesn't change the version of ``p``. Where parameters are gathered for a step, and the change is lost
when they are freed, checks of versions would miss it: a momentum encoder would keep its old values. So of these
parameters ``data`` is what ``detach()`` returns, a tensor of the same memory and version. Of others, and where it is
assigned, ``data`` is torch's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

_DATA: Any = torch.Tensor.data
_SHOWN = WeakIdKeyDictionary()


def show_writes(parameter: Tensor) -> None:
    """Have changes of this parameter's ``data`` count as changes of the parameter."""
    _SHOWN[parameter] = True


def data_of(tensor: Any) -> Tensor:
    """``tensor.data``."""
    return tensor.detach() if tensor in _SHOWN else _DATA.__get__(tensor)  # type: ignore[no-any-return]


def watch_data() -> None:
    """Patch ``nn.Parameter.data``, of all parameters of this process; ``dtensor_writes.py`` patches DTensor's."""
    watched: Any = nn.Parameter
    watched.data = property(data_of, _DATA.__set__)
