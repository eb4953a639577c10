"""``docs/models.md`` from a survey's results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

LAYOUTS = {"pp2": "two pipeline stages", "dp2": "two data ranks", "tp2": "two tensor ranks"}
SHOWN = {"alike": "✓", "no plan": "–", "in parts": "≈", "rounding": "ulp"}

_HEAD = """# Models

Made by `python -m tests.models.survey` {when}: torch {torch}, Lightning {lightning}, transformers {transformers},
peft {peft}, Python {python}; CPU, gloo, fp32.

Each architecture is built from its configuration, as small as that lets it be, with random weights and without
dropout, and put into a LightningModule that knows of no layout. On one plain process and on each layout it takes two
AdamW steps of 8 samples, validates and predicts; `lightning_shard.testing.assert_trains_alike` compares losses, logs,
outputs, every gradient, their norm, parameters and buffers. [testing.md](testing.md) is how to do that with a module of
your own.

A row that differs is compared once more with other weights, since rounding decides at some kinks, then in 64 bits.
Text models get text without padding, models of image and text get text alone.

- ✓ alike
- ≈ alike to one process that accumulates the gradients of as many parts of each batch, and not to one that has the
  batch at once. Mostly its loss isn't the mean of its samples' (BatchNorm, contrastive losses, losses that balance
  experts), and microbatches and data ranks have a part of the batch each. In a few it is rounding: so in Hiera and
  Gemma4, whose losses are means. With BatchNorm each data rank also keeps statistics of its own: that isn't compared.
- ulp: some number differs, in 32 and in 64 bits (what such a model computes in 32 bits all the same), by no more than
  on one process when each weight is changed in its last bit
- a number: refused, with the reason below
- – transformers has no tensor-parallel plan for it, and none was written
"""


def page(results: Mapping[str, Any]) -> str:
    rows: list[Row] = list(results["rows"].values())
    compared = [row for row in rows if "layouts" in row]
    reasons = _Reasons()
    tables = [_table(family, of_family, reasons) for family, of_family in _by_family(compared)]
    parts = [
        _HEAD.format(when=_when(rows), **results["made"]),
        _counts(rows, compared, int(results["made"]["architectures"])),
        *tables,
        reasons.section(),
        _others("Random", "random", rows, "Two runs on one process differ where random numbers do."),
        _others("Not built small", "not built", rows, "No small configuration was found that trains on one process."),
    ]
    return "\n".join(part for part in parts if part)


def _when(rows: Iterable[Row]) -> str:
    """A row is as old as the oldest of its results."""
    (oldest, _), *later = sorted(Counter(row["date"] for row in rows).items())
    return f"on {oldest}" + "".join(f", {count} of its rows again on {day}" for day, count in later)


def _by_family(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    families: dict[str, list[Row]] = {}
    for row in rows:
        families.setdefault(row["family"], []).append(row)
    return sorted(families.items(), key=lambda item: (-len(item[1]), item[0]))


def _counts(rows: list[Row], compared: list[Row], known: int) -> str:
    lines = [
        f"**{len(compared)} architectures were compared.** Of {known},"
        f"{f' {known - len(rows)} have yet to be run,' * (known > len(rows))}"
        f" {sum('random' in row for row in rows)} draw"
        f" random numbers that have an effect, and {sum('not built' in row for row in rows)} weren't built.\n",
        "| layout | alike | refused | no plan | in parts | ulp | not run | **different** | **error** |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for layout, meaning in LAYOUTS.items():
        counts = Counter(row["layouts"].get(layout, {"result": "not run"})["result"] for row in compared)
        kinds = ("alike", "refused", "no plan", "in parts", "rounding", "not run", "different", "crashed")
        lines.append(f"| {layout}, {meaning} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    return "\n".join(lines) + "\n"


def _table(family: str, rows: list[Row], reasons: _Reasons) -> str:
    alike = sum(all(result["result"] in SHOWN for result in row["layouts"].values()) for row in rows)
    lines = [f"## {family.capitalize()}: {len(rows)}, {alike} of them alike wherever they can be\n"]
    lines += ["| architecture | pp2 | dp2 | tp2 |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: str(row["class"]).lower()):
        cells = (_cell(row["layouts"].get(layout), reasons) for layout in LAYOUTS)
        lines.append(f"| {row['class']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(result: Row | None, reasons: _Reasons) -> str:
    kind = result["result"] if result else "not run"
    if result is None or kind in SHOWN:
        return SHOWN.get(kind, kind)
    number = reasons.number(result)
    return f"[{number}](#reasons)" if kind == "refused" else f"**{kind}** [{number}](#reasons)"


class _Reasons:
    """Texts of refusals with names and numbers left out, so that equal ones are one."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def number(self, result: Row) -> int:
        text = _without_names(result["why"])
        if result.get("error"):
            text = f"{result['error']}: {text}"
        self._seen[text] += 1
        return list(self._seen).index(text) + 1

    def section(self) -> str:
        if not self._seen:
            return ""
        lines = [f"{i}. {text} ({count}×)" for i, (text, count) in enumerate(self._seen.items(), 1)]
        return "## Reasons\n\n" + "\n".join(lines) + "\n"


def _without_names(text: str) -> str:
    text = re.sub(r"\[[^\]]*\]|\([^)]*\d[^)]*\)", "…", " ".join(text.split()))
    text = re.sub(r"'[^']*'", "…", text)
    text = re.sub(r"^(Model|Supervised|WithItsHead|ItsOwnNetwork) ", "The module ", text)
    text = re.sub(r"\b\w+(\.\w+)+", "…", text)
    text = re.sub(r"\d[\d,.]*", "N", text)
    text = re.sub(r"…(,? …)+", "…", text)
    first = re.split(r"(?<=[a-z…)])\. |: (?=[a-z])", text)[0]
    return first.replace("|", "\\|")[:240]


def _others(title: str, key: str, rows: list[Row], why: str) -> str:
    found = [row for row in rows if key in row]
    if not found:
        return ""
    lines = [f"## {title}: {len(found)}\n", f"{why}\n", "| architecture | why |", "|---|---|"]
    for row in sorted(found, key=lambda row: str(row["class"]).lower()):
        reason = " ".join(row[key].split())
        drawn = re.search(r"They are drawn by (.*?)\. Set dropout", reason)
        reason = drawn.group(1) if drawn else re.sub(r"^[\w.]*NotBuilt: ", "", reason)
        lines.append(f"| {row['class']} | {reason[:160].replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
