"""Keeps transformers from leaving out the mask of a microbatch without padding, in steps of a pipeline stage.

Given an ``attention_mask``, transformers' models look at its values: if nothing is padded, they make no mask. Then a
microbatch runs fewer operations than a padded one (values that cross are named by operation number), and blocks that
return a mask's sum with position biases (T5) return other shapes. So on stages, a mask is made whenever one is given.
Causal masks are skipped as usual where operations aren't counted: there attention is faster without.

Private in transformers 5.0 to 5.23, and used here: ``masking_utils._ignore_bidirectional_mask_sdpa`` and
``_ignore_causal_mask_sdpa``, whose first argument is the mask of padding.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from lightning_shard.torch_private import replaced

_BIDIRECTIONAL, _CAUSAL = "_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"


class _Kept(threading.local):
    names: tuple[str, ...] = ()


_kept = _Kept()


@contextmanager
def masks_made_as_given(*, causal_too: bool) -> Iterator[None]:
    """Context in which whether there is a mask doesn't depend on its values, in this thread."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    held = [name for name in (_BIDIRECTIONAL, _CAUSAL) if name in vars(masks)] if masks is not None else []
    before, _kept.names = _kept.names, (_BIDIRECTIONAL, _CAUSAL) if causal_too else (_BIDIRECTIONAL,)
    try:
        with replaced(*((masks, name, _told(name, getattr(masks, name))) for name in held)):
            yield
    finally:
        _kept.names = before


def _told(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def is_skipped(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        if padding_mask is not None and name in _kept.names:
            return False
        return plain(padding_mask, *args, **kwargs)

    return is_skipped
