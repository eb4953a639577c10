"""Whether a training loss of samples together is the mean of their parts', as a pipeline takes it of microbatches.

It isn't where samples are compared with each other (contrastive losses, hard examples, a batch's statistics), where it
is a sum, or a mean over another number of tokens in each part. So in the first batch, the last stage runs its part of
two microbatches again, and of both together, without gradients, and puts back what that changed.

Nothing is said of a step whose loss depends on random numbers, beside dropout layers', which are left out meanwhile; of
one whose values from earlier stages can't be joined; and of networks with BatchNorm, of which users are warned anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from lightning_shard.parallel.batch_norm import batch_norms
from lightning_shard.pipeline.crossing import Crossing, Key
from lightning_shard.pipeline.search import Memory
from lightning_shard.pipeline.stage import Stage

Received = Mapping[Key, Tensor]
RunAgain = Callable[[Any, int], Tensor]
"""Runs the step on a microbatch, with a seed of this number; gives its loss."""
_ROUNDING = {True: 1e-3, False: 3e-2}
"""By how much losses may differ, of their size, in 32 bits or more and in fewer."""


def losses_of_parts(
    stage: Stage,
    forwards: Sequence[tuple[Crossing, Received]],
    parts: Sequence[Any],
    together: Any,
    size: int,
    run: RunAgain,
    remember: Callable[[], Memory],
) -> tuple[list[float], float] | None:
    """The losses of two microbatches, and that of both; inside a call of the root, on the last stage.

    Args:
        forwards: What crossed and what came for each of the microbatches.
        parts: The microbatches, of ``size`` samples.
        together: Their samples, as one microbatch.
        remember: Notes what a run may change.

    Returns:
        ``None`` where they can't be compared.
    """
    crossing = forwards[0][0]
    came = _joined([received for _, received in forwards], size)
    if came is None:
        return None
    found, memory = [], remember()
    with torch.no_grad():
        for part, given, seed in (
            (parts[0], forwards[0][1], 0),
            (parts[0], forwards[0][1], 1),
            (parts[1], forwards[1][1], 0),
            (together, came, 0),
        ):
            received = {key: value.detach().clone() for key, value in given.items()}
            try:
                with stage.microbatch(received, crossing):
                    found.append(float(run(part, seed)))
            except Exception:  # of sizes, say; the step itself has run
                return None
            finally:
                memory.put_back()
    memory.forget()
    first, again, second, both = found
    return ([first, second], both) if first == again and all(map(math.isfinite, found)) else None


def tell_of_loss(
    losses: Sequence[float], weights: Sequence[float], together: float, count: int, *, in_32_bits: bool
) -> None:
    """
    Args:
        losses: Of two microbatches of ``count``.
        weights: How much each counts.
        together: Of both as one.
    """
    mean = sum(w * loss for w, loss in zip(weights, losses)) / (sum(weights) or 1)
    if abs(together - mean) > _ROUNDING[in_32_bits] * max(abs(together), abs(mean)):
        rank_zero_warn(
            f"training_step's loss of two microbatches together is {together:.5g}, and the mean of each one's"
            f" {mean:.5g}. With several pipeline stages it is taken of each of {count} microbatches, so this is another"
            " loss than one process has of the batch. If it is a mean over tokens or samples of which each microbatch"
            " has another number, say how much a batch counts by HybridShardStrategy(loss_weight=…). If it is a sum,"
            " make it a mean. If it compares samples with each other, or takes a batch's statistics, each microbatch is"
            " by itself: use fewer (microbatches=1, and accumulate_grad_batches), or pipeline_parallel_size=1."
        )


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    layers = [part for part in module.modules() if isinstance(part, _DropoutNd) and part.training]
    for layer in layers:
        layer.training = False
    try:
        yield
    finally:
        for layer in layers:
            layer.training = True


def takes_statistics(module: nn.Module) -> bool:
    return any(layer.training for layer in batch_norms(module).values())


def _joined(received: Sequence[Received], size: int) -> dict[Key, Tensor] | None:
    """What would have come for both; ``None`` where it isn't known how their values go together."""
    joined = {}
    first, second = received
    for key, value in first.items():
        other = second.get(key)
        if other is None:
            return None
        if key[0] != "parameter" and value.ndim and value.size(0) == size == other.size(0):
            joined[key] = torch.cat([value.detach(), other.detach()])
        elif value.shape == other.shape and torch.equal(value, other):
            joined[key] = value
        else:
            return None
    return joined
