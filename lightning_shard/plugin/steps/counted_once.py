"""Leaves out of a total norm what is of a weight that another stage holds too, and counts.

Gradients and weights themselves are known by identity; copies of them all (in 32 bits, divided by a loss scale), which
hooks pass, by their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.parallel.clip import is_counted_elsewhere


def counted_once(given: Sequence[Tensor], named: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that count on this stage.

    Args:
        named: This stage's parameters, by name.

    Raises:
        StepError: One is no gradient, and has the shape of a gradient that another stage counts, or of none.
    """
    elsewhere = {name: p for name, p in named.items() if is_counted_elsewhere(p)}
    sought = {name: p for name, p in elsewhere.items() if not any(t is own for t in given for own in _of(p))}
    counted = _without(given, [tensor for p in elsewhere.values() for tensor in _of(p)])
    copies = _without(counted, [tensor for p in named.values() for tensor in _of(p)])
    if not sought or not copies:
        return counted
    in_order = _in_order(given, list(named.values()))
    if in_order is not None:
        return [tensor for tensor, p in zip(given, in_order) if not is_counted_elsewhere(p)]
    others = {p.shape for name, p in named.items() if name not in elsewhere} - {p.shape for p in sought.values()}
    for tensor in copies:
        if tensor.shape not in others:
            raise StepError(
                f"A total norm is given a tensor of shape {tuple(tensor.shape)} that is no parameter's gradient. It may"
                f" be computed from that of {next(iter(sought))}, which another stage holds too, and counts: pass the"
                " gradients themselves, get_total_norm([p.grad for p in …]), and scale the norm, or copies of all of"
                " them in their order.",
                breaks=10,
            )
    return counted


def _of(parameter: Tensor) -> list[Tensor]:
    return [parameter] if parameter.grad is None else [parameter, parameter.grad]


def _without(tensors: Iterable[Tensor], left_out: Iterable[Tensor]) -> list[Tensor]:
    gone = {id(tensor) for tensor in left_out}
    return [tensor for tensor in tensors if id(tensor) not in gone]


def _in_order(given: Sequence[Tensor], parameters: Sequence[Tensor]) -> list[Tensor] | None:
    """The parameter that each tensor is of, if these are as many, of the same shapes or each a number."""
    with_gradients = [p for p in parameters if p.grad is not None]
    for alike in (with_gradients, [p for p in parameters if p.requires_grad], list(parameters)):
        shapes = [tensor.shape for tensor in given]
        if len(alike) == len(given) and (shapes == [p.shape for p in alike] or not any(shapes)):
            return alike
    return None
