"""Which architectures train on which layouts as on one process: ``docs/models.md``, and beside it the JSON of it.

::

    python -m tests.training.models.survey --jobs 2                   # what isn't in the JSON yet
    python -m tests.training.models.survey --again --layouts pp2      # all of it anew, on these layouts
    python -m tests.training.models.survey --before 2026-11-23        # what is older, or isn't in the JSON yet
    python -m tests.training.models.survey --only llama,nn.LSTM  # names, classes or families that contain one of these
    python -m tests.training.models.survey --page                     # the page alone

Each architecture is built, run and compared in processes of its own, with limits of time and memory. An interrupted
survey goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from datetime import date
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.testing import RanksFailed, TrainsDifferently, preload, processes, run_ranks
from lightning_shard.testing.alike import OneProcess
from lightning_shard.testing.layouts import DEFAULT, parse
from tests.paths import ROOT
from tests.training.models import networks, page, transformers_models
from tests.training.models.accumulated import accumulating
from tests.training.models.rounding import in_last_bit, moves_as_far

DOCS = ROOT / "docs"
RESULTS, PAGE = DOCS / "models.json", DOCS / "models.md"
TIMEOUT_S = 300
ONE_BATCH = {"limit_val_batches": 1, "limit_predict_batches": 1}
PARTS = {"pp2": 4, "dp2": 2}
"""Into how many parts a layout cuts a batch."""
OWN = "torch modules"

Row = dict[str, Any]


def survey_own(name: str, layouts: Sequence[str] = DEFAULT) -> Row:
    row: Row = {"name": name, "family": OWN, "class": name}
    plan = networks.NETWORKS[name].plan
    makers = partial(networks.make, name), partial(networks.batches, name)
    return row | _compare(*makers, layouts, **({"tensor_parallel_plan": plan} if plan else {}))


def survey_transformers(family: str, model_type: str, architecture: str, layouts: Sequence[str] = DEFAULT) -> Row:
    row: Row = {"name": model_type, "family": family, "class": architecture}
    try:
        [found] = run_ranks(
            transformers_models.find_small, 1, family, model_type, architecture, init=False, timeout_s=TIMEOUT_S
        )
    except RanksFailed as failed:
        return row | {"not built": _reason(failed)}
    makers = transformers_models.makers(architecture, found)
    return row | {"parameters": found.parameters} | _compare(*makers, layouts)


def _compare(
    make_module: Callable[[], Any], make_batches: Callable[[], Any], layouts: Sequence[str], **options: Any
) -> Row:
    """``layouts``, with one result for each; or why there are none."""
    try:
        alone = OneProcess(make_module, make_batches, trainer=ONE_BATCH, timeout_s=TIMEOUT_S)
    except RanksFailed as failed:
        return {"not built": _reason(failed)}
    except ConfigurationError as random:
        return {"random": str(random)}
    results = {}
    for layout in layouts:
        if layout == "tp2" and not (alone.facts.has_plan or options):
            results[layout] = {"result": "no plan"}
            continue
        try:
            results[layout] = _judged(layout, alone, make_module, make_batches, options)
        except ShardError as refusal:
            results[layout] = {"result": "refused", "error": type(refusal).__name__, "why": str(refusal)}
        except TrainsDifferently as different:
            results[layout] = {"result": "different", "why": str(different)}
        except RanksFailed as failed:
            results[layout] = {"result": "crashed", "why": _reason(failed)}
    return {"layouts": results}


def _judged(
    layout: str, alone: OneProcess, make_module: Callable[[], Any], make_batches: Callable[[], Any], options: Any
) -> Row:
    """The result on a layout.

    Where it differs, rounding may have decided: at a kink (a choice of experts, a clipped value) it does with some
    weights only; what it does in 32 bits it doesn't in 64; and on one process it does the same.
    """
    try:
        return {"result": _result_on(layout, alone, make_module, make_batches, options)}
    except TrainsDifferently as different:
        first = different
    for seed, trainer in ((1, {}), (0, {"precision": "64-true"})):
        with suppress(TrainsDifferently, RanksFailed):  # not all kernels know 64 bits
            other = OneProcess(make_module, make_batches, trainer=ONE_BATCH | trainer, seed=seed, timeout_s=TIMEOUT_S)
            result = _result_on(layout, other, make_module, make_batches, options)
            return {"result": result, **(trainer or {"seed": seed})}
    nearby = OneProcess(in_last_bit(make_module), make_batches, trainer=ONE_BATCH, timeout_s=TIMEOUT_S)
    if not moves_as_far(alone, nearby, first):
        raise first
    return {"result": "rounding"}


def _result_on(
    layout: str, alone: OneProcess, make_module: Callable[[], Any], make_batches: Callable[[], Any], options: Any
) -> str:
    """``"alike"``, or ``"in parts"``: as one process that accumulates the gradients of as many parts of each batch.

    So train modules whose losses mix the samples of a batch. Data ranks have statistics of their own (BatchNorm's,
    ranges of activations), and with these nothing more is compared.
    """
    where = parse(layout, options if layout == "tp2" else {})
    try:
        alone.compare(where)
    except TrainsDifferently as different:
        if layout not in PARTS:
            raise
        trained = alone.record[different.moment].gradients
        of_samples = all(a.kind == "state" and a.name not in trained for a in (different.first, *different.others))
        if layout == "dp2" and (alone.facts.batch_norms or of_samples):
            return "in parts"
        accumulating(alone, make_module, make_batches, PARTS[layout], TIMEOUT_S).compare(where)
        return "in parts"
    return "alike"


def _reason(failed: RanksFailed) -> str:
    return str(failed).partition("\n")[0].partition("failed first: ")[2] or str(failed).partition("\n")[0]


class Results:
    """Rows by class, kept in a file from row to row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: dict[str, Row] = json.loads(path.read_text())["rows"] if path.exists() else {}

    def put(self, row: Row) -> None:
        was = self.rows.get(row["class"], {})
        if "layouts" in row:  # what was compared on other layouts stays
            both = was.get("layouts", {}) | row["layouts"]
            if both.keys() != row["layouts"].keys():
                row["date"] = was["date"]
            row["layouts"] = {name: both[name] for name in DEFAULT if name in both}
        self.rows[row["class"]] = row
        partial_file = self._path.with_suffix(".partial")
        rows = dict(sorted(self.rows.items()))
        partial_file.write_text(json.dumps({"made": made(), "rows": rows}, indent=1, ensure_ascii=False) + "\n")
        os.replace(partial_file, self._path)


def made() -> dict[str, str]:
    """With what; when is in each row, the oldest day of what it says."""
    versions = {}
    for name in ("torch", "lightning", "transformers", "peft"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    known = {"architectures": str(len(all_of_it()))}
    return {"python": platform.python_version(), **known, **versions}


def all_of_it() -> dict[str, partial[Row]]:
    """By class, in the order of the page."""
    own: dict[str, partial[Row]] = {name: partial(survey_own, name) for name in networks.NETWORKS}
    others = transformers_models.architectures()
    return {**own, **{name: partial(survey_transformers, *what) for name, what in others.items()}}


def wanted(task: partial[Row], only: Iterable[str]) -> bool:
    texts = list(map(str, task.args))
    return not only or any(part.lower() in text.lower() for part in only for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of names, classes or families, with commas between them")
    parser.add_argument("--again", action="store_true", help="also what the JSON has already")
    parser.add_argument("--before", default="", help="what was made before this day, as 2026-11-23")
    parser.add_argument("--layouts", default=",".join(DEFAULT), help="with commas between them")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at a time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="write the page from the JSON and do nothing else")
    arguments = parser.parse_args()
    results = Results(arguments.results)
    only = [part for part in arguments.only.split(",") if part]
    if not arguments.page:
        tasks = {
            name: task
            for name, task in all_of_it().items()
            if wanted(task, only) and _is_due(results.rows.get(name), arguments, bool(only))
        }
        started, layouts = time.monotonic(), arguments.layouts.split(",")
        # processes: of multiprocessing's fork server, exit codes reach one thread alone
        with ProcessPoolExecutor(arguments.jobs, get_context("spawn"), _prepare) as pool:
            names = {pool.submit(_timed, task, layouts): name for name, task in tasks.items()}
            for done, future in enumerate(as_completed(names), 1):
                row = future.result()
                results.put(row)
                since = time.monotonic() - started
                print(f"{done}/{len(tasks)} {since:.0f} s  {names[future]}: {in_short(row)}", flush=True)
    path = PAGE if arguments.results == RESULTS else arguments.results.with_suffix(".md")
    path.write_text(page.page(json.loads(arguments.results.read_text())))


def _prepare() -> None:
    preload("transformers", "tests.training.models.networks", "tests.training.models.transformers_models")
    preload("lightning_shard.testing.recorder", "tests.training.models.all_of_transformers")
    processes.FAILURE_GRACE_S = 1.0  # type: ignore[misc]  # most failures here are of all ranks at once


def _timed(task: partial[Row], layouts: list[str]) -> Row:
    begun = time.monotonic()
    row = task(layouts=layouts)
    return row | {"seconds": round(time.monotonic() - begun, 1), "date": date.today().isoformat()}


def _is_due(row: Row | None, arguments: argparse.Namespace, is_named: bool) -> bool:
    if row is not None and arguments.before:
        return row["date"] < str(arguments.before)
    return row is None or is_named or bool(arguments.again)


def in_short(row: Row) -> str:
    if "layouts" not in row:
        return re.sub(r"\s+", " ", next(f"{key}: {row[key]}" for key in ("not built", "random") if key in row))[:160]
    shown = (f"{name} {result['result']}" for name, result in row["layouts"].items())
    why = next((result["why"] for result in row["layouts"].values() if result["result"] not in page.SHOWN), "")
    return ", ".join(shown) + (f": {why[:160]!r}" if why else "") + f" ({row['seconds']} s)"


if __name__ == "__main__":
    main()
