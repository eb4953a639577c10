"""Check that a block computes each position independently, except in its attention.

A block that mixes or counts positions in any other way would silently compute something else on a part of a sequence.
So before its first run a block is run on a few positions, with attention replaced by a function of each position's own
query, key and value: outputs, queries, keys and values on all positions at once must equal those on two parts of them,
within rounding. They don't if the block counts positions from the first one, depends on the number of tokens, or mixes
positions by matrix products, convolutions, recurrences or statistics. The parts are of odd sizes.

Noise is added to the parameters for these runs, so that parameters that are zero at first hide nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import ShardError, StepError
from lightning_shard.parallel.block_probe import Result, TrialRuns, are_alike, random_state
from lightning_shard.parallel.context.attention import attention_by
from lightning_shard.parallel.fsdp.units import class_name
from lightning_shard.parallel.tensor.local_modules import computing_with

POSITIONS = 64
"""Maximum number of positions, of a rank's part, that the check runs on."""
_APART = 1e-3
"""Tolerance, relative to the norm: float32 rounding, since matrix products have other sizes."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def check_positions(
    block: nn.Module,
    forward: Callable[..., Any],
    arguments: Callable[[int, int], Arguments],
    count: int,
    trial_runs: TrialRuns,
) -> None:
    """Run a block's code on a few positions, and check what it computes; no communication.

    Args:
        block: The block, with unsharded parameters.
        forward: Its forward.
        arguments: Returns arguments in 32 bits for a range of this rank's positions.
        count: The number of positions, even.
        trial_runs: A context for runs of the block; its :class:`RunChanges` restore what they have changed.

    Raises:
        StepError: The block can't be run on a part of a sequence, or that can't be known.
    """
    part, name = count // 2 | 1, class_name(block)  # odd: windows of positions would end elsewhere
    device = next((p.device for p in block.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), _noisy(block), trial_runs(block) as changes:
            before = random_state(device)
            whole = _seen(forward, arguments(0, count), count)
            changed = changes.changed()
            if random_state(device) != before:
                raise StepError(draws(block))
            first = _seen(forward, arguments(0, part), part)
            second = _seen(forward, arguments(part, count), count - part)
            changes.restore()
    except ShardError:
        raise
    except Exception as error:
        raise StepError(
            f"{name} can't be run on a part of a sequence ({type(error).__name__}: {error}): {_NEEDED}"
        ) from error
    if not _alike(whole, first, second):
        raise StepError(f"{name} mixes or counts positions by more than its attention does: {_NEEDED}")
    if changed:
        raise StepError(_keeps(name, changed))


_NEEDED = (
    "with context_parallel_size each rank runs blocks on a part of every sequence, and only"
    " torch.nn.functional.scaled_dot_product_attention, called by this name (transformers:"
    ' attn_implementation="sdpa"), sees all positions. Give blocks what depends on positions (rotary tables, masks)'
    " as arguments instead of making it in them, or use context_parallel_size=1: attention by products or of another"
    " package, convolutions, recurrences, and statistics over tokens can't be dealt."
)


def draws(block: nn.Module) -> str:
    return (
        f"{class_name(block)} draws random numbers, and context ranks would draw others than one process (sentence 7 of"
        " the contract): set its dropout to 0, or use context_parallel_size=1."
    )


def _keeps(name: str, changed: list[str]) -> str:
    what = ", ".join(path or "its attributes" for path in changed[:3])
    return (
        f"{name} changes {what} in its forward, which with context_parallel_size would be of this rank's part of the"
        " sequence: return it from the network instead, or use context_parallel_size=1."
    )


Seen = list[tuple[Tensor, int]]
"""Tensors, each with the dim of its positions."""


def _seen(forward: Callable[..., Any], arguments: Arguments, count: int) -> Seen:
    """The queries, keys and values that a block passes to attention, then the tensors that it returns."""
    seen: Seen = []

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """A function of each position by itself.

        If queries and keys are rotated by the same angle, it changes, unlike their product. So the check notices rotary
        positions that are counted within the block.
        """
        seen.extend((tensor, tensor.ndim - 2) for tensor in (query, key, value))
        if key.ndim > 2 and key.size(-3) != query.size(-3):
            times = query.size(-3) // key.size(-3)
            key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
        weight = (query.sum(-1, keepdim=True) + 2 * key.sum(-1, keepdim=True)) / query.size(-1) ** 0.5
        return value * (1 + weight.tanh())

    args, kwargs = arguments
    with attention_by(attention):
        returned = forward(*args, **kwargs)
    seen.extend((output, 1) for output in outputs_of(returned, count))
    return seen


def outputs_of(returned: Any, count: int) -> list[Tensor]:
    """The hidden states, ``[batch, count, features]``, among the outputs of a block.

    Raises:
        StepError: The block returns something else, other than numbers, strings and ``None``.
    """
    values = returned if isinstance(returned, (tuple, list)) else [returned]
    for value in values:
        is_sequence = isinstance(value, Tensor) and value.ndim == 3 and value.size(1) == count
        if not is_sequence and not (value is None or isinstance(value, (bool, int, float, str))):
            what = (
                f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            raise StepError(
                f"A block returns {what} for {count} positions: with context_parallel_size blocks return hidden states"
                " [batch, sequence, features] and nothing else that depends on them. Use context_parallel_size=1."
            )
    return [value for value in values if isinstance(value, Tensor)]


def _alike(whole: Seen, first: Seen, second: Seen) -> bool:
    if not len(whole) == len(first) == len(second):
        return False
    for (expected, dim), *parts in zip(whole, first, second):
        sizes = [found.size(dim) for found, _ in parts]
        if {dim} != {other for _, other in parts} or sum(sizes) != expected.size(dim):
            return False
        pairs = zip(parts, expected.split(sizes, dim))
        if not all(are_alike(Result("", found), Result("", piece), _APART) for (found, _), piece in pairs):
            return False
    return True


def _noisy(block: nn.Module) -> AbstractContextManager[None]:
    """Inside, a block's parameters are float32 copies with noise of about their size, its buffers float32 copies."""
    made: dict[int, Tensor] = {}

    def other(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if id(tensor) not in made:
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(_with_noise(tensor), False) if is_parameter else tensor.float().clone()
        return made[id(tensor)]

    return computing_with(block.modules(), other, buffers=True)


def _with_noise(parameter: Tensor) -> Tensor:
    generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
    noise = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device).normal_(generator=generator)
    return parameter.float() + noise * (max(parameter.size(-1), 1) ** -0.5 if parameter.ndim > 1 else 0.1)
