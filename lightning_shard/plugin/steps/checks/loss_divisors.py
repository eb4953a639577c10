"""Reads what a loss was divided by from its autograd graph.

Found are the weights of torch's ``nll_loss`` (thus of cross entropy with ignored targets, or with class weights), the
number of elements of ``mean`` and of torch's other losses, and divisors of divisions. Not found are those of losses by
custom or compiled functions, or in checkpointed code.

Private: ``_raw_saved_*`` of autograd nodes (torch 2.11 to 2.14), which shows whether reading a saved tensor would run
hooks, such as those of a checkpoint, that may run only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

_NODES = 64
_MEAN = 1
"""How autograd nodes store ``reduction="mean"``."""
_LINEAR = (
    *("Add", "Sub", "Mul", "Neg", "Where", "NanToNum", "ToCopy", "Clone", "Alias"),
    *("View", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Stack", "Cat", "Unbind", "Expand"),
)
"""Operations that are followed between the returned loss and the losses that it consists of."""


def divisions(loss: Tensor) -> Iterator[tuple[Any, Tensor | float]]:
    """Yield node and divisor of each mean that a loss is a sum of; to be called before a backward frees the graph."""
    pending: list[Any] = [loss.grad_fn]
    for _ in range(_NODES):
        node = pending.pop() if pending else None
        if node is None:
            if not pending:
                return
            continue
        kind, _, version = node.name().partition("Backward")
        if not version:
            continue  # a custom autograd Function, whatever its name
        following = [before for before, _ in node.next_functions]
        if kind.startswith("NllLoss"):
            if node._saved_reduction == _MEAN:
                yield from ((node, number) for number in _kept(node, "total_weight"))
        elif kind == "Sum":
            pending += _joined(node)
        elif kind == "Mean":
            yield node, float(node._saved_self_sym_numel)
            pending += _joined(node)
        elif getattr(node, "_saved_reduction", None) == _MEAN:
            yield from ((node, float(target.numel())) for target in _kept(node, "target"))
        elif kind == "Div":
            if following[1:] in ([], [None]):
                yield from ((node, other) for other in _kept(node, "other") if other.numel() == 1)
            pending.append(following[0])
        elif kind in _LINEAR:
            pending += reversed(following)


def _joined(node: Any) -> list[Any]:
    """The node below a sum or mean of losses (one or several). Below one over samples is the network: none.

    A vector of one element may be of a single sample, and what its loss is divided by is its own then.
    """
    [[before, _]] = node.next_functions
    made_by = "" if before is None else before.name()
    sizes = getattr(node, "_saved_self_sym_sizes", (0,))  # not of nested tensors
    is_one = all(size == 1 for size in sizes) and (len(sizes) == 0 or made_by.startswith("Unsqueeze"))
    return [before] if is_one or made_by.startswith(("Stack", "Cat")) else []


def without_those_by_zero(loss: Tensor, weight: Tensor) -> None:
    """Make the backward of a loss with weight 0 propagate zeros, not NaN, from divisions by zero."""
    for node, number in divisions(loss):
        if isinstance(number, Tensor) and node.name().startswith("Div"):
            node.register_hook(partial(_masked, (number == 0) & (weight == 0)))


def _masked(mask: Tensor, gradients: Sequence[Tensor | None], _: Any) -> tuple[Tensor | None, ...]:
    return tuple(each if each is None else torch.where(mask, 0.0, each) for each in gradients)


def _kept(node: Any, name: str) -> Iterator[Tensor]:
    """A tensor that a node has saved, unless a hook packed it."""
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and raw.unpack_hook is None:
        value = getattr(node, f"_saved_{name}")
        if isinstance(value, Tensor):
            yield value.detach()
