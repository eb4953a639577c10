"""Warns of losses that are means over different numbers of targets in the parts of a batch.

The mean of such means isn't the mean over the batch, which one process takes; ``loss_weight`` corrects that. So in some
steps what losses were divided by is read from their autograd graphs, and compared. A part in which nothing counts often
has a guarded loss of 0: with a divisor of 1 (``clamp(min=1)``), or with none. There the divisor is taken for 0.

Found are the weights of torch's ``nll_loss`` (thus of cross entropy with ignored targets, or with class weights), the
number of elements of ``mean`` and of torch's other losses, and divisors of divisions. Not found are those of losses by
custom or compiled functions, in checkpointed code, with manual optimization, in other steps, and in evaluation steps,
which have no graph.

Private: ``_raw_saved_*`` of autograd nodes (torch 2.11 to 2.14), which shows whether reading a saved tensor would run
hooks, such as those of a checkpoint, that may run only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_shard.parallel.rank_compare import exchanged

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


_DIVISORS = 4
"""Largest number of divisors of one loss that are compared, in the order of the graph."""

_TEXT = (
    "Pass loss_weight. The training loss is a mean over a different number in each part of a batch, of microbatches or"
    " data ranks ({:.6g} to {:.6g}), as where targets are padding, and all parts count equally: their mean isn't"
    " that over the whole batch, which one process takes. HybridShardStrategy(loss_weight=lambda batch:"
    " (batch['labels'] != -100).sum()), or what that number is here, makes it the same (of batch['labels'][:, 1:] where"
    " the model shifts them, as transformers' causal ones do), and so does self.log(…, batch_size=that number) of what"
    " is logged. loss_weight=lambda batch: 1 says that they are to count equally."
)


class UnequalMeans:
    """Compares the divisors of one LightningModule's training losses, in one run."""

    def __init__(self, parts: int, group: dist.ProcessGroup, *, is_weighted: bool) -> None:
        self._group = group
        self._is_done = is_weighted or parts * dist.get_world_size(group) == 1
        self._step = 0
        self._looks = False
        self._begin_step()
        self._seen: list[tuple[Tensor, list[Tensor | float]]] = []  # losses and their divisors

    def note(self, loss: Any) -> None:
        """Read the divisors of a part's loss, before its backward frees the graph."""
        if self._looks and isinstance(loss, Tensor):
            self._seen.append((loss.detach(), [number for _, number in divisions(loss)]))

    def warn(self) -> bool:
        """Warn once, after a batch's parts; returns whether it has warned now.

        A collective call over the data ranks in the steps that are looked at.
        """
        looks = self._looks
        self._begin_step()
        if not looks:
            return False
        (found,) = exchanged(self._group, self._extremes())
        self._seen = []
        for ranks in found.values():
            lows, highs = zip(*ranks.values())
            low, high = min(lows), max(highs)
            if high - low > 1e-6 * abs(low):
                self._is_done, self._looks = True, False
                rank_zero_warn(_TEXT.format(low, high))
                return True
        return False

    def _begin_step(self) -> None:
        """The first two are looked at, and ever fewer later, since reading waits for the device."""
        self._step += 1
        is_power_of_two = self._step & (self._step - 1) == 0
        self._looks = not self._is_done and (self._step <= 2 or (self._step >= 16 and is_power_of_two))

    def _extremes(self) -> dict[int, tuple[float, float]]:
        """Minimum and maximum of each divisor over this rank's parts that have it, by its place."""
        found: dict[int, tuple[float, float]] = {}
        for loss, divisors in self._seen:
            for place, own in enumerate(_row(loss, divisors)):
                low, high = found.get(place, (own, own))
                found[place] = min(low, own), max(high, own)
        return found


def _row(loss: Tensor, divisors: list[Tensor | float]) -> list[float]:
    divisors = divisors[:_DIVISORS]
    if float(loss) != 0:
        return [float(each) for each in divisors]
    # a number of elements is exact; what was counted is a tensor
    return [0.0 if isinstance(each, Tensor) and each == 1 else float(each) for each in divisors] or [0.0]
