"""Has a parametrization that a module's code registers for a call, and then removes, leave the parameter as it was.

peft's LoRA of parameters (``target_parameters``, as of a mixture's experts) does so in each forward. To register one,
torch sets the parameter to what the parametrization's ``right_inverse`` makes of it. Without a ``right_inverse`` that
is the parameter itself. Nothing is changed, but autograd counts it as a change in place, which checks of parameters
would refuse, and where microbatches overlap also a backward that needs the parameter.

Private (torch 2.11 to 2.14): of ``torch.nn.utils.parametrize``, the function that sets it.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize

_SETS = "_maybe_set"


def keep_what_is_set_to_itself() -> None:
    """Patch torch's parametrizations, of all modules of this process."""
    plain: Any = getattr(parametrize, _SETS, None)
    if plain is None or hasattr(plain, "__wrapped__"):
        return

    @wraps(plain)
    def set_others(parameter: Tensor, value: Tensor) -> None:
        if value is not parameter:
            plain(parameter, value)

    setattr(parametrize, _SETS, set_others)
