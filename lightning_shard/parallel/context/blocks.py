"""Context parallelism: each block runs on this rank's part of every sequence.

A block's ``forward`` is replaced on the instance: its arguments are cut to this rank's part, and its outputs are
all-gathered. So all code around and between blocks (positions, labels, losses, hooks on blocks) sees whole sequences.
Within a block, attention sees all positions (:mod:`.attention`). Nothing else in a block may mix positions;
:mod:`.check_positions` checks that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.parallel.block_probe import PLAIN, TrialRuns, is_cache, is_filled, random_state
from lightning_shard.parallel.context.attention import Cut, Part, attention_by, join, over_ranks, share
from lightning_shard.parallel.context.check_positions import (
    POSITIONS,
    Arguments,
    check_positions,
    draws,
    outputs_of,
)
from lightning_shard.parallel.fsdp.units import class_name
from lightning_shard.user_hooks import has_forward_hooks_beside

_LIBRARIES = ("torch.", "lightning_shard.")
_ONE = " Use context_parallel_size=1."


class ShardedSequences:
    """Makes a model's blocks run on parts of sequences.

    Args:
        part: This rank's part of every sequence.
        trial_runs: A context for runs of a block; its :class:`RunChanges` restore what a run has changed.
    """

    def __init__(self, part: Part, trial_runs: TrialRuns) -> None:
        self._part = part
        self._trial_runs = trial_runs
        self._caches: WeakKeyDictionary[Any, set[nn.Module]] = WeakKeyDictionary()

    def attend(self, block: nn.Module) -> Callable[..., Any]:
        """Make a block's attention see all positions, in place.

        Apply it before activation checkpointing wraps the forward, so that a recomputed forward does so too.

        Returns:
            The block's original forward.
        """
        plain = block.forward

        @functools.wraps(plain)
        def attending(*args: Any, **kwargs: Any) -> Any:
            hidden = _hidden_states(block, args, kwargs)
            before = random_state(hidden.device)
            with attention_by(over_ranks(self._part, hidden.size(1))):
                returned = plain(*args, **kwargs)
            if random_state(hidden.device) != before:
                raise StepError(draws(block))
            return returned

        block.__dict__["forward"] = attending
        return plain

    def deal(self, block: nn.Module, plain: Callable[..., Any]) -> None:
        """Cut a block's arguments, and all-gather its outputs, in place. All context ranks must make the same calls.

        Args:
            block: A block after :meth:`attend`, and after activation checkpointing.
            plain: The result of :meth:`attend`.
        """
        forward = block.forward
        inner = [module for module in block.modules() if module is not block]
        checked: set[Any] = set()

        @functools.wraps(forward)
        def dealt(*args: Any, **kwargs: Any) -> Any:
            _refuse_hooks(block, inner)
            args, kwargs = self._without_caches(block, args, kwargs)
            hidden = _hidden_states(block, args, kwargs)
            length = self._checked_length(hidden)
            cut = partial(_each_tensor, block, hidden)
            kind = (block.training, torch.is_grad_enabled(), _kind_of((args, kwargs)))
            if kind not in checked:
                self._check(block, plain, (args, kwargs), cut, length)
                checked.add(kind)
            own = cut(args, take=self._cut), cut(kwargs, take=self._cut)
            copies = [(each, [*tree.children(each)]) for each in tree.containers(own)]
            returned = forward(*own[0], **own[1])
            for copy, before in copies:
                if not tree.same_entries([*chain(*before)], [*chain(*tree.children(copy))]):
                    raise StepError(
                        f"{class_name(block)} writes into a {type(copy).__name__} that it is given, and with"
                        " context_parallel_size that is a copy with this rank's part of each sequence: return what it"
                        f" computes.{_ONE}"
                    )
            outputs_of(returned, length // self._part.ranks)
            return tree.map_leaves(
                lambda leaf: join(1, self._part, leaf)[0] if isinstance(leaf, Tensor) else leaf, returned
            )

        block.__dict__["forward"] = dealt

    def _checked_length(self, hidden: Tensor) -> int:
        length, chunks = hidden.size(1), 2 * self._part.ranks
        if length % chunks or not length:
            raise StepError(
                f"Sequences of {length} positions can't be dealt to context_parallel_size={self._part.ranks} ranks, of"
                f" which each gets two chunks of one size: pad batches to a multiple of {chunks} positions.{_ONE}"
            )
        return length

    def _cut(self, whole: Tensor, dim: int | None) -> Tensor:
        if not whole.requires_grad or not torch.is_grad_enabled():
            return whole if dim is None else self._part.cut(whole, dim)
        given: Tensor = share(whole, self._part) if dim is None else Cut.apply(whole, dim, self._part)
        return given

    def _check(
        self, block: nn.Module, plain: Callable[..., Any], given: Arguments, cut: Callable[..., Any], length: int
    ) -> None:
        count = min(length // self._part.ranks, POSITIONS) // 2 * 2

        def of(begin: int, end: int) -> Arguments:
            def few(whole: Tensor, dim: int | None) -> Tensor:
                own = whole if dim is None else self._part.cut(whole.detach(), dim).narrow(dim, begin, end - begin)
                return own.detach().float() if own.is_floating_point() else own.detach()

            return cut(given[0], take=few), cut(given[1], take=few)

        check_positions(block, plain, of, count, self._trial_runs)

    def _without_caches(self, block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments:
        """Replace transformers' caches of keys and values by ``None``: each rank would append those of its own part.

        Raises:
            StepError: A cache isn't empty, or an earlier call of the block had it too, and would have filled it.
        """

        def left_out(value: Any) -> Any:
            if not is_cache(value):
                return value
            if is_filled(value, block) or block in self._caches.setdefault(value, set()):
                raise StepError(
                    f"{class_name(block)} is called with keys and values of an earlier call, as by generate(), and"
                    f" context_parallel_size keeps none.{_ONE}"
                )
            self._caches[value].add(block)
            return None

        named = {name: left_out(value) for name, value in kwargs.items()}
        if named.get("use_cache"):
            named["use_cache"] = False
        return tuple(map(left_out, args)), named


def _hidden_states(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The first tensor argument of a block: hidden states ``[batch, sequence, features]``."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    if first is None or first.ndim != 3 or not first.is_floating_point():
        what = "no tensor" if first is None else f"{first.dtype} of shape {tuple(first.shape)}"
        raise StepError(
            f"{class_name(block)} is given {what} first: with context_parallel_size blocks are given hidden states"
            f" [batch, sequence, features].{_ONE}"
        )
    return first


def _each_tensor(block: nn.Module, hidden: Tensor, given: Any, take: Callable[[Tensor, int | None], Tensor]) -> Any:
    """A block's arguments with each tensor replaced by ``take(tensor, dim)``, where ``dim`` is that of the sequence."""
    if isinstance(given, Tensor):
        return take(given, 1 if given is hidden else sequence_dim(given, hidden.size(1)))
    if isinstance(given, (tuple, list)):
        return tree.rebuild(given, [_each_tensor(block, hidden, value, take) for value in given])
    if type(given) is dict:
        return {name: _each_tensor(block, hidden, value, take) for name, value in given.items()}
    if not isinstance(given, PLAIN):
        raise StepError(
            f"{class_name(block)} is given a {type(given).__name__}, of which it isn't known what it holds of a"
            f" sequence: give it tensors, or tuples and dicts of them.{_ONE}"
        )
    return given


def sequence_dim(tensor: Tensor, length: int) -> int | None:
    """The dim along which an argument other than the hidden states is cut; ``None`` if it stays whole, such as masks.

    A wrong guess fails with sizes that don't fit, since no rank's part is as long as the whole sequence.

    Raises:
        StepError: Shape and dtype leave several answers.
    """
    dims = [dim for dim, size in enumerate(tensor.shape) if size == length]
    is_index = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not dims or (tensor.ndim == 3 and dims in ([2], [1, 2])):  # masks
        return None
    if tensor.ndim == 1 or (tensor.ndim == 2 and dims == [0]):  # [sequence, …]
        return 0
    if tensor.ndim == 2 and (dims == [1] or not is_index):  # indices [batch, sequence]; else masks
        return 1 if is_index else None
    if tensor.ndim == 3 and dims == [1]:
        return 1
    if tensor.ndim == 4 and 3 in dims and tensor.size(2) in (1, length):  # masks
        return None
    if tensor.ndim == 4 and len(dims) == 1 and dims[0]:
        return dims[0]
    raise StepError(
        f"A block is given a tensor of shape {tuple(tensor.shape)} beside sequences of {length} positions, and which of"
        " its dims is of these isn't known: with context_parallel_size give it [sequence, …], [batch, sequence, …], or"
        f" masks [batch, heads, sequence, sequence].{_ONE}"
    )


def _kind_of(given: Any) -> Any:
    """A key of arguments: the properties that a block's code may branch on."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.ndim, leaf.dtype
        return leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)

    return frozenset((path, of_leaf(leaf)) for path, leaf in tree.walk(given))


def _refuse_hooks(block: nn.Module, inner: Sequence[nn.Module]) -> None:
    for module in inner:
        if has_forward_hooks_beside(module, _LIBRARIES):
            raise StepError(
                f"A {class_name(module)} within {class_name(block)} has a forward hook, which with"
                " context_parallel_size would see this rank's part of sequences: put it on the block, which sees"
                " whole ones. (transformers puts some there for output_hidden_states, output_attentions and"
                f" output_router_logits.){_ONE}"
            )
