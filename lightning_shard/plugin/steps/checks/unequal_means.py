"""Warns of losses that are means over different numbers of targets in the parts of a batch.

The mean of such means isn't the mean over the batch, which one process takes. ``loss_weight`` corrects that. Without it
nothing fails, so in some steps the divisors of losses are compared. A part in which nothing counts often has a guarded
loss of 0: with a divisor of 1 (``clamp(min=1)``), or with none. There the divisor is taken for 0.

Limits: padding in other steps only, and means in evaluation steps, which have no graph, aren't detected.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_shard.parallel.rank_compare import exchanged
from lightning_shard.plugin.steps.checks.loss_divisors import divisions

_DIVISORS = 4
"""Largest number of divisors of one loss that are compared, in the order of the graph."""
_LOSSES = 4
"""Largest number of a step's losses that are compared: with manual optimization it may have several backwards."""


class UnequalMeans:
    """Compares the divisors of one LightningModule's training losses, in one run.

    Args:
        parts: How many microbatches a batch is split into.
        group: The data ranks.
        is_weighted: Whether the user has set ``loss_weight``.
    """

    def __init__(self, parts: int, group: dist.ProcessGroup, *, is_weighted: bool) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._parts = parts
        self._is_done = is_weighted or parts * self._ranks == 1
        self._step = 0
        self._looks = False
        self._begin_step()
        self._seen: list[tuple[int, Tensor, list[Tensor | float]]] = []  # places of losses, losses and their divisors

    def note(self, loss: Any) -> None:
        """Read the divisors of a part's loss, before its backward frees the graph."""
        if self._looks:
            self._note(0, loss)

    def note_next(self, loss: Any) -> None:
        """The same for the next of a step's losses, which is compared with those in its place on other data ranks."""
        self._note(len(self._seen), loss)

    def _note(self, place: int, loss: Any) -> None:
        if self._looks and place < _LOSSES and isinstance(loss, Tensor):
            self._seen.append((place, loss.detach(), [number for _, number in divisions(loss)]))

    def warn(self) -> bool:
        """Warn once, after a batch's parts; a collective call over the data ranks in the steps that are looked at.

        Returns:
            Whether it has warned now.
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
                rank_zero_warn(self._text(low, high))
                return True
        return False

    def _begin_step(self) -> None:
        """The first two are looked at, and ever fewer later, since reading waits for the device."""
        self._step += 1
        is_power_of_two = self._step & (self._step - 1) == 0
        self._looks = not self._is_done and (self._step <= 2 or (self._step >= 16 and is_power_of_two))

    def _extremes(self) -> dict[tuple[int, int], tuple[float, float]]:
        """Minimum and maximum of each divisor over this rank's parts that have it, by its place."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for place, loss, divisors in self._seen:
            for number, own in enumerate(_row(loss, divisors)):
                low, high = found.get((place, number), (own, own))
                found[place, number] = min(low, own), max(high, own)
        return found

    def _text(self, least: float, most: float) -> str:
        parts = " of ".join(
            [f"{self._parts} microbatches"] * (self._parts > 1) + [f"{self._ranks} data ranks"] * (self._ranks > 1)
        )
        return (
            "Pass loss_weight. The training loss is a mean over a different number in each part of a batch"
            f" ({least:.6g} to {most:.6g}), as where targets are padding, and the losses and gradients of all parts"
            f" ({parts}) count equally: their mean isn't that over the whole batch, which one process takes."
            " HybridShardStrategy(loss_weight=lambda batch: (batch['labels'] != -100).sum()), or what that number is"
            " here, makes it the same (of batch['labels'][:, 1:] where the model shifts them, as transformers' causal"
            " ones do), and so does self.log(…, batch_size=that number) of what is logged. loss_weight=lambda batch: 1"
            " says that they are to count equally."
        )


def _row(loss: Tensor, divisors: list[Tensor | float]) -> list[float]:
    divisors = divisors[:_DIVISORS]
    if float(loss) != 0:
        return [float(each) for each in divisors]
    # a number of elements is exact; what was counted is a tensor
    return [0.0 if isinstance(each, Tensor) and each == 1 else float(each) for each in divisors] or [0.0]


def warn_of_balancing(module: nn.Module, parts: int) -> None:
    """Warn once of transformers' losses that balance experts, where a batch comes in several parts."""
    configs = (getattr(part, "config", None) for part in module.modules())
    if parts > 1 and any(getattr(config, "output_router_logits", False) is True for config in configs):
        rank_zero_warn(
            "A transformers model adds the loss that balances its experts (output_router_logits=True). It is taken of"
            f" each of the {parts} parts of a batch, on data ranks and in microbatches, and averaged, as under DDP and"
            " with accumulated gradients. That of the whole batch, which one process takes, is another one."
        )
