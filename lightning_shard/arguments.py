"""Numbers and sizes that users give, checked where Python's own error would say less; and what they are told."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

from lightning_shard.errors import ConfigurationError

_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][0-9]+)?)\s*([KMGTP]?)(i?)B?\s*")


def check_count(name: str, value: Any, least: int = 1, why: str = "") -> int:
    """The value as an ``int``.

    Raises:
        ConfigurationError: It is no integer of at least ``least``.
    """
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:
        raise ConfigurationError(f"{name} ({value!r:.80}) must be an integer of at least {least}{why}.")
    return int(value)


def few(names: Iterable[object], most: int = 8) -> str:
    """The first of some names, each once, and how many more there are."""
    shown = [*dict.fromkeys(map(str, names))]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


def size(value: object, setting: str) -> int:
    """Parse bytes: a number, or text such as ``"80GB"`` (10⁹) or ``"80GiB"`` (2³⁰).

    Raises:
        ConfigurationError: It is neither.
    """
    if isinstance(value, str) and (found := _SIZE.fullmatch(value)):
        number, unit, binary = found.groups()
        value = float(number) * (1024 if binary else 1000) ** " KMGTP".index(unit or " ")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ConfigurationError(f"{setting} ({value!r}) must be bytes: a number above 0, or such as 80GiB or 80GB.")
    return round(value)


def table(
    header: list[str], rows: list[list[str]], to_the_right: Sequence[str] = ("parameters", "bytes", "cost")
) -> str:
    """A text table; columns without any entry are left out."""
    used = [index for index in range(len(header)) if any(row[index] for row in rows)]
    lines = [[row[index] for index in used] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [header[index] in to_the_right for index in used]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, aligned, strict=True)
        ).rstrip()
        for line in lines
    )


def short(text: str, width: int) -> str:
    """The text, truncated to ``width`` characters."""
    return text if len(text) <= width else text[: width - 1] + "…"


def count_text(number: float) -> str:
    """Such as ``1.3 M``."""
    return _scaled(number, 1000, ["", " k", " M", " G", " T"])


def size_text(bytes_: float) -> str:
    """Such as ``1.3 GiB``."""
    return _scaled(bytes_, 1024, [" B", " KiB", " MiB", " GiB", " TiB"])


def seconds_text(seconds: float) -> str:
    """Such as ``1.3 ms``."""
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {name}" if seconds < 1000 else f"{seconds:,.0f} s"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0"


def _scaled(number: float, step: int, units: list[str]) -> str:
    for unit in units[:-1]:
        # 999.95 would round to 1000.0, one digit more
        if number < step - 0.05:
            return f"{number:.1f}{unit}" if unit != units[0] else f"{number:.0f}{unit}"
        number /= step
    return f"{number:.1f}{units[-1]}"
