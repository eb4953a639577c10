"""Shapes and pictures, and their output as SVG or PNG with the same geometry.

Lengths are in pixels, from the upper left corner. Colours have names (:data:`COLORS`): an SVG uses the variant for a
light or dark background, as the viewer prefers; a PNG has a light background.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from lightning_shard.errors import ConfigurationError
from lightning_shard.installed import how_to_install

FONT_SIZE = 11
FONT = "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
PNG_DPI = 160
"""Resolution of a PNG, where 96 pixels of the picture are an inch."""
MAX_PNG_PIXELS = 30_000
"""Limit of a side: few programs show more, and Agg refuses 2¹⁶."""

LEAST_SCALE = 0.75
"""Smallest scale to which a page shrinks pictures to fit a window; beyond that they scroll."""

COLORS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#16181d"),
    "ink": ("#1f2328", "#e6e8eb"),
    "faint": ("#6b7280", "#9aa3af"),
    "grid": ("#d5d9df", "#3a404a"),
    "idle": ("#eef0f3", "#262a32"),
    "forward": ("#4c8dd6", "#4f8fd8"),
    "backward": ("#e8853d", "#e08a4a"),
    "input": ("#f0b429", "#e3b341"),
    "weight": ("#5aa469", "#5fb572"),
    "send": ("#6b7280", "#9aa3af"),
    "activations": ("#7a6bb8", "#8f81cf"),
    "parameters": ("#4c8dd6", "#4f8fd8"),
    "buffers": ("#2f5d8c", "#7fb0e6"),
    "gradients": ("#e8853d", "#e08a4a"),
    "optimizer": ("#5aa469", "#5fb572"),
    "gathered": ("#2a9d8f", "#35b3a4"),
    "received": ("#d16ba5", "#d982b3"),
    "loss": ("#f0b429", "#e3b341"),
    "working": ("#8d6e63", "#a98a7f"),
    "other": ("#9aa3af", "#6b7280"),
    "limit": ("#c62828", "#ff7b72"),
}
"""By name: the colour on a light background, and on a dark one."""
ON_COLOR = "#10131a"
"""The colour of text in a coloured box, on any background."""


@dataclass(frozen=True)
class Rect:
    """A rectangle. ``tip`` is its tooltip, and its text for screen readers."""

    x: float
    y: float
    width: float
    height: float
    color: str
    tip: str = ""
    opacity: float = 1.0


@dataclass(frozen=True)
class Line:
    """A line through points; with ``filled``, the area between the line and that height is filled."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float = 1.0
    dashed: bool = False
    filled: float | None = None
    tip: str = ""


@dataclass(frozen=True)
class Text:
    """A line of text; ``y`` is its vertical middle."""

    x: float
    y: float
    text: str
    color: str = "ink"
    anchor: Literal["start", "middle", "end"] = "start"
    size: float = FONT_SIZE
    bold: bool = False


Shape = Rect | Line | Text


@dataclass
class Picture:
    """Shapes in drawing order: later ones cover earlier ones.

    Attributes:
        title: What the picture shows, in one line.
        width, height: Its size in pixels.
        facts: The picture's content as a table: column titles, and rows.
    """

    title: str
    width: float
    height: float
    shapes: list[Shape] = field(default_factory=list)
    facts: tuple[Sequence[str], Sequence[Sequence[str]]] = ((), ())

    def add(self, *shapes: Shape) -> None:
        self.shapes.extend(shapes)


def stacked(title: str, pictures: Sequence[Picture], gap: float = 18) -> Picture:
    """Stack pictures vertically."""
    whole = Picture(title, max(picture.width for picture in pictures), -gap)
    for picture in pictures:
        top = whole.height + gap
        whole.add(*(_moved(shape, top) for shape in picture.shapes))
        whole.height = top + picture.height
    return whole


def _moved(shape: Shape, down: float) -> Shape:
    if isinstance(shape, Line):
        points = tuple((x, y + down) for x, y in shape.points)
        filled = None if shape.filled is None else shape.filled + down
        return Line(points, shape.color, shape.width, shape.dashed, filled, shape.tip)
    values = {**shape.__dict__, "y": shape.y + down}
    return type(shape)(**values)


# -- SVG --------------------------------------------------------------------------------------------------------------


def style() -> str:
    """CSS variables of the colours, for light and dark backgrounds."""
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in COLORS.items()) for i in range(2))
    return (
        f":root{{color-scheme:light dark;{light}}}"
        f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f"svg text{{font-family:{FONT}}}"
    )


def to_svg(picture: Picture, *, alone: bool = True) -> str:
    """The picture as SVG: a document by itself; or if not ``alone``, for a page that includes :func:`style`."""
    width, height = _number(picture.width), _number(picture.height)
    # in a page it shrinks with a narrow window, as long as its text is legible
    least = _number(LEAST_SCALE * picture.width)
    fits = "" if alone else f' style="height:auto;width:100%;min-width:{least}px;max-width:{width}px"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' role="img" aria-label="{escape(picture.title)}"{fits}>'
    )
    ground = f"<style>{style()}</style>" + _svg(Rect(0, 0, picture.width, picture.height, "paper")) if alone else ""
    return "\n".join([head + ground, *map(_svg, picture.shapes), "</svg>"])


def _svg(shape: Shape) -> str:
    if isinstance(shape, Text):
        fill = ON_COLOR if shape.color == "on color" else f"var(--{shape.color})"
        weight = ' font-weight="600"' if shape.bold else ""
        return (
            f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" dy="0.35em" font-size="{_number(shape.size)}"'
            f' text-anchor="{shape.anchor}" style="fill:{fill}"{weight}>{escape(shape.text)}</text>'
        )
    tip = f"<title>{escape(shape.tip)}</title>" if shape.tip else ""
    if isinstance(shape, Rect):
        opacity = f";fill-opacity:{_number(shape.opacity)}" if shape.opacity < 1 else ""
        return (
            f'<rect x="{_number(shape.x)}" y="{_number(shape.y)}" width="{_number(shape.width)}"'
            f' height="{_number(shape.height)}" style="fill:var(--{shape.color}){opacity}">{tip}</rect>'
        )
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
    dashes = ";stroke-dasharray:4 3" if shape.dashed else ""
    line = (
        f'<polyline points="{points}" style="fill:none;stroke:var(--{shape.color})'
        f';stroke-width:{_number(shape.width)}{dashes}">{tip}</polyline>'
    )
    if shape.filled is None:
        return line
    area = " ".join(f"{_number(x)},{_number(y)}" for x, y in _area(shape))
    return f'<polygon points="{area}" style="fill:var(--{shape.color});fill-opacity:0.35">{tip}</polygon>{line}'


def _area(line: Line) -> Iterator[tuple[float, float]]:
    assert line.filled is not None
    yield line.points[0][0], line.filled
    yield from line.points
    yield line.points[-1][0], line.filled


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# -- PNG --------------------------------------------------------------------------------------------------------------


def save_png(picture: Picture, path: str | Path) -> None:
    """Save a PNG, drawn by matplotlib.

    Raises:
        ConfigurationError: matplotlib isn't installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            f"{path}: PNG files are drawn by matplotlib, which isn't installed ({error}):"
            f" {how_to_install('plot')}, or write an .svg or .html file, which need nothing."
        ) from error
    dpi = min(PNG_DPI, int(MAX_PNG_PIXELS * 96 / max(picture.width, picture.height)))
    figure = Figure(figsize=(picture.width / 96, picture.height / 96), dpi=dpi, facecolor=COLORS["paper"][0])
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), frameon=False)
    axes.set_axis_off()
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    for order, shape in enumerate(picture.shapes):
        _draw(axes, shape, order)
    figure.savefig(path, dpi=dpi, format="png")


def _draw(axes: Any, shape: Shape, order: int) -> None:
    color = ON_COLOR if shape.color == "on color" else COLORS[shape.color][0]
    if isinstance(shape, Text):
        axes.text(
            shape.x,
            shape.y,
            shape.text.replace("$", r"\$"),  # no TeX
            color=color,
            fontsize=shape.size * 0.75,  # pixels to points
            ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            va="center_baseline",
            weight="bold" if shape.bold else "normal",
            zorder=order,
        )
    elif isinstance(shape, Rect):
        from matplotlib.patches import Rectangle

        axes.add_patch(
            Rectangle(
                (shape.x, shape.y), shape.width, shape.height, color=color, alpha=shape.opacity, lw=0, zorder=order
            )
        )
    else:
        xs, ys = zip(*shape.points)
        dashes = (0, (4, 3)) if shape.dashed else "solid"
        axes.plot(xs, ys, color=color, linewidth=shape.width * 0.75, linestyle=dashes, zorder=order)
        if shape.filled is not None:
            axes.fill(*zip(*_area(shape)), color=color, alpha=0.35, lw=0, zorder=order)


def save(picture: Picture, path: str | Path) -> None:
    """Save a picture in the format of the file's extension: ``.svg`` or ``.png``.

    Raises:
        ConfigurationError: Another extension; or PNG without matplotlib.
    """
    ending = Path(path).suffix.lower()
    if ending == ".svg":
        Path(path).write_text(to_svg(picture) + "\n", encoding="utf-8")
    elif ending == ".png":
        save_png(picture, path)
    else:
        raise ConfigurationError(f"{path}: a picture's name ends with .svg or .png; pages are .html.")
