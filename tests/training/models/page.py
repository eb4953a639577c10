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

Made by `python -m tests.training.models.survey` {when}: torch {torch}, Lightning {lightning},
transformers {transformers}, peft {peft}, Python {python}; CPU, gloo, fp32.

Each architecture is built from its configuration, as small as that lets it be: with layers of all the kinds that the
whole one has (windows and full attention, dense layers and experts, keys and values of other layers), with random
weights and without dropout. It is put into a LightningModule that knows of no layout. On one plain process and on each
layout it takes two AdamW steps of 8 samples, validates and predicts; `lightning_shard.testing.assert_trains_alike`
compares losses, logs, outputs, every gradient, their norm, parameters and buffers. [testing](testing.md) is how to
do that with a module of your own.

A row that differs is compared once more with other weights, since rounding decides at some kinks, then in 64 bits.
Text models get text without padding. Models of image and text get text alone, but for those that need images, and
Qwen2-VL's, GLM-4V's and Llama 4's kinds: these get text with an image.

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
    lines = [f"## {family.capitalize()}: {len(rows)}, {alike} of them not refused on any layout\n"]
    by_cells: dict[tuple[str, ...], list[str]] = {}
    for row in sorted(rows, key=lambda row: str(row["class"]).lower()):
        by_cells.setdefault(tuple(_cell(row, layout, reasons) for layout in LAYOUTS), []).append(str(row["class"]))
    lines += ["| pp2 | dp2 | tp2 | architectures |", "|---|---|---|---|"]
    for cells, names in sorted(by_cells.items(), key=lambda each: -len(each[1])):
        lines.append(f"| {' | '.join(cells)} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def _cell(row: Row, layout: str, reasons: _Reasons) -> str:
    kind = row["layouts"].get(layout, {"result": "not run"})["result"]
    if kind in SHOWN or kind == "not run":
        return SHOWN.get(kind, kind)
    number = reasons.number(row, layout)
    return f"[{number}](#reasons)" if kind == "refused" else f"**{kind}** [{number}](#reasons)"


_REASONS = {
    r"has style '(\w+)'; known are": "The model's own plan uses the style `{0}`, which isn't supported.",
    r"of style 'moe_tp_experts', has parameters that the plan doesn't cut": "The model's own plan names experts without"
    " saying how their parameters are cut.",
    r"first step fails with tensor_parallel_plan: The size of tensor": "Under the model's own plan, code between split"
    " layers gets this rank's features only and doesn't know that: sizes don't match.",
    r"first step fails with tensor_parallel_plan: Given normalized_shape": "Under the model's own plan a norm over all"
    " features gets this rank's features only.",
    r"computes something else when it is split than whole": "Under the model's own plan a block computes something else"
    " than whole, as where its code takes statistics over features that are split.",
    r"computes with parameters that are sharded \(aten\.convolution": "Code outside a block's call uses the block's"
    " parameters, which are sharded then: a convolution with them.",
    r"computes with parameters that are sharded": "Code outside a module's call uses its sharded parameters.",
    r"blocks run with gradients switched off": "Its blocks run under `torch.no_grad()` within a training step, so no"
    " gradient would cross the stages.",
    r"returned without calling the network, or the network skipped": "The network skips blocks (of text alone, those of"
    " images): a training step must call each.",
    r"changes the parameter .* in place\. In a step parameters are read": "It changes its weights in place in"
    " a step, which runs once for each microbatch.",
    r"as a number \(__bool__\)": "Its code decides by the values of a parameter that another stage holds.",
    r"runs within another block, or without its __call__": "It calls a block within another one or by `forward`: a"
    " pipeline cuts between calls of blocks.",
    r"has no list of repeated blocks.*'network\.recurrent'": "It is one recurrent module, with nothing to cut between.",
    r"has no list of repeated blocks": "It has no list of blocks; `pipeline_blocks` can name what to cut between.",
    r"ran 2 times within one step": "A training step calls the network twice; with an `example_input_array` its calls"
    " are counted, or `pipeline_blocks` names blocks as often as they run.",
}
"""Texts of refusals, and what the page says of them; braces stand for what a pattern has in parentheses."""


class _Reasons:
    """Numbers the reasons for refusals, and keeps which architectures and layouts they hold for."""

    def __init__(self) -> None:
        self._seen: dict[str, list[str]] = {}

    def number(self, row: Row, layout: str) -> int:
        result = row["layouts"][layout]
        text = _reason(" ".join(result["why"].split()))
        self._seen.setdefault(text, []).append(f"{row['class']} ({layout})")
        return list(self._seen).index(text) + 1

    def section(self) -> str:
        if not self._seen:
            return ""
        lines = [f"{i}. {text} *{', '.join(of)}*" for i, (text, of) in enumerate(self._seen.items(), 1)]
        return "## Reasons\n\nThe errors themselves are in [models.json](models.json).\n\n" + "\n".join(lines) + "\n"


def _reason(why: str) -> str:
    for pattern, text in _REASONS.items():
        if found := re.search(pattern, why):
            return text.format(*found.groups())
    return why.replace("|", "\\|")


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
