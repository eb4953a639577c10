"""What hooks put into Lightning's checkpoint dict under keys that this package has another use for.

``on_save_checkpoint`` may add any key. Such values are kept in ``checkpoint["lightning_shard"]["of_hooks"]``, and are
back under their keys when ``on_load_checkpoint`` is called, and in a ``.ckpt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_shard.errors import UnsupportedStateError

TRANSFORMERS_KEY = "transformers"
"""Key of the trainer state for what a transformers folder needs beside the weights."""
EXTRA_STATE = "extra_state"
"""Key for those values of a state dict that are no tensors."""
RANK_STATE = "rank_state"
OWN = "lightning_shard"
OPTIMIZER_TENSORS = "optimizer_tensors"
_OF_HOOKS = "of_hooks"
_SHARED = (TRANSFORMERS_KEY, EXTRA_STATE, RANK_STATE)
_RESERVED = (OWN, OPTIMIZER_TENSORS)
"""Keys that are in use while hooks run."""


def set_aside(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint dict as hooks have left it, with what is under such keys set aside.

    Raises:
        UnsupportedStateError: A key can't be shared.
    """
    if taken := [key for key in _RESERVED if key in checkpoint]:
        raise UnsupportedStateError(
            f"A hook has put {taken[0]!r} into the checkpoint, a key that lightning_shard needs itself: choose another."
        )
    kept = {key: checkpoint[key] for key in _SHARED if key in checkpoint}
    rest = {key: value for key, value in checkpoint.items() if key not in kept}
    return {**rest, OWN: {_OF_HOOKS: kept}} if kept else rest


def put_back(checkpoint: dict[str, Any]) -> None:
    """Put what :func:`set_aside` has set aside back under its keys."""
    own = checkpoint.get(OWN)
    if isinstance(own, Mapping) and _OF_HOOKS in own:
        checkpoint.update(own[_OF_HOOKS])
        checkpoint[OWN] = {key: value for key, value in own.items() if key != _OF_HOOKS}
        if not checkpoint[OWN]:
            del checkpoint[OWN]
