"""Keeps transformers from deciding by values whether there is a mask, where values may not decide, or aren't there.

- Given an ``attention_mask``, its models make no mask where nothing is padded. Then a microbatch runs fewer operations
  than a padded one (values that cross are named by operation number), and blocks that return a mask's sum with position
  biases (T5) return other shapes. So on stages, a mask is made whenever one is given. Causal masks are skipped as usual
  where operations aren't counted: there attention is faster without.
- Without one, they look by position ids whether a row holds several sequences, one after the other (*packed*), between
  which attention needs a mask. On fake tensors, they take rows to be packed, and create a mask that no real step
  creates; on meta tensors, the check fails. Positions that a model creates itself count upwards, so they aren't packed.

Private in transformers 5.0 to 5.23, and used here: ``masking_utils._ignore_bidirectional_mask_sdpa`` and
``_ignore_causal_mask_sdpa``, whose first argument is the mask of padding, and ``find_packed_sequence_indices``.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from lightning_shard import tree
from lightning_shard.torch_private import replaced

_BIDIRECTIONAL, _CAUSAL = "_ignore_bidirectional_mask_sdpa", "_ignore_causal_mask_sdpa"
_MODULE = "transformers.masking_utils"
_PACKED = "find_packed_sequence_indices"


class _Kept(threading.local):
    names: tuple[str, ...] = ()


_kept = _Kept()


def masks_made_as_given(*, causal_too: bool) -> AbstractContextManager[None]:
    """Context in which whether there is a mask doesn't depend on its values, in this thread."""
    return _made_as_given(causal_too) if _MODULE in sys.modules else nullcontext()


@contextmanager
def _made_as_given(causal_too: bool) -> Iterator[None]:
    names = (_BIDIRECTIONAL, _CAUSAL) if causal_too else (_BIDIRECTIONAL,)
    before, _kept.names = _kept.names, names
    try:
        with _replaced(_made_if_given, *names):
            yield
    finally:
        _kept.names = before


def _made_if_given(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def is_skipped(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        return False if padding_mask is not None and name in _kept.names else plain(padding_mask, *args, **kwargs)

    return is_skipped


@dataclass
class Asked:
    """Records whether a model looked for packed sequences by positions of its own."""

    is_asked: bool = False


@contextmanager
def nothing_packed(batch: Any = None) -> Iterator[Asked]:
    """Context in which each row of positions counts as one sequence; positions in ``batch`` are checked as usual."""
    asked = Asked()

    def unless_given(_: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def packed(position_ids: Tensor) -> Any:
            given = {tensor.untyped_storage()._cdata for tensor in tree.tensors(batch)}
            if position_ids.untyped_storage()._cdata in given:
                return plain(position_ids)
            asked.is_asked = True
            return None

        return packed

    with _replaced(unless_given, _PACKED):
        yield asked


def _replaced(by: Callable[[str, Callable[..., Any]], Callable[..., Any]], *names: str) -> AbstractContextManager[None]:
    """Context in which ``by(name, function)`` replaces those functions of these names that transformers has."""
    masks: Any = sys.modules.get(_MODULE)
    return replaced(*[(masks, name, by(name, getattr(masks, name))) for name in names if hasattr(masks, name)])
