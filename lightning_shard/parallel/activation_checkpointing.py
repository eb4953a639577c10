"""Activation checkpointing: what a block computes in a forward is computed again in the backward, not kept.

A block's ``forward`` is replaced on the instance, so that modules, names and state dicts stay as they are, and hooks
around the block (sharding, the stage's) run once per forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_shard.errors import ConfigurationError, StepError

Recomputing = bool | int | Literal["selective"] | None
"""``None`` or ``False``: nothing; ``True``: every block; ``n``: every n-th; ``"selective"``: of every block all but
matrix products, convolutions, attention and what ranks send each other."""

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

# Ranges of a profile compute nothing, and a second run may have more: FSDP2 marks how it gathers a unit in a block.
for _packet in (torch.ops.profiler._record_function_enter_new, torch.ops.profiler._record_function_exit):
    SAC_IGNORED_OPS.update(getattr(_packet, overload) for overload in _packet.overloads())


def check_recomputing(setting: Any) -> None:
    """Check ``activation_checkpointing``.

    Raises:
        ConfigurationError: It is none of those it can be.
    """
    is_number = isinstance(setting, int) and not isinstance(setting, bool) and setting > 0
    if not (setting is None or isinstance(setting, bool) or is_number or setting == "selective"):
        raise ConfigurationError(
            f"activation_checkpointing={setting!r} isn't known: use True (every block), a number n > 0 (every n-th"
            ' block), "selective" (all but matrix products and attention), or None.'
        )


def chosen(count: int, setting: Recomputing) -> list[int]:
    """The places of the blocks, of ``count``, that are recomputed: of every n-th the n-th, 2n-th, … .

    Raises:
        ConfigurationError: There are fewer blocks than n.
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
    remember: Callable[[], Callable[[], None]],
    *,
    selective: bool = False,
    is_compiled: bool = False,
) -> None:
    """Have a block's forward run again in each backward, in place.

    The second run draws the random numbers of the first, under the autocast of the first, and leaves no trace in
    attributes and buffers (counters, running statistics). What the block adds to lists, and hooks inside of it, see it.

    Args:
        block: The module.
        remember: Notes where random generators stand; returns what puts them back there.
        selective: Keep the results of matrix products, convolutions, attention and collectives.
        is_compiled: The compiler is to see the forward, and itself has the second run draw alike.
    """
    forward = block.forward
    keeping = functools.partial(create_selective_checkpoint_contexts, _policy)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first, second = keeping() if selective else (nullcontext(), nullcontext())
        return first, _SecondRun(block, remember(), remember, second)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        call = functools.partial(forward, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)

    @functools.wraps(forward)
    def compilable(*args: Any, **kwargs: Any) -> Any:
        if selective:
            return checkpoint(forward, *args, use_reentrant=False, context_fn=keeping, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    block.__dict__["forward"] = compilable if is_compiled else checkpointed


def leave_out_caches(block: nn.Module) -> None:
    """Have a block be trained without transformers' cache of keys and values, in place.

    Training has no use for it, a second run would add to it once more, and compiling breaks off at it. transformers'
    own checkpointing leaves it out too, by the same names.

    Raises:
        StepError: When called with one that holds what isn't of this step, such as a trained prefix.
    """
    forward = block.forward
    indices = (getattr(part, "layer_idx", None) for part in block.modules())
    layer = next((index for index in indices if isinstance(index, int)), 0)

    @functools.wraps(forward)
    def without_caches(*args: Any, **kwargs: Any) -> Any:
        for name in _CACHES if torch.is_grad_enabled() else ():
            cache = kwargs.get(name)
            if cache is None:
                continue
            if not hasattr(cache, "get_seq_length") or cache.get_seq_length(layer):
                raise StepError(
                    f"{type(block).__name__} is called with {name} that aren't empty, which activation_checkpointing"
                    " and compile_blocks leave out in training: leave these settings out, or call the network without"
                    f" {name}."
                )
            kwargs[name] = None
            if kwargs.get("use_cache"):
                kwargs["use_cache"] = False
        return forward(*args, **kwargs)

    block.__dict__["forward"] = without_caches


class _SecondRun(AbstractContextManager[None]):
    """Around each run but the first: there may be several, where a graph is kept."""

    def __init__(
        self,
        block: nn.Module,
        put_back: Callable[[], None],
        remember: Callable[[], Callable[[], None]],
        context: AbstractContextManager[Any],
    ) -> None:
        self._block = block
        self._put_back = put_back
        self._remember = remember
        self._context = context

    def __enter__(self) -> None:
        self._stack = ExitStack()
        self._stack.callback(self._remember())
        self._put_back()
        self._stack.enter_context(_leaving_no_trace(self._block))
        self._stack.enter_context(self._context)

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)


@contextmanager
def _leaving_no_trace(block: nn.Module) -> Iterator[None]:
    """Inside, modules have buffers that are copies; afterwards they have the attributes and buffers of before."""
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
    """The operations that this torch has of those to keep."""
    found = [getattr(getattr(torch.ops, space), name, None) for space, names in _KEPT for name in names]
    return frozenset(getattr(packet, overload) for packet in found if packet for overload in packet.overloads())


def _policy(_context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation not in _kept() or _draws(operation, args, kwargs):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _draws(operation: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers (dropout in attention): kept, it would leave the second run's other draws out of
    step."""
    names = [argument.name for argument in operation._schema.arguments]
    return "dropout_p" in names and {**dict(zip(names, args)), **kwargs}.get("dropout_p", 0.0) > 0.0
