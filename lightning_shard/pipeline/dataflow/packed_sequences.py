"""A question that transformers asks of values, answered where there are none.

Without a mask, its models look at their positions for whether a row holds several sequences one after the other
(*packed*): attention then needs a mask, and else it needs none. On fake tensors they take rows to be packed, which
makes a mask that no real step makes; on meta they fail. Positions that a model makes itself count up.

Private in transformers 5.0 to 5.23 and used here: ``masking_utils.find_packed_sequence_indices``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_shard import tree

_NAME = "find_packed_sequence_indices"


@dataclass
class Asked:
    """Whether the question came."""

    is_asked: bool = False


@contextmanager
def nothing_packed(batch: Any = None) -> Iterator[Asked]:
    """Inside, rows of positions hold one sequence each, but for positions that are in ``batch``."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    plain = getattr(masks, _NAME, None)
    asked = Asked()
    if plain is None:
        yield asked
        return
    given = {tensor.untyped_storage()._cdata for tensor in tree.tensors(batch)}

    def answered(position_ids: Tensor) -> Any:
        if position_ids.untyped_storage()._cdata in given:
            return plain(position_ids)
        asked.is_asked = True
        return None

    setattr(masks, _NAME, answered)
    try:
        yield asked
    finally:
        setattr(masks, _NAME, plain)
