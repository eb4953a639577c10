"""Plans an index expression on a stored tensor: the boxes to read, and how to pick the result from them.

The result equals torch's for the same index into the tensor itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_shard.checkpoint.boxes import Box

Run = tuple[int, int]
Positions = range | Tensor
"""The wanted positions of one dim."""
_ALIKE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes per element: a dtype that torch can index. It can't index some dtypes, such as 8-bit floats."""
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class Selection:
    """The boxes to read, and how to pick the result from them.

    Attributes:
        sizes: The shape of the tensor to read into.
        dim: The dim of that tensor along which the boxes are concatenated.
        boxes: The boxes of the stored tensor, in the order of concatenation.
        index: The index of the result in the tensor that was read.
    """

    sizes: tuple[int, ...]
    dim: int
    boxes: tuple[Box, ...]
    index: tuple[Any, ...]

    def parts(self, target: Tensor) -> list[Tensor]:
        """Views of a tensor of shape ``sizes``, one for each box."""
        if target.ndim == 0 or not self.boxes:
            return [target] * len(self.boxes)
        return list(target.split([box.sizes[self.dim] for box in self.boxes], self.dim))

    def pick(self, read: Tensor) -> Tensor:
        """The result, from the tensor of shape ``sizes`` that was read."""
        return read.view(_ALIKE[read.element_size()])[self.index].view(read.dtype)


def select(index: Any, shape: tuple[int, ...], name: str, *, item_bytes: int, max_gap_bytes: int) -> Selection:
    """Plan an index expression.

    The first dim with gaps between the wanted positions is cut into several boxes. Of the other dims, everything
    between the first and the last wanted position is read.

    Args:
        max_gap_bytes: Boxes that are closer to each other than this, in the whole row-major tensor, are merged.

    Raises:
        IndexError: The index doesn't fit the shape, or isn't of a kind that numpy and torch agree on.
    """
    items = _expanded(index, shape, name)
    wanted = [item for item in items if item is not None]
    positions = [_positions(item, size, name) for item, size in zip(wanted, shape, strict=True)]
    cut = next((dim for dim, p in enumerate(positions) if isinstance(p, Tensor) or p.step > 1), 0)
    runs = []
    for dim, own in enumerate(positions):
        step_bytes = math.prod(shape[dim + 1 :]) * item_bytes
        runs.append(_runs(own, max_gap_bytes // max(1, step_bytes) if dim == cut else max(shape)))
    others = [own[0] for own in runs]
    spans = [[*others[:cut], run, *others[cut + 1 :]] for run in runs[cut]] if runs else [[]]
    boxes = [Box(tuple(begin for begin, _ in span), tuple(end - begin for begin, end in span)) for span in spans]
    numbered = iter(zip(wanted, positions, runs))
    final = [None if item is None else _picked(*next(numbered)) for item in items]
    sizes = tuple(sum(end - begin for begin, end in own) for own in runs)
    return Selection(sizes, cut, tuple(box for box in boxes if box.numel), tuple(final))


def _runs(positions: Positions, max_gap: int) -> list[Run]:
    """Group positions into runs that span gaps of up to ``max_gap`` positions; at least one run, maybe an empty one."""
    if not len(positions):
        return [(0, 0)]
    if isinstance(positions, range):
        if positions.step - 1 > max_gap:
            return [(position, position + 1) for position in positions]
        return [(positions[0], positions[-1] + 1)]
    places = positions.unique()
    if not len(places):
        return [(0, 0)]
    breaks = (places.diff() > max_gap + 1).nonzero().flatten() + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in places.tensor_split(breaks)]


def _picked(item: Any, positions: Positions, runs: Sequence[Run]) -> Any:
    """The index of a dim's positions in the concatenation of its runs."""
    if isinstance(item, int):
        return 0
    if isinstance(positions, range):  # equal gaps: all of them are in one run, or none is in any
        return slice(None, None, positions.step if len(runs) == 1 else 1)
    begins = torch.tensor([begin for begin, _ in runs])
    lengths = torch.tensor([end - begin for begin, end in runs])
    moved = lengths.cumsum(0) - lengths - begins
    return positions + moved[torch.searchsorted(begins, positions, right=True) - 1]


def _expanded(index: Any, shape: tuple[int, ...], name: str) -> list[Any]:
    """Normalize an index: one item for each dim, None for each new dim, masks converted to positions."""
    items = [_item(item, name) for item in (index if isinstance(index, tuple) else (index,))]
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
            if tuple(item.shape) != (sizes := shape[dim : dim + item.ndim]):
                raise IndexError(f"{name!r}: a mask of shape {tuple(item.shape)} doesn't fit dims of sizes {sizes}.")
            expanded.extend(item.nonzero(as_tuple=True))
        else:
            expanded.append(item)
        dim += _dims(item)
    return expanded


def _item(item: Any, name: str) -> Any:
    """None, Ellipsis, a slice, an int, a mask of bools with dims, or a tensor of int64."""
    if item is None or item is Ellipsis or isinstance(item, slice):
        return item
    if isinstance(item, list | range):
        # numpy takes a list of lists for an array, torch for a tuple
        if all(isinstance(each, int | np.integer | np.bool_) for each in item):
            return torch.tensor(item) if len(item) else torch.empty(0, dtype=torch.int64)
    elif isinstance(item, np.ndarray | Tensor):
        tensor = item.detach().cpu() if isinstance(item, Tensor) else torch.from_numpy(np.array(item))
        if tensor.dtype in _INTEGERS:
            return tensor.to(torch.int64) if tensor.ndim else int(tensor)
        if tensor.dtype == torch.bool and tensor.ndim:
            return tensor
    elif hasattr(item, "__index__") and not isinstance(item, bool | np.bool_):
        return operator.index(item)
    raise IndexError(
        f"{name!r} can't be indexed with {item!r:.80}: use integers, slices, None, ..., lists of integers or bools, or"
        " tensors of signed integers or bools."
    )


def _dims(item: Any) -> int:
    """How many dims of the tensor an index item consumes."""
    if item is None or item is Ellipsis:
        return 0
    return item.ndim if isinstance(item, Tensor) and item.dtype == torch.bool else 1


def _positions(item: Any, size: int, name: str) -> Positions:
    if isinstance(item, slice):
        places = range(*item.indices(size))
        if places.step < 0:
            raise IndexError(f"{name!r} can't be indexed with a step of {places.step}: flip what you read.")
        return places
    given = torch.tensor([item]) if isinstance(item, int) else item
    outside = given[(given < -size) | (given >= size)]
    if outside.numel():
        raise IndexError(f"index {int(outside[0])} is out of bounds for a dim of size {size} of {name!r}.")
    found = torch.where(given < 0, given + size, given)
    return range(int(found), int(found) + 1) if isinstance(item, int) else found
