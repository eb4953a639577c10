"""What torch's functions read of their arguments, by the functions' names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

AS_NUMBERS = {
    *("item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__contains__"),
    *("__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("storage", "__dlpack__", "__reduce_ex__"),
}
"""Functions that give Python a tensor's values."""
AS_TEXT = {"__repr__", "__format__"}
SHAPED_BY_VALUES = {
    *("nonzero", "masked_select", "unique", "unique_consecutive", "bincount", "argwhere"),
    *("histc", "nonzero_static", "_pack_padded_sequence", "_pad_packed_sequence"),
    *("zeros", "ones", "empty", "full", "rand", "randn", "randint", "randperm"),
}
"""Functions whose output size depends on values."""
SIZED_BY_NUMBERS = {
    *("narrow", "view", "reshape", "unflatten", "expand", "repeat", "tile", "split", "tensor_split", "chunk"),
    *("topk", "pad", "unfold", "diagonal", "diag_embed", "one_hot", "interpolate"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
}
"""Functions whose output size depends on arguments after the first, which may be tensors of one integer."""
TO_INTEGERS = {"long", "int", "short", "char", "byte", "to", "type", "type_as", "floor_divide", "round", "bucketize"}
"""Functions that may convert floating-point numbers to integers."""
WITHOUT_VALUES = {
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
    *("new_zeros", "new_ones", "new_empty", "new_empty_strided", "new_full", "new_tensor"),
}
LIKE_OTHERS = {"expand_as", "view_as", "reshape_as", "type_as", "to", "resize_as_"}
"""Functions that use only shape, dtype and device: ``WITHOUT_VALUES`` of the first argument, ``LIKE_OTHERS`` of all
but the first."""
TAKES_SOME = WITHOUT_VALUES | LIKE_OTHERS
ABOUT = {
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_same_size", "is_shared", "is_inference", "data_ptr"),
    *("__len__", "__hash__", "untyped_storage", "requires_grad_", "result_type", "can_cast", "is_tensor", "__set__"),
}
"""Functions that tell about a tensor, not its values."""
OF_VALUES = {"T", "mT", "H", "mH", "real", "imag", "data"}
"""Attributes of a tensor that are tensors."""


def arguments_read(name: str, args: Any, kwargs: Any) -> Any:
    """The arguments of a torch function whose values (not only shapes) matter."""
    if name in WITHOUT_VALUES:
        return args[1:], kwargs
    return args[:1] if name in LIKE_OTHERS else (args, kwargs)


def leaves(value: Any) -> list[Any]:
    """The leaves of a torch function's arguments, where tensors are nested in lists, tuples and dicts at most."""
    if not isinstance(value, (dict, list, tuple)) or isinstance(value, torch.Size):
        return [value]
    found: list[Any] = []
    for child in value.values() if isinstance(value, dict) else value:
        if isinstance(child, (dict, list, tuple)):
            found += leaves(child)
        else:
            found.append(child)
    return found


def writes(name: str) -> bool:
    """Whether a function of this name changes its first argument in place."""
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__index__", "__int__", "__invert__"))
    return name.endswith("_") and not name.endswith("__")


@contextmanager
def without_graph() -> Iterator[None]:
    """Context in which unknown values are computed; no graph refers to them, so values can be put in their place."""
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # else weights that are cast here would get no gradient later
    try:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(caches)
