"""Calls of ``torch.utils.checkpoint`` in a block's own code: the backward reruns their functions as the block ran them.

A backward runs such a function when the block's forward has ended, and with it the replacement of attention: it would
differentiate attention over this rank's positions alone.

Private, and replaced while a block runs (torch 2.11 to 2.14): ``CheckpointFunction.apply`` and
``_CheckpointFrame.__init__``, which are given the function of a reentrant and of another checkpoint. These are found
whichever way code has imported ``checkpoint``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

_REENTRANT: Any = checkpoint.CheckpointFunction
_OTHER: Any = checkpoint._CheckpointFrame


@contextmanager
def recomputed_within(context: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, each function that is checkpointed is made to run within ``context()``, in the backward too.

    Ranks that run the same blocks recompute the same functions in the same order, so these may hold collectives.
    """

    def within(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with context():
                return function(*args, **kwargs)

        return run

    inherited, apply, make = vars(_REENTRANT).get("apply"), _REENTRANT.apply, _OTHER.__init__

    def reentrant(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        if not torch.is_grad_enabled():  # as in trial runs of a block, where torch warns of missing gradients
            return function(*args)
        return apply(within(function), preserve, *args)

    _REENTRANT.apply = reentrant
    _OTHER.__init__ = lambda frame, function, *rest, **others: make(frame, within(function), *rest, **others)
    try:
        yield
    finally:
        _OTHER.__init__ = make
        if inherited is None:
            del _REENTRANT.apply
        else:
            _REENTRANT.apply = inherited
