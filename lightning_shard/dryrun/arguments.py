"""Checks the layout that a plan is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from lightning_shard.errors import LayoutError
from lightning_shard.layout import Layout, check_sizes

_SIZES = tuple(field.name for field in fields(Layout) if field.name.startswith("data_") or "_size" in field.name)


def layout_of(given: Layout | Mapping[str, int]) -> Layout:
    """The layout to plan for; axes that aren't given have size 1.

    Raises:
        LayoutError: It isn't a layout, or can't be planned for.
    """
    if not isinstance(given, Layout):
        given = _of_sizes(given)
    if given.context_parallel_size != 1:
        raise LayoutError(
            f"context_parallel_size ({given.context_parallel_size!r}): plan() doesn't support it yet: plan with 1; the"
            " activations of its blocks are then those of all context ranks together."
        )
    return given


def _of_sizes(given: Any) -> Layout:
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"layout={given!r} must be a Layout, or the sizes of its axes by name, such as"
            ' {"pipeline_parallel_size": 4, "data_parallel_size": 2}.'
        )
    if unknown := [name for name in given if name not in _SIZES]:
        raise LayoutError(f"layout has {unknown[0]!r}, which is none of {', '.join(_SIZES)}: leave it out.")
    sizes: dict[str, Any] = {**dict.fromkeys(_SIZES, 1), **given}
    if sizes["data_parallel_size"] == "auto":
        raise LayoutError('data_parallel_size ("auto"): how many ranks are left isn\'t known to a plan: give a number.')
    check_sizes(**sizes)
    world = sizes["data_parallel_size"] * sizes["pipeline_parallel_size"] * sizes["tensor_parallel_size"]
    return Layout.resolve(world * sizes["context_parallel_size"], **sizes)
