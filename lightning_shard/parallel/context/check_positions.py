"""Whether a block computes each position by itself, but for its attention.

A block that mixes or counts positions in any other way would compute something else on a part of a sequence, and
nothing would fail. So before its first run it is looked at on a few positions, with attention exchanged for a function
of each position's own query, key and value. Then what it computes

* is the same on all of them at once as on each half of them, within rounding, and so are queries, keys and values: it
  isn't where positions are counted from the first, or a number of tokens matters;
* isn't touched by one position that is NaN, but there: it is by matrix products, convolutions, recurrences and
  statistics over positions.

Parameters have noise added meanwhile, so that none that begin as zeros hide what comes before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_shard.errors import ShardError, StepError
from lightning_shard.parallel.context.attention import attention_by

POSITIONS = 64
"""How many are looked at, of a rank's part that has more."""
_APART = 1e-3
"""By how much what is the same may differ, as a part of its largest element; 32 bits, and other sizes of products."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Traces(Protocol):
    """What a run has left behind in the module."""

    def changed(self) -> list[str]: ...

    def put_back(self) -> None: ...


Looking = Callable[[nn.Module], AbstractContextManager[Traces]]


def check_positions(
    block: nn.Module,
    forward: Callable[..., Any],
    arguments: Callable[[int, int], Arguments],
    poison: Callable[[Arguments, int], Arguments],
    count: int,
    looking_at: Looking,
) -> None:
    """Run a block's code on a few positions; no collective.

    Args:
        block: With its parameters gathered.
        forward: Its code.
        arguments: Those for a range of this rank's positions, in 32 bits.
        poison: The same with one position's hidden states NaN.
        count: Of positions, even.
        looking_at: Gives what a run inside leaves behind.

    Raises:
        StepError: It can't be run on a part of a sequence, or that can't be known.
    """
    half, name = count // 2, type(block).__name__
    device = next((p.device for p in block.parameters()), torch.device("cpu"))
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), _noisy(block), looking_at(block) as traces:
            before = random_state(device)
            whole = _seen(forward, arguments(0, count), count)
            changed = traces.changed()
            if random_state(device) != before:
                raise StepError(draws(block))
            first = _seen(forward, arguments(0, half), half)
            second = _seen(forward, arguments(half, count), half)
            poisoned = _seen(forward, poison(arguments(0, count), half), count)
            traces.put_back()
    except ShardError:
        raise
    except Exception as error:
        raise StepError(
            f"{name} can't be run on a part of a sequence ({type(error).__name__}: {error}): {_NEEDED}"
        ) from error
    if not _alike(whole, first, second):
        raise StepError(f"{name} mixes or counts positions by more than its attention does: {_NEEDED}")
    if any(_reaches(output, dim, half) for output, dim in poisoned):
        raise StepError(f"{name} mixes positions by more than F.scaled_dot_product_attention: {_NEEDED}")
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
        f"{type(block).__name__} draws random numbers, and context ranks would draw others than one process: set its"
        " dropout to 0, or use context_parallel_size=1."
    )


def _keeps(name: str, changed: list[str]) -> str:
    what = ", ".join(path or "its attributes" for path in changed[:3])
    return (
        f"{name} changes {what} in its forward, which with context_parallel_size would be of this rank's part of the"
        " sequence: return it from the network instead, or use context_parallel_size=1."
    )


def random_state(device: torch.device) -> bytes:
    """Of the generators that a module draws from; no device is waited for."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(state.numpy().tobytes() for state in states)


Seen = list[tuple[Tensor, int]]
"""Tensors with their dim of positions."""


def _seen(forward: Callable[..., Any], arguments: Arguments, count: int) -> Seen:
    """What a block returns, and what it gives to attention."""
    seen: Seen = []

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Of each position by itself; turned alike, queries and keys give something else, unlike their product."""
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
    """The hidden states, ``[batch, count, …]``, among what a block returns.

    Raises:
        StepError: It returns something else that isn't plain.
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
        if len({dim, *(other for _, other in parts)}) > 1:
            return False
        found = torch.cat([tensor for tensor, _ in parts], dim)
        if found.shape != expected.shape:
            return False
        apart = (found - expected).abs().max()
        if not apart <= _APART * expected.abs().max():  # nor where it is NaN
            return False
    return True


def _reaches(output: Tensor, dim: int, poisoned: int) -> bool:
    """Whether other positions than the poisoned one are NaN."""
    spoiled = output.isnan().movedim(dim, 0).flatten(1).any(1)
    spoiled[poisoned] = False
    return bool(spoiled.any())


@contextmanager
def _noisy(block: nn.Module) -> Iterator[None]:
    """Parameters in 32 bits with noise of about their size added, and buffers in 32 bits, in place of the block's."""
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    made: dict[Tensor, Tensor] = {}
    with torch.no_grad():
        for module in block.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    replaced.append((module._parameters, name, parameter))
                    made[parameter] = nn.Parameter(_with_noise(parameter), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    replaced.append((module._buffers, name, buffer))
                    made[buffer] = buffer.to(torch.float32, copy=True)
    for slots, name, held in replaced:
        slots[name] = made[held]
    try:
        yield
    finally:
        for slots, name, held in replaced:
            slots[name] = held


def _with_noise(parameter: Tensor) -> Tensor:
    generator = torch.Generator(parameter.device).manual_seed(parameter.numel())
    noise = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device).normal_(generator=generator)
    return parameter.float() + noise * (max(parameter.size(-1), 1) ** -0.5 if parameter.ndim > 1 else 0.1)
