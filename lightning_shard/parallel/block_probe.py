"""The one probe of a block: its code runs more often on what a call is given, and the runs are compared by name.

What uses it says what differs between the runs, and what it means if results do: layers that a tensor-parallel plan
splits or leaves whole, all positions of a sequence or some, rows for an expert among others or alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.torch_private import without_dispatch_modes

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
"""Types of values that no run changes, and that hold no part of a batch."""


class RunChanges(Protocol):
    """What runs of a module have changed; ``restore`` undoes it."""

    def changed(self) -> list[str]: ...

    def restore(self) -> None: ...


TrialRuns = Callable[[nn.Module], AbstractContextManager[RunChanges]]


class Result(NamedTuple):
    """What a run has computed.

    Attributes:
        name: Of what it is.
        values: A copy.
        given: Values that the run has added something to, as a block to its input: what it has added is compared.
        least: The difference is also allowed relative to this: of results that may be zero but for rounding.
    """

    name: str
    values: Tensor
    given: Tensor | None = None
    least: float = 0.0


def outcome(
    run: Callable[[], Sequence[Result]], changes: RunChanges, device: torch.device
) -> tuple[Sequence[Result], bytes]:
    """The results of a run, and the state of the generators after it; then restores everything."""
    try:
        with unseen():
            return run(), random_state(device)
    finally:
        changes.restore()


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, nothing is noted by a checkpoint around the call, which counts operations, or what they save."""
    with without_dispatch_modes(), torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
        yield


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def first_apart(pairs: Iterable[tuple[Result, Result]], rounding: float) -> str | None:
    """The name of the first result that differs from the other run's, in running order.

    Args:
        rounding: The difference allowed, relative to the norm.
    """
    return next((ours.name for ours, theirs in pairs if not are_alike(ours, theirs, rounding)), None)


def are_alike(ours: Result, theirs: Result, rounding: float) -> bool:
    """Whether two results are equal but for rounding. Where the second has no finite number nothing is compared.

    By norms, since rounding may send a few tokens of many to other experts.
    """
    mine, expected, given = ours.values, theirs.values, theirs.given
    if mine.shape != expected.shape:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return True
    finite = expected.isfinite()  # a comparison with NaN is always false
    mine, expected = (values.where(finite, torch.zeros_like(values)) for values in (mine, expected))
    whole = scale = _norm(expected)
    if given is not None and given.shape == expected.shape:
        scale = min(whole, _norm((expected - given).where(finite, torch.zeros_like(given))))
    return _norm(mine - expected) <= rounding * max(scale, theirs.least) + 4 * torch.finfo(expected.dtype).eps * whole


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32)))


def in_32_bits(tensors: Iterable[Tensor]) -> bool:
    """Whether nothing is computed with them in fewer bits."""
    floats = (each for each in tensors if each.is_floating_point())
    return not any(each.dtype.itemsize < 4 or torch.is_autocast_enabled(each.device.type) for each in floats)


def random_state(device: torch.device) -> bytes:
    """The state of the generators that a module draws from; doesn't wait for a device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return b"".join(state.numpy().tobytes() for state in states)


class OpaqueError(Exception):
    """A run could change its arguments, and they can't be copied."""


def copied(value: Any) -> Any:
    """Copies of arguments for an additional run, which may change them in place; of tensors with gradients new leaves.

    transformers' caches are replaced by ``None``, since the run would append to them.

    Raises:
        OpaqueError: It isn't known how to copy an argument.
    """
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if is_cache(value):
        return None
    if tree.is_node(value):
        return tree.rebuild(value, [copied(each) for _, each in tree.children(value)])
    if isinstance(value, PLAIN):
        return value
    raise OpaqueError


def is_cache(value: Any) -> bool:
    """Whether a value is a transformers cache of keys and values; each run appends to it."""
    return hasattr(value, "get_seq_length")


def is_filled(cache: Any, block: nn.Module) -> bool:
    """Whether a cache already has keys for a block: of a prompt, a trained prefix, or another network.

    Raises:
        ValueError: transformers' own, of linear attention alone, whose states have no length.
    """
    numbers = (getattr(part, "layer_idx", None) for part in block.modules())
    layer = next((number for number in numbers if isinstance(number, int)), 0)
    try:
        return bool(cache.get_seq_length(layer))
    except (TypeError, ValueError):  # a layer's own; a layer of linear attention: as the cache's others are
        return bool(cache.get_seq_length())
