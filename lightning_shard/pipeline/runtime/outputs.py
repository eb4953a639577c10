"""Merges what a step returned for each microbatch into what it would have returned for the batch.

The merge is the inverse of the split into microbatches:

- Tensors and arrays are concatenated along their first dimension, in order, if they have a row per sample, are a flat
  view of one that has, differ in length, such as detections, or were seen to be longer for more samples.
- Floats, and floating-point tensors without dimensions, are means over the batch: they are averaged.
- Lists are concatenated if they have an entry per sample, or differ in length. A list of different results, such as
  ``[logits, {"features": …}]``, or one that was seen to be as long for more samples, is merged entry by entry, as
  tuples, dicts and dataclasses always are.
- Integers that are the number of a microbatch's samples, and were seen to be that of twice as many, are added up.
- Values that are equal for all microbatches, and that can't be counts, are kept.

Anything else is ambiguous, such as a vector with an element per class: it is refused by its key. So is one with as many
classes as a microbatch has samples, if it was as long for twice as many samples (:class:`Lengths`). So are indices of
samples within the microbatch, where they can be recognised: the keys of a dict, and rows such as ``torch.nonzero``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError

_KEPT = (str, bytes, bool, np.bool_, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class Lengths:
    """What is known of the lengths of what a step returns, by a run on two microbatches as one.

    Attributes:
        fixed: The paths of values that have no entry for each sample, though they may have as many.
        growing: The paths of values whose entries are those of the microbatches, one after the other.
    """

    fixed: set[tree.Path] = field(default_factory=set)
    growing: set[tree.Path] = field(default_factory=set)


UNKNOWN = Lengths()


def merge(parts: Sequence[Any], size: int, known: Lengths = UNKNOWN) -> Any:
    """Merge the results of the microbatches into one.

    Args:
        parts: The step's return value for each microbatch, in order.
        size: The number of samples in a microbatch.
        known: What is known of the lengths of values.

    Raises:
        StepError: A value can't be merged; names its key.
    """
    return parts[0] if len(parts) == 1 else _merge(parts, size, known, ())


def lengths(result: Any, size: int, path: tree.Path = ()) -> dict[tree.Path, int]:
    """How long the tensors, arrays and lists are that a step returned, by their paths; and integers that are ``size``.

    Args:
        size: The number of samples of which the step returned it.
    """
    if _integer(result) == size:
        return {path: size}
    found = {}
    if _is_array(result):
        return {path: len(result)} if result.ndim else {}
    if isinstance(result, (list, tuple)):
        found[path] = len(result)
    for key, child in tree.children(result):
        found.update(lengths(child, size, (*path, str(key))))
    return found


def _merge(parts: Sequence[Any], size: int, known: Lengths, path: tree.Path) -> Any:
    first = parts[0]
    if path in known.growing and all(_integer(part) == size for part in parts):
        return first * len(parts)
    is_fixed = path in known.fixed and lengths(first, size).get(()) == size
    if is_fixed and (_is_array(first) or (isinstance(first, list) and _holds_plain_values(first))):
        _refuse(
            path,
            f"it has {size} entries for each, as many as samples, and as many for twice as many samples",
            "return one entry for each sample, or means without dimensions",
        )
    if any(type(part) is not type(first) for part in parts):
        _refuse(path, "it is of another type for each", "return the same type for every batch")
    if _is_array(first):
        return _merge_arrays(parts, size, path, grows=path in known.growing)
    may_have_entries = isinstance(first, list) and not _is_of_results(parts, is_as_long=path in known.fixed)
    if may_have_entries and (path in known.growing or _has_entries(parts, size, path)):
        return type(first)(chain.from_iterable(parts))
    if type(first) is tuple and not is_fixed and all(len(part) == size and _holds_texts(part) for part in parts):
        return tuple(chain.from_iterable(parts))  # one text per sample: the split treats it as a column too
    if tree.is_node(first):
        keys = [[key for key, _ in tree.children(part)] for part in parts]
        if any(own != keys[0] for own in keys):
            _refuse(path, "it has other keys, or another length, for each", "return the same for every batch")
        if isinstance(first, Mapping) and _has_keys_by_place(first, size):
            _refuse(
                path,
                f"its keys, 0 to {size - 1}, may be the places of the {size} samples in a microbatch",
                "return a list with an entry for each sample, or texts as keys",
            )
        columns = zip(*([child for _, child in tree.children(part)] for part in parts))
        return tree.rebuild(first, [_merge(c, size, known, (*path, str(k))) for k, c in zip(keys[0], columns)])
    if isinstance(first, (float, np.floating)):
        return type(first)(sum(parts) / len(parts))
    if isinstance(first, _KEPT) or not isinstance(first, (Number, torch.Size)):
        if all(part is first or _equal(part, first) for part in parts):
            return first
        _refuse(path, f"it is a {type(first).__name__} that differs", "return tensors, or lists with an entry each")
    _refuse(
        path,
        f"it is {first!r}, of which isn't known whether it counts samples",
        "return a float for a mean, or a tensor or list with an entry for each sample",
    )


def _merge_arrays(parts: Sequence[Any], size: int, path: tree.Path, *, grows: bool) -> Any:
    first = parts[0]
    is_tensor = isinstance(first, Tensor)
    if any(part.ndim != first.ndim or part.shape[1:] != first.shape[1:] for part in parts):
        _refuse(
            path,
            f"it has shapes {[tuple(part.shape) for part in parts]}",
            "pad all to one length, or return a list with an entry for each sample",
        )
    if first.ndim:
        may_be_fixed = len(first) not in (0, size) and len({len(part) for part in parts}) == 1
        if may_be_fixed and not grows and not _is_flat_view(first, size):
            _refuse(
                path,
                f"it has shape {tuple(first.shape)} for each, of {size} samples",
                "return a row for each sample ([samples, …], not flattened), or means without dimensions",
            )
        if first.ndim == 2 and _begin_with_places(parts, size):
            _refuse(
                path,
                f"its rows begin with the places of samples, 0 to {size - 1}, in a microbatch, as torch.nonzero's",
                "return the tensor that they index, or a list with an entry for each sample",
            )
        return torch.cat(list(parts)) if is_tensor else np.concatenate(parts)
    if is_tensor and first.is_floating_point():
        return torch.stack(list(parts)).mean(0)
    if not is_tensor and np.issubdtype(first.dtype, np.floating):
        return np.mean(parts, dtype=first.dtype)
    _refuse(
        path,
        f"it is {first}, of which isn't known whether it counts samples",
        "return a floating-point tensor for a mean, or one with an entry for each sample",
    )


def _is_flat_view(value: Any, size: int) -> bool:
    """Whether a vector is a view of a tensor or array that has a row per sample, as ``flatten()`` gives it."""
    base = value._base if isinstance(value, Tensor) else value.base
    return value.ndim == 1 and isinstance(base, (Tensor, np.ndarray)) and base.ndim > 1 and len(base) == size


def _has_keys_by_place(result: Mapping[Any, Any], size: int) -> bool:
    """Whether a dict's keys are 0 to ``size - 1``, in order, and its values aren't parts with a row per sample."""
    if [*result] != [*range(size)] or not all(type(key) is int for key in result):
        return False
    return not all(_is_array(v) and v.ndim and len(v) == size for v in result.values())


_ROWS = 4
"""Fewer rows of integers may begin with small numbers, in order, by chance."""


def _begin_with_places(parts: Sequence[Any], size: int) -> bool:
    """Whether all parts' rows are integers, in order, that begin with the place of a sample in the microbatch."""
    arrays = [
        part.detach().cpu().numpy() if isinstance(part, Tensor) and not _is_real(part) else part for part in parts
    ]
    if not all(isinstance(a, np.ndarray) and np.issubdtype(a.dtype, np.integer) and a.shape[1] for a in arrays):
        return False
    if all(len(a) == size for a in arrays):
        return size > 1 and all((a[:, 0] == np.arange(size)).all() for a in arrays)
    if sum(map(len, arrays)) < _ROWS or not any(map(len, arrays[1:])):
        return False
    rows = [[tuple(row) for row in a.tolist()] for a in arrays]
    return all(own == sorted(set(own)) and all(0 <= row[0] < size for row in own) for own in rows)


def _integer(value: Any) -> int | None:
    """The value of an integer, or of a tensor or array of one without dimensions; ``None`` for others."""
    if isinstance(value, Tensor):
        is_integer = not value.ndim and not _is_real(value) and value.dtype is not torch.bool
    else:
        is_integer = isinstance(value, (int, np.integer)) or (isinstance(value, np.ndarray) and not value.ndim)
        is_integer = is_integer and np.issubdtype(type(value) if isinstance(value, int) else value.dtype, np.integer)
    return int(value) if is_integer else None


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _has_entries(parts: Sequence[list[Any]], size: int, path: tree.Path) -> bool:
    """Whether lists hold entries to be concatenated, rather than a different result at each index.

    A list of different results has the same length for all microbatches and holds only tensors, each with a row per
    sample or without dimensions.
    """
    sizes = {len(part) for part in parts}
    tensors = [entry for part in parts for entry in part]
    if len(sizes) > 1 or not tensors:
        return True
    if not all(map(_is_array, tensors)):
        constant = _holds_plain_values(parts[0]) and sizes != {size}
        if constant and (not isinstance(parts[0][0], str) or all(_equal(part, parts[0]) for part in parts)):
            _refuse(
                path,
                f"it is a list of {len(parts[0])} for each, of {size} samples",
                "return a list with an entry for each sample, or means without dimensions",
            )
        return True
    whole = all(not entry.ndim or len(entry) == size for entry in tensors)
    if whole and sizes == {size}:
        _refuse(
            path,
            f"it is a list of {size} tensors, which may be one for each sample or parts of the result",
            "return a tuple or a dict of parts, or one tensor with an entry for each sample",
        )
    return not whole


def _is_of_results(parts: Sequence[list[Any]], *, is_as_long: bool) -> bool:
    """Whether lists are known to hold a different result at each index.

    Args:
        is_as_long: Whether they were seen to be as long for more samples.
    """
    if len({len(part) for part in parts}) > 1 or _holds_plain_values(parts[0]):
        return False
    kinds = [[_kind(entry) for entry in part] for part in parts]
    return is_as_long or (len({*kinds[0]} - {None}) > 1 and all(own == kinds[0] for own in kinds))


def _kind(entry: Any) -> str | None:
    """What a list's entries for samples have in common; ``None`` may be there in place of one."""
    if entry is None:
        return None
    if _is_array(entry) or isinstance(entry, Number):
        return "number"
    return "nesting" if tree.is_node(entry) else type(entry).__name__


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _holds_plain_values(part: list[Any]) -> bool:
    return all(isinstance(entry, (Number, np.generic, str)) for entry in part)


def _holds_texts(part: tuple[Any, ...]) -> bool:
    return all(isinstance(entry, str) for entry in part)


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return False


def _refuse(path: tree.Path, what: str, remedy: str) -> NoReturn:
    where = f"[{']['.join(map(repr, path))}]" if path else ""
    raise StepError(
        f"What the step returned{where} can't be put together from several microbatches: {what}. Instead,"
        f" {remedy}; or use microbatches=1 or pipeline_parallel_size=1.",
        breaks=5,
    )


def with_losses(results: Sequence[Any], losses: Sequence[Tensor]) -> list[Any]:
    """The results of training steps, with their losses replaced."""
    return [{**r, "loss": loss} if isinstance(r, Mapping) else loss for r, loss in zip(results, losses)]
