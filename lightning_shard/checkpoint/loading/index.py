"""Plans an index expression on a stored tensor: the boxes to read, and how to pick the result from them.

The result equals torch's for the same index into the tensor itself. Slices may have negative steps, as in numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box

Run = tuple[int, int]
_ALIKE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes per element: a dtype that torch can index. It can't index some dtypes, such as 8-bit floats."""


@dataclass(frozen=True)
class Selection:
    """The boxes to read, and how to pick the result from them.

    Attributes:
        sizes: The shape of the tensor to read into.
        dim: The dim of that tensor along which the boxes are concatenated.
        boxes: The boxes of the stored tensor, in the order of concatenation.
        rows: (dim, rows): an ``index_select`` for each, before ``index`` is applied.
        index: The index of the result in the tensor after that.
    """

    sizes: tuple[int, ...]
    dim: int
    boxes: tuple[Box, ...]
    rows: tuple[tuple[int, Tensor], ...]
    index: tuple[Any, ...]

    def parts(self, target: Tensor) -> list[Tensor]:
        """Views of a tensor of shape ``sizes``, one for each box."""
        if target.ndim == 0 or not self.boxes:
            return [target] * len(self.boxes)
        return list(target.split([box.sizes[self.dim] for box in self.boxes], self.dim))

    def pick(self, read: Tensor) -> Tensor:
        """The result, from the tensor of shape ``sizes`` that was read."""
        plain = read.view(_ALIKE[read.element_size()])
        for dim, rows in self.rows:
            plain = plain.index_select(dim, rows)
        return plain[self.index].view(read.dtype)


@dataclass(frozen=True)
class _Axis:
    """The wanted positions of one dim.

    Attributes:
        run: [first, last + 1) of the positions.
        places: The distinct positions in ascending order; None if they are the whole run.
        item: The index item to apply to the run: 0 for an integer, ``slice(None)`` for a whole run, or positions.
    """

    run: Run
    places: Tensor | None
    item: Any


def select(index: Any, shape: tuple[int, ...], name: str, *, item_bytes: int, max_gap_bytes: int) -> Selection:
    """Plan an index expression.

    Only one dim is cut into several boxes: the one where that saves most. Of the other dims, everything between the
    first and the last wanted position is read.

    Args:
        index: As for ``tensor[index]``.
        shape: The stored tensor's shape.
        name: For errors.
        item_bytes: Bytes per element.
        max_gap_bytes: Boxes that are closer to each other than this, in the whole row-major tensor, are merged.

    Raises:
        IndexError: The index doesn't fit the shape, or isn't of a kind that numpy and torch agree on.
    """
    items = _expanded(index, shape, name)
    wanted = [item for item in items if item is not None]
    axes = [_axis(item, size, name) for item, size in zip(wanted, shape, strict=True)]
    runs: list[list[Run]] = [[axis.run] for axis in axes]
    cuts = {}
    for dim, axis in enumerate(axes):
        if axis.places is not None and len(axis.places):
            step_bytes = math.prod(shape[dim + 1 :]) * item_bytes
            cuts[dim] = _runs(axis.places, max_gap_bytes // max(1, step_bytes))
    cut = min(cuts, key=lambda dim: _length(cuts[dim]) / _length(runs[dim]), default=0)
    if cut in cuts:
        runs[cut] = cuts[cut]
    others = [own[0] for own in runs]
    spans = [[*others[:cut], run, *others[cut + 1 :]] for run in runs[cut]] if axes else [[]]
    boxes = [Box(tuple(begin for begin, _ in span), tuple(end - begin for begin, end in span)) for span in spans]
    rows: list[tuple[int, Tensor]] = []
    final: list[Any] = []
    numbered = iter(enumerate(axes))
    for item in items:
        if item is None:
            final.append(None)
            continue
        dim, axis = next(numbered)
        chosen = axis.item
        if isinstance(chosen, Tensor):
            chosen = _within(chosen, runs[dim])
            if isinstance(item, slice):
                rows.append((dim, chosen))
                chosen = slice(None)
        final.append(chosen)
    sizes = tuple(_length(own) for own in runs)
    return Selection(sizes, cut, tuple(box for box in boxes if box.numel), tuple(rows), tuple(final))


def _length(runs: Sequence[Run]) -> int:
    return sum(end - begin for begin, end in runs)


def _runs(places: Tensor, max_gap: int) -> list[Run]:
    """Group ascending positions into runs that span gaps of up to ``max_gap`` positions."""
    breaks = (places.diff() > max_gap + 1).nonzero().flatten() + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in places.tensor_split(breaks)]


def _within(places: Tensor, runs: Sequence[Run]) -> Tensor:
    """Translate positions in a dim to positions in the concatenation of its runs."""
    if not len(runs) or not places.numel():
        return places
    begins = torch.tensor([begin for begin, _ in runs])
    lengths = torch.tensor([end - begin for begin, end in runs])
    moved = lengths.cumsum(0) - lengths - begins
    return places + moved[torch.searchsorted(begins, places, right=True) - 1]


def _expanded(index: Any, shape: tuple[int, ...], name: str) -> list[Any]:
    """Normalize an index: one item for each dim, None for each new dim, masks converted to positions."""
    if isinstance(index, list) and any(isinstance(item, _NO_PLACES_OF_A_LIST) for item in index):
        raise IndexError(
            f"{name!r} can't be indexed with {index!r}: numpy treats such a list as an array, torch as a tuple. To"
            " select positions pass torch.tensor(list); to index several dims pass a tuple."
        )
    items: list[Any] = []
    for item in index if isinstance(index, tuple) else (index,):
        if item is None or item is Ellipsis or isinstance(item, slice):
            items.append(item)
        elif _is_place(item):
            items.append(int(item.__index__()))
        else:
            items.append(_places(item, index, name))
    given = sum(_dims(item) for item in items)
    ellipses = [at for at, item in enumerate(items) if item is Ellipsis]
    if given > len(shape) or len(ellipses) > 1:
        raise IndexError(f"{name!r} of shape {shape} can't be indexed with {index!r}: too many indices.")
    at = ellipses[0] if ellipses else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - given)
    expanded: list[Any] = []
    dim = 0
    for item in items:
        if isinstance(item, Tensor) and item.dtype == torch.bool:
            sizes = shape[dim : dim + item.ndim]
            if tuple(item.shape) != sizes:
                raise IndexError(f"{name!r}: a mask of shape {tuple(item.shape)} doesn't fit dims of sizes {sizes}.")
            expanded.extend(item.nonzero(as_tuple=True))
        else:
            expanded.append(item)
        dim += _dims(item)
    return expanded


def _dims(item: Any) -> int:
    """How many dims of the tensor an index item consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _is_place(item: Any) -> bool:
    if isinstance(item, (bool, np.bool_)) or not hasattr(item, "__index__"):
        return False
    return not isinstance(item, (Tensor, np.ndarray)) or (item.ndim == 0 and item.dtype not in _MASKS)


_NO_PLACES_OF_A_LIST = (list, tuple, range, np.ndarray, Tensor, slice, type(None), type(...))
_MASKS: tuple[Any, ...] = (torch.bool, np.dtype(bool), torch.uint8, np.dtype(np.uint8))


def _places(item: Any, index: Any, name: str) -> Tensor:
    """A list, array or tensor item as a bool mask, or as int64 positions."""
    try:
        tensor = item.detach().cpu() if isinstance(item, Tensor) else torch.from_numpy(np.array(item))
    except (TypeError, ValueError) as error:
        raise IndexError(f"{name!r} can't be indexed with {index!r}: {error}.") from error
    if isinstance(item, (list, tuple, range)) and not tensor.numel():
        tensor = tensor.to(torch.int64)  # numpy makes an empty list float64
    if tensor.dtype == torch.bool and tensor.ndim:
        return tensor
    if tensor.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return tensor.to(torch.int64)
    what = f"{'a single ' if not tensor.ndim else ''}{str(tensor.dtype).removeprefix('torch.')}"
    hint = {torch.bool: "a new dim is None", torch.uint8: "torch takes it for a mask: convert to bool or int64"}
    raise IndexError(
        f"{name!r} can't be indexed with {what} ({hint.get(tensor.dtype, 'places are integers')}): use integers,"
        " slices, None, ..., lists and tensors of integers, or masks of bools."
    )


def _axis(item: Any, size: int, name: str) -> _Axis:
    if isinstance(item, slice):
        places = range(*item.indices(size))
        if not places:
            return _Axis((0, 0), None, slice(None))
        if places.step == 1:
            return _Axis((places.start, places.stop), None, slice(None))
        chosen = torch.arange(places.start, places.stop, places.step)
        return _Axis((min(places), max(places) + 1), chosen.sort().values, chosen)
    lowest, highest = (item, item) if isinstance(item, int) else _extremes(item)
    if lowest < -size or highest >= size:
        outside = lowest if lowest < -size else highest
        raise IndexError(f"index {outside} is out of bounds for a dim of size {size} of {name!r}.")
    if isinstance(item, int):
        place = item % size
        return _Axis((place, place + 1), None, 0)
    chosen = torch.where(item < 0, item + size, item)
    if not chosen.numel():
        return _Axis((0, 0), None, chosen)
    low, high = _extremes(chosen)
    return _Axis((low, high + 1), chosen.unique(), chosen)


def _extremes(places: Tensor) -> tuple[int, int]:
    return (int(places.min()), int(places.max())) if places.numel() else (0, -1)
