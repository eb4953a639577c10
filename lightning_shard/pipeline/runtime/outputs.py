"""Merges what a step returned for each microbatch into what it would have returned for the batch.

The merge is the inverse of the split into microbatches:

- Tensors and arrays are concatenated along their first dimension, in order, if they have a row per sample, differ in
  length, such as detections, or were seen to be longer for more samples.
- Floats, and floating-point tensors without dimensions, are means over the batch: they are averaged.
- Lists are concatenated on the same conditions. Others, such as ``[logits, {"features": …}]``, are merged entry by
  entry, as tuples, dicts and dataclasses are.
- Integers that are the number of a microbatch's samples, and were seen to be that of twice as many, are added up.
- Values that are equal for all microbatches, and that can't be counts, are kept.

Anything else is ambiguous, such as a vector with an element per class: it is refused by its key. So is one with as many
classes as a microbatch has samples, if it was as long for twice as many samples (:class:`Lengths`), and a dict that was
seen to have more keys for more samples, such as their places in the microbatch.
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
    """How long the tensors, arrays, lists and dicts are that a step returned, by path; and integers that are ``size``.

    Args:
        size: The number of samples of which the step returned it.
    """
    if _integer(result) == size:
        return {path: size}
    found = {}
    if _is_array(result):
        return {path: len(result)} if result.ndim else {}
    if isinstance(result, (list, tuple, Mapping)):
        found[path] = len(result)
    for key, child in tree.children(result):
        found.update(lengths(child, size, (*path, str(key))))
    return found


def _merge(parts: Sequence[Any], size: int, known: Lengths, path: tree.Path) -> Any:
    first = parts[0]
    if path in known.growing and all(_integer(part) == size for part in parts):
        return first * len(parts)
    if any(type(part) is not type(first) for part in parts):
        _refuse(path, "it is of another type for each", "return the same type for every batch")
    if _is_array(first):
        return _merge_arrays(parts, size, known, path)
    if isinstance(first, list):
        if _have_entries(parts, size, known, path):
            _check_no_parts(parts, size, known, path)
            return type(first)(chain.from_iterable(parts))
        if _holds_plain_values(first):
            _refuse(
                path,
                f"it is a list of {len(first)} {_of_samples(size, known, path)}",
                "return a list with an entry for each sample, or means without dimensions",
            )
    if type(first) is tuple and (path in known.growing or _are_columns(parts, size, known, path)):
        return tuple(chain.from_iterable(parts))
    if tree.is_node(first):
        if path in known.growing:
            _refuse(path, "it has more keys for more samples", "return a list with an entry for each sample")
        keys = [[key for key, _ in tree.children(part)] for part in parts]
        if any(own != keys[0] for own in keys):
            _refuse(path, "it has other keys, or another length, for each", "return the same for every batch")
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


def _merge_arrays(parts: Sequence[Any], size: int, known: Lengths, path: tree.Path) -> Any:
    first = parts[0]
    is_tensor = isinstance(first, Tensor)
    if any(part.ndim != first.ndim or part.shape[1:] != first.shape[1:] for part in parts):
        _refuse(
            path,
            f"it has shapes {[tuple(part.shape) for part in parts]}",
            "pad all to one length, or return a list with an entry for each sample",
        )
    if first.ndim:
        if not _have_entries(parts, size, known, path):
            _refuse(
                path,
                f"it has shape {tuple(first.shape)} {_of_samples(size, known, path)}",
                "return a row for each sample ([samples, …], not flattened), or means without dimensions",
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


def _have_entries(parts: Sequence[Any], size: int, known: Lengths, path: tree.Path) -> bool:
    """Whether tensors, arrays or lists have an entry for each sample, or a number of entries that varies."""
    found = {len(part) for part in parts}
    return path in known.growing or len(found) > 1 or found == {0} or (found == {size} and path not in known.fixed)


def _of_samples(size: int, known: Lengths, path: tree.Path) -> str:
    return f"for each, of {size} samples" + ", and as long for twice as many" * (path in known.fixed)


def _are_columns(parts: Sequence[tuple[Any, ...]], size: int, known: Lengths, path: tree.Path) -> bool:
    """Whether tuples have a text for each sample: the split into microbatches treats such a tuple as a column too."""
    are_texts = all(isinstance(entry, str) for part in parts for entry in part)
    return are_texts and all(len(part) == size for part in parts) and path not in known.fixed


def _check_no_parts(parts: Sequence[list[Any]], size: int, known: Lengths, path: tree.Path) -> None:
    """Check that lists, which have as many entries as samples, don't hold a different part of the result at each index.

    Where it wasn't seen that they grow, entries of several kinds may be such parts, and so may tensors that have a row
    for each sample, or no dimensions.
    """
    if path in known.growing or any(len(part) != size for part in parts):
        return
    entries = [*chain.from_iterable(parts)]
    kinds = {Number if isinstance(entry, Number) else type(entry) for entry in entries}
    if len(kinds) > 1 or all(_is_array(entry) and (not entry.ndim or len(entry) == size) for entry in entries):
        _refuse(
            path,
            f"it is a list of {size}, which may be one for each sample or parts of the result",
            "return a tuple or a dict of parts, or one tensor with an entry for each sample",
        )


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


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _holds_plain_values(part: list[Any]) -> bool:
    return all(isinstance(entry, (Number, np.generic, str)) for entry in part)


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
