"""Warns of losses on pipeline stages that are sums over samples, and of balancing losses of experts.

Microbatches are averaged, as batches are where gradients are accumulated. Of a mean over samples that is the whole
batch's. Of a sum it is one process's divided by the number of microbatches, and so are its gradients. A loss that
balances experts isn't linear in its tokens: that of the whole batch is another one.

Whether it is a sum is known where two microbatches ran as one (``pipeline/dataflow/mixed_samples.py``). Elsewhere, as
where random numbers are drawn, it is read from the autograd graph of the first steps. One that is multiplied or divided
by anything on its way to the loss isn't taken for one then, nor is one inside of a custom or compiled function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.pipeline.dataflow.mixed_samples import LossOf

_STEPS = 2
_NODES = 64
_SUM = 2
"""How autograd nodes store ``reduction="sum"``."""
_OF_EACH = ("Mul", "Div", "Add", "Sub", "Neg", "Exp", "Alias")
"""Operations on each of several losses."""
_OF_WEIGHTS = ("Abs", "Pow", "Sqrt", "Sigmoid", "Tanh", "Relu", "Softplus", "Log", "Softmax", "LogSoftmax")
_UNCHANGED = ("Add", "Clone", "Alias", "View", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy")
"""Operations that leave a sum a sum."""


def is_sum_over_samples(loss: Tensor, size: int) -> bool:
    """Whether a loss, or a summand of it, is a sum over ``size`` samples; to be called before a backward.

    A sum over a multiple of ``size`` elements counts, since losses may have been taken for each token.
    """
    pending: list[Any] = [loss.grad_fn]
    for _ in range(_NODES):
        node = pending.pop() if pending else None
        if node is None:
            if not pending:
                return False
            continue
        kind, _, version = node.name().partition("Backward")
        following = [before for before, _ in node.next_functions]
        if not version:
            continue  # a custom autograd Function
        if kind == "Sum":
            sizes = getattr(node, "_saved_self_sym_sizes", None) or (0,)
            may_count = len(sizes) and math.prod(sizes) > 1 and sizes[0] and sizes[0] % size == 0
            if may_count and not (_joins(following) or _are_means(following, size) or _are_of_parameters(following)):
                return True
        elif getattr(node, "_saved_reduction", None) == _SUM:
            return True
        elif kind in _UNCHANGED:
            pending += following
    return False


def _joins(following: list[Any]) -> bool:
    """Whether a few losses are added up, such as those of several tasks, each weighted by a number."""
    pending = [node for node in following if node is not None]
    for _ in range(_NODES):
        if not pending:
            return False
        node = pending.pop()
        kind = node.name().partition("Backward")[0]
        if kind in ("Stack", "Cat"):
            return True
        if kind in _OF_EACH:
            pending += [before for before, _ in node.next_functions if before is not None]
    return False


def _are_means(following: list[Any], size: int) -> bool:
    """Whether all that is added up are means over samples, such as one for each feature."""

    def is_mean(node: Any, kind: str) -> bool | None:
        if kind != "Mean":
            return None
        dims: Any = getattr(node, "_saved_dim", None) or ()
        sizes: Any = getattr(node, "_saved_self_sym_sizes", ())
        first = {0, 2**64 - len(sizes)}  # negative dimensions are kept as unsigned numbers
        return bool(first & set(dims) and sizes[0] % size == 0)

    return _begin_at(following, is_mean, (*_OF_EACH, *_UNCHANGED, "Pow", "Sqrt", "Abs"))


def _are_of_parameters(following: list[Any]) -> bool:
    """Whether all that is added up is computed of parameters alone, each element by itself, as a penalty on weights."""

    def is_parameter(node: Any, _: str) -> bool | None:
        return isinstance(node.variable, nn.Parameter) if hasattr(node, "variable") else None

    return _begin_at(following, is_parameter, (*_OF_EACH, *_UNCHANGED, *_OF_WEIGHTS))


def _begin_at(following: list[Any], ends: Callable[[Any, str], bool | None], kinds: Collection[str]) -> bool:
    """Whether all ways from these nodes, over nodes of some kinds, end at ones that fit.

    Args:
        ends: Whether a node of this kind fits; ``None`` if it isn't an end.
    """
    pending = [node for node in following if node is not None]
    found = False
    for _ in range(_NODES):
        if not pending:
            return found
        node = pending.pop()
        kind = node.name().partition("Backward")[0]
        fits = ends(node, kind)
        if fits is False or (fits is None and kind not in kinds):
            return False
        if fits is None:
            pending += [before for before, _ in node.next_functions if before is not None]
        found = found or bool(fits)
    return False


class SummedLosses:
    """Looks at the training losses of one LightningModule's first steps.

    Args:
        microbatches: How many a batch is split into; of one nothing is said.
    """

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._left = _STEPS if microbatches > 1 else 0
        self._seems_a_sum = False

    def note(self, loss: Any, size: int) -> None:
        """Look at a microbatch's loss, before its backward frees the graph."""
        if self._left and isinstance(loss, Tensor) and is_sum_over_samples(loss, size):
            self._seems_a_sum = True

    def end_step(self, found: LossOf | None) -> bool:
        """Warn once, after a batch's microbatches.

        Args:
            found: What the loss is, if that is known.

        Returns:
            Whether it has warned now.
        """
        if not self._left:
            return False
        self._left -= 1
        is_sum = self._seems_a_sum if found in (None, LossOf.NEITHER) else found is LossOf.SUM
        if is_sum:
            rank_zero_warn(
                "The training loss is a sum over samples, and the microbatches of a pipeline are averaged: loss and"
                f" gradients are 1/{self._microbatches} of those of one process that has the batch at once. Divide the"
                " loss by the number of samples (reduction='mean'), which is the same on every layout, or use"
                " microbatches=1."
            )
        if is_sum or found is not None:
            self._left = 0
        return is_sum


def warn_of_balancing(module: nn.Module, parts: int) -> None:
    """Warn once of transformers' losses that balance experts, where a batch comes in several parts."""
    configs = (getattr(part, "config", None) for part in module.modules())
    if parts > 1 and any(getattr(config, "output_router_logits", False) is True for config in configs):
        rank_zero_warn(
            "A transformers model adds the loss that balances its experts (output_router_logits=True). It is taken of"
            f" each of the {parts} parts of a batch, on data ranks and in microbatches, and averaged, as under DDP and"
            " with accumulated gradients. That of the whole batch, which one process takes, is another one."
        )
