"""Activation checkpointing: recompute a block's activations in the backward instead of keeping them.

A block's ``forward`` is replaced on the instance. So modules, names and state dicts don't change, and hooks around the
block (FSDP2's, the pipeline stage's) run once per forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_shard import tree
from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.parallel.block_probe import is_filled
from lightning_shard.parallel.fsdp.units import class_name
from lightning_shard.parallel.kept_results import FirstRun, KeptResults, SecondRun
from lightning_shard.state.tree_state import Note, as_taken, notes
from lightning_shard.state.walk import LEAVES, below

Recomputing = bool | int | Literal["selective"] | None
"""``None`` or ``False``: recompute nothing; ``True``: every block; ``n``: every n-th block; ``"selective"``: in every
block all but matrix products, convolutions, attention and collectives."""

_CACHES = ("past_key_values", "layer_past")
_KEPT = (
    ("aten", ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm")),
    (
        "aten",
        (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
        ),
    ),
    (
        "_c10d_functional",
        ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor", "all_to_all_single"),
    ),
)

# Profiler ranges compute nothing, and the second run may have more of them (FSDP2 marks its all-gather of a unit within
# a block), so that selective checkpointing must not count them.
for _packet in (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit):
    SAC_IGNORED_OPS.update(getattr(_packet, overload) for overload in _packet.overloads())


def check_recomputing(setting: Any) -> None:
    """Check the setting ``activation_checkpointing``.

    Raises:
        ConfigurationError: The setting isn't a :data:`Recomputing`.
    """
    is_number = isinstance(setting, int) and not isinstance(setting, bool) and setting > 0
    is_name = isinstance(setting, str) and setting == "selective"
    if not (setting is None or isinstance(setting, bool) or is_number or is_name):
        raise ConfigurationError(
            f"activation_checkpointing={setting!r} isn't known: use True (every block), a number n > 0 (every n-th"
            ' block), "selective" (all but matrix products and attention), or None.'
        )


def chosen(count: int, setting: Recomputing) -> list[int]:
    """The indices of the blocks, out of ``count``, that are recomputed; with a number n, the n-th, 2n-th, … block.

    Raises:
        ConfigurationError: There are fewer than n blocks.
    """
    if not setting:
        return []
    every = setting if isinstance(setting, int) else 1
    if every > count:
        raise ConfigurationError(
            f"activation_checkpointing={setting} is every {setting}th block, and there are {count}: use a smaller"
            " number, or True."
        )
    return [place for place in range(count) if (place + 1) % every == 0]


def recompute(
    block: nn.Module,
    snapshot: Callable[[], Callable[[], None]],
    *,
    selective: bool = False,
    is_compiled: bool = False,
) -> None:
    """Make a block run its forward again in each backward, in place.

    The second run draws the same random numbers as the first, under the same autocast, and finds lists, dicts and
    objects that it is given as the first one did. Afterwards these, and attributes and buffers (counters, running
    statistics), are restored. Not undone: what hooks inside of the block do.

    Raises, when the block is called:
        StepError: It changed an argument in place.

    Args:
        block: The module.
        snapshot: Takes a snapshot of the random generators; returns a function that restores it.
        selective: Keep the results of matrix products, convolutions, attention and collectives.
        is_compiled: The forward will be compiled; the compiler itself restores generators for the second run.
    """
    forward = block.forward

    def contexts(
        before: list[Note], kept: KeptResults | None
    ) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        restore = snapshot()

        @contextmanager
        def second() -> Iterator[None]:
            """A run after the first; with ``retain_graph`` there may be several."""
            put_back = snapshot()
            restore()
            try:
                with _leaving_no_trace(block), as_taken(before), nullcontext() if kept is None else SecondRun(kept):
                    yield
            finally:
                put_back()

        return nullcontext() if kept is None else FirstRun(kept), _Again(second)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call, kept = functools.partial(forward, **kwargs), KeptResults(_keeps) if selective else None
        # what objects hold; tensors are held as they are: a change of their elements isn't seen
        before = [*notes(each for each in below("", (args, kwargs)) if not isinstance(each[1], LEAVES))]
        context_fn = functools.partial(contexts, before, kept)
        given = [(tensor, tensor._version) for tensor in tree.tensors((args, kwargs)) if not tensor.is_inference()]
        output = checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, context_fn=context_fn)
        before[:] = [note for note in before if note.has_changed()]
        if any(tensor._version != version for tensor, version in given) and _needs_gradients(output):
            raise StepError(
                f"{class_name(block)} changes an argument in place, and activation_checkpointing runs it a second time"
                " on what it was given: write x = x + y in place of x += y, or leave activation_checkpointing out."
            )
        if kept is not None:
            kept.copy_those_in(output)  # which the code around the block may change
        return output

    @functools.wraps(forward)
    def compilable(*args: Any, **kwargs: Any) -> Any:
        if selective:
            keeping = functools.partial(create_selective_checkpoint_contexts, _policy)
            return checkpoint(forward, *args, use_reentrant=False, context_fn=keeping, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.__dict__["forward"] = compilable if is_compiled else checkpointed


def _needs_gradients(output: Any) -> bool:
    return any(tensor.requires_grad for tensor in tree.tensors(output))


def leave_out_caches(block: nn.Module) -> None:
    """Make a block ignore transformers' cache of keys and values while gradients are enabled, in place.

    Training has no use for the cache, a second run would append to it again, and the compiler breaks its graph at it.
    transformers' own checkpointing drops it too, by the same argument names.

    Raises:
        StepError: The block is called with a cache that isn't empty, such as one with a trained prefix.
    """
    forward = block.forward

    @functools.wraps(forward)
    def without_caches(*args: Any, **kwargs: Any) -> Any:
        for name in _CACHES if torch.is_grad_enabled() else ():
            cache = kwargs.get(name)
            if cache is None:
                continue
            if not hasattr(cache, "get_seq_length") or is_filled(cache, block):
                raise StepError(
                    f"{class_name(block)} is called with {name} that aren't empty, which activation_checkpointing"
                    " and compile_blocks leave out in training: leave these settings out, or call the network without"
                    f" {name}."
                )
            kwargs[name] = None
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        return forward(*args, **kwargs)

    block.__dict__["forward"] = without_caches


class _Again(AbstractContextManager[None]):
    """A context that may be entered again once it was left, as each run of a backward does."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._context = self._make()
        self._context.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._context.__exit__(*exception)


@contextmanager
def _leaving_no_trace(block: nn.Module) -> Iterator[None]:
    """Inside, the modules' buffers are copies; on exit, the attributes and buffers of before are restored."""
    before = [(part, dict(vars(part))) for part in block.modules()]
    copies: dict[int, Tensor] = {}
    for part, _ in before:
        part.__dict__["_buffers"] = {
            name: None if buffer is None else copies.setdefault(id(buffer), buffer.detach().clone())
            for name, buffer in part._buffers.items()
        }
    try:
        yield
    finally:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)


@functools.cache
def _kept() -> frozenset[Any]:
    """The operations of :data:`_KEPT` that the installed torch has."""
    found = [getattr(getattr(torch.ops, space), name, None) for space, names in _KEPT for name in names]
    return frozenset(getattr(packet, overload) for packet in found if packet for overload in packet.overloads())


def _policy(_context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _keeps(operation, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(operation: Any, args: Any, kwargs: Any) -> bool:
    return operation in _kept() and not _draws(operation, args, kwargs)


def _draws(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers (dropout in attention).

    If its result were kept, the second run would draw other numbers in the operations after it.
    """
    names = [argument.name for argument in operation._schema.arguments]
    return "dropout_p" in names and {**dict(zip(names, args)), **kwargs}.get("dropout_p", 0.0) > 0.0
