"""Detects equal blocks, and replaces further runs of them by stand-ins with outputs of the right shapes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import tree

_NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "index", "idx")
"""Attributes that number layers: blocks that differ only in these count as equal."""


@dataclass
class _Like:
    places: list[int] = field(default_factory=list)
    made: Any = None


class Likes:
    """Tracks which blocks are equal, and what they return.

    Attributes:
        stands_for: The place of a block that wasn't run, to that of the equal block that was run for it.
    """

    def __init__(self) -> None:
        self.stands_for: dict[int, int] = {}
        self._seen: dict[Hashable, _Like] = {}
        self._kinds: dict[int, Hashable] = {}

    def pairs(self) -> list[tuple[int, int]]:
        return [(like.places[0], like.places[1]) for like in self._seen.values() if len(like.places) > 2]

    def of(self, block: nn.Module, forward: Callable[..., Any], place: Callable[[], Any]) -> Callable[..., Any]:
        kind = _kind(block)

        def likely(*args: Any, **kwargs: Any) -> Any:
            key = (kind, _signature((args, kwargs)))
            like = self._seen.setdefault(key, _Like())
            here = place()
            if like.made is not None and len(like.places) >= 2 and isinstance(here, int):
                like.places.append(here)
                self.stands_for[here] = like.places[1]
                return _stand_in(like.made, (args, kwargs))
            output = forward(*args, **kwargs)
            if isinstance(here, int):
                like.places.append(here)
                like.made = _recipe(output, (args, kwargs))
            return output

        return likely


def _kind(block: nn.Module) -> Hashable:
    """A key of everything that determines a block's cost, except its inputs."""
    found: list[Hashable] = []
    for name, part in block.named_modules():
        plain = (int, float, str, bool, type(None), torch.dtype)
        settings = tuple(
            sorted((key, repr(v)) for key, v in vars(part).items() if type(v) in plain and key not in _NUMBERS)
        )
        held = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad)
            for key, t in [*part._parameters.items(), *part._buffers.items()]
            if t is not None
        )
        found.append((name, type(part), settings, held))
    return tuple(found)


def _signature(values: Any) -> Hashable:
    def of(leaf: Any) -> Hashable:
        if isinstance(leaf, Tensor):
            return tuple(leaf.shape), leaf.dtype, leaf.requires_grad, leaf.stride()
        return repr(leaf) if isinstance(leaf, (int, float, str, bool, type(None))) else type(leaf).__qualname__

    return tuple((path, of(leaf)) for path, leaf in tree.walk(values))


def _recipe(output: Any, given: Any) -> Any:
    """How to make an output of the same form; ``None`` if that isn't possible."""
    inputs = {id(leaf): place for place, leaf in enumerate(tree.tensors(given))}

    def of(leaf: Any) -> _Leaf:
        if id(leaf) in inputs:
            return _Leaf(given=inputs[id(leaf)])
        if isinstance(leaf, DTensor):
            raise TypeError
        if isinstance(leaf, Tensor):
            return _Leaf(made=(leaf.shape, leaf.stride(), leaf.dtype, leaf.requires_grad))
        return _Leaf(value=leaf)

    try:
        return (tree.map_leaves(of, output),)
    except TypeError:
        return None


_Made = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]
"""A new tensor: its shape, strides, dtype, and whether it requires a gradient."""


@dataclass(frozen=True)
class _Leaf(tree.Leaf):
    """A new tensor, the index of an input that is returned, or another value."""

    made: _Made | None = None
    given: int | None = None
    value: Any = None


def _stand_in(recipe: tuple[Any], given: Any) -> Any:
    inputs = tree.tensors(given)
    made = [leaf.made for _, leaf in tree.walk(recipe[0]) if leaf.made is not None]
    floating = [t for t in inputs if t.is_floating_point()]
    outputs = iter(_StandIn.apply(made, *floating) if made else ())

    def of(leaf: _Leaf) -> Any:
        if leaf.made is not None:
            return next(outputs)
        return leaf.value if leaf.given is None else inputs[leaf.given]

    return tree.map_leaves(of, recipe[0])


class _StandIn(torch.autograd.Function):
    """Saves its inputs, as a block does, and returns tensors without values."""

    @staticmethod
    def forward(ctx: Any, made: Sequence[_Made], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*inputs)
        outputs = [torch.empty_strided(shape, stride, dtype=dtype, device="cpu") for shape, stride, dtype, _ in made]
        ctx.mark_non_differentiable(*(output for output, (*_, trains) in zip(outputs, made) if not trains))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        needed = zip(ctx.saved_tensors, ctx.needs_input_grad[1:])
        return None, *(torch.empty_like(t) if needs else None for t, needs in needed)
