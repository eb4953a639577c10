"""Has a step's own ``torch.inference_mode()`` act as ``no_grad`` on pipeline stages.

Stages follow tensors by their versions and views, which inference tensors lack. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def inference_mode_as_no_grad() -> Iterator[None]:
    """Context of a step, also of functions that ``@torch.inference_mode()`` decorates."""
    kind: Any = torch.inference_mode
    enter, leave = kind.__enter__, kind.__exit__

    def enter_no_grad(self: Any) -> None:
        self._in_place_of_it = torch.set_grad_enabled(not self.mode)

    def leave_no_grad(self: Any, *error: Any) -> Any:
        inside = vars(self).pop("_in_place_of_it", None)
        return leave(self, *error) if inside is None else inside.__exit__(*error)

    kind.__enter__, kind.__exit__ = enter_no_grad, leave_no_grad
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = enter, leave
