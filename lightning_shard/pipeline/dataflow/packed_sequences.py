"""Overrides transformers' check for packed sequences, for runs on fake or meta tensors, which have no values.

Without a mask, transformers' models inspect the values of their position ids for whether a row holds several sequences
one after the other (*packed*): then attention needs a mask, otherwise it needs none. On fake tensors, they take rows to
be packed, and create a mask that no real step creates; on meta tensors, the check fails. Positions that a model creates
itself count upwards, so they aren't packed.

Private in transformers 5.0 to 5.23, and used here: ``masking_utils.find_packed_sequence_indices``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_shard import tree
from lightning_shard.torch_private import replaced

_NAME = "find_packed_sequence_indices"


@dataclass
class Asked:
    """Records whether a model ran the check on positions of its own."""

    is_asked: bool = False


@contextmanager
def nothing_packed(batch: Any = None) -> Iterator[Asked]:
    """Context in which each row of positions counts as one sequence; positions in ``batch`` are checked as usual."""
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

    with replaced((masks, _NAME, answered)):
        yield asked
