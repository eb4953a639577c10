"""Parses layouts from short names, such as ``"pp2 x dp2"``, or from the strategy's own arguments."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shard.errors import LayoutError
from lightning_shard.layout import SIZES, Layout

DEFAULT = ("pp2", "dp2", "tp2")

_AXES = {
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}
_EXPERTS = "expert_parallel_size"
_NAME = re.compile(r"(pp|dp|cp|tp|ep)(\d+)")
_BETWEEN = re.compile(r"[\s,×x*]*")


@dataclass(frozen=True)
class NamedLayout:
    """A layout; ``arguments`` are those of ``HybridShardStrategy``, including the sizes of all axes."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def world_size(self) -> int:
        return math.prod(self.arguments[axis] for axis in _AXES.values())

    def at(self, rank: int) -> Layout:
        """The layout as seen from global rank ``rank``."""
        sizes = {name: size for name, size in self.arguments.items() if name in SIZES}
        return Layout.resolve(self.world_size, rank, **sizes)


def parse(layout: str | Mapping[str, Any], options: Mapping[str, Any]) -> NamedLayout:
    """Parse a layout as users write it.

    Args:
        layout: Axes and sizes, in any order (``"pp2"``, ``"pp2 x dp2"``, ``"tp2×dp2"``); or arguments of
            ``HybridShardStrategy``, with one data rank by default. Experts are distributed over data ranks: ``"ep2"``
            has two data ranks, ``"ep2 x dp2"`` four.
        options: More arguments; ``layout`` takes precedence.

    Raises:
        LayoutError: An unknown name, or invalid sizes.
    """
    if isinstance(layout, str):
        found = _NAME.findall(layout)
        if not found or _BETWEEN.fullmatch(_NAME.sub("", layout)) is None or len({a for a, _ in found}) < len(found):
            raise LayoutError(
                f"A layout ({layout!r}) is named by its axes: pp, dp, cp, tp and ep, each with its size once, such as"
                ' "pp2" or "pp2 x dp2"; or it is a dict of arguments of HybridShardStrategy.'
            )
        sizes = {axis: int(size) for axis, size in found}
        name, arguments = layout, {_AXES[axis]: size for axis, size in sizes.items() if axis in _AXES}
        if "ep" in sizes:
            arguments |= {_EXPERTS: sizes["ep"], _AXES["dp"]: sizes["ep"] * sizes.get("dp", 1)}
    else:
        name, arguments = _name_of(layout), dict(layout)
    arguments = {**dict.fromkeys(_AXES.values(), 1), **options, **arguments}
    if arguments["data_parallel_size"] == "auto":
        arguments["data_parallel_size"] = 1
    named = NamedLayout(name, arguments)
    named.at(0)  # raises for invalid sizes
    return named


def parse_all(
    layouts: str | Mapping[str, Any] | Iterable[str | Mapping[str, Any]], options: Mapping[str, Any]
) -> list[NamedLayout]:
    several = [layouts] if isinstance(layouts, (str, Mapping)) else layouts
    return [parse(layout, options) for layout in several]


def _name_of(arguments: Mapping[str, Any]) -> str:
    axes = [f"{short}{arguments[axis]}" for short, axis in _AXES.items() if arguments.get(axis, 1) != 1]
    others = [f"{name}={value!r}" for name, value in arguments.items() if name not in _AXES.values()]
    return ", ".join([" x ".join(axes) or "one rank", *others])
