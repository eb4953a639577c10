"""The command line ``lightning-shard``: inspect, list, verify, gather and compare checkpoints, plan and train recipes.

Prints tables for people, and JSON for machines with ``--json``. The exit code is 0 on success, 1 if a fault or a
difference was found or the command failed, and 2 for an invalid command line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC
from typing import Any, NoReturn, get_args

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from lightning_shard import checkpoint
from lightning_shard.arguments import size, size_text, table
from lightning_shard.cli_plan import add_plan
from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.installed import need_recipes, own_conf, recipes, version

FAULTS_SHOWN = 20
RANKS_SHOWN = 8
PROGRESS_AFTER_S = 1.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 2
    try:
        answer, code = arguments.verb(arguments)
        _say(answer if isinstance(answer, str) else _json(answer))
        return code
    except BrokenPipeError:
        return 1
    except (ShardError, OSError, ImportError, ValueError) as error:
        # our own errors say what to do; others are shown with their type
        text = str(error) if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"
        if arguments.json:
            _say(_json({"ok": False, "error": type(error).__name__, "message": str(error)}))
        print(f"lightning-shard: {_printable(text)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("lightning-shard: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-shard",
        description="Look into sharded checkpoints, check and compare them, make one file of them; plan and train.",
    )
    parser.add_argument("--version", action="version", version=f"lightning-shard {version()}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)

    inspect = _verb(verbs, "inspect", _inspect, "show layout, step, sizes and the biggest tensors")
    inspect.add_argument("--biggest", type=int, default=10, metavar="N", help="how many tensors to list (10)")

    _verb(verbs, "list", _list, "show the checkpoints of a folder, the oldest first", path="a folder of checkpoints")

    _verb(verbs, "verify", _verify, "read every byte and compare it with its digest")

    gather = _verb(verbs, "gather", _gather, "write a safetensors file, a transformers folder or a Lightning .ckpt")
    gather.add_argument("out", help="the file to write, such as model.safetensors or last.ckpt; or the folder")
    gather.add_argument("--format", choices=get_args(checkpoint.Format), help="told by out's ending otherwise")
    gather.add_argument(
        "--optimizer",
        action=argparse.BooleanOptionalAction,
        help="the optimizer's tensors too, prefixed 'optimizer.'; the default in a .ckpt",
    )
    gather.add_argument("--dtype", type=_dtype, help="convert floating tensors of the model, such as to bfloat16")
    gather.add_argument("--strip-prefix", metavar="PREFIX", help="take it off names of the model's tensors")
    gather.add_argument(
        "--rename",
        action=_InDict,
        type=_renaming,
        metavar="OLD=NEW",
        help="what names of the model's tensors begin with, and what takes its place; may be repeated",
    )
    gather.add_argument("--config", metavar="FOLDER", help="a transformers folder, where the checkpoint has no config")
    gather.add_argument("--base", metavar="PATH", help="what holds the frozen tensors that the checkpoint leaves out")
    gather.add_argument(
        "--max-shard-bytes",
        type=_size,
        metavar="SIZE",
        help="several files of at most this size, such as 5GB, and an index",
    )
    _option_of(gather, "out_storage_options", "for the store that is written to")
    gather.add_argument(
        "--no-verify", action="store_false", dest="verify", help="don't compare what is read with its digests"
    )

    diff = _verb(verbs, "diff", _diff, "compare two checkpoints, of any layouts: names, values and state")
    diff.add_argument("b", metavar="other", help="the checkpoint to compare with")
    diff.add_argument("--rtol", type=float, default=0.0, metavar="X", help="tolerance relative to the other (0)")
    diff.add_argument("--atol", type=float, default=0.0, metavar="X", help="absolute tolerance (0)")
    diff.add_argument(
        "--only",
        dest="sections",
        action="append",
        choices=checkpoint.SECTIONS,
        metavar="SECTION",
        help=f"compare only this one of {', '.join(checkpoint.SECTIONS)}; may be repeated",
    )
    _option_of(diff, "b_storage_options", "for the other checkpoint, where it needs others", "--other-storage-option")
    add_plan(verbs, _size)

    train = verbs.add_parser("train", help="train a recipe: train recipe=demo, and key=value", prefix_chars=" ")
    train.set_defaults(verb=_train, json=False)
    train.add_argument("settings", nargs="*", help="of conf/, as key=value; a folder conf/ here is searched too")
    return parser


def _train(arguments: argparse.Namespace) -> NoReturn:
    need_recipes()
    own = own_conf()
    added = ["--config-dir", str(own)] if own is not None else []
    # this process becomes the recipe's, so that signals and the launcher's other ranks see what they would without it
    os.execv(sys.executable, [sys.executable, str(recipes() / "train.py"), *added, *arguments.settings])


Answer = tuple[Any, int]
"""What a verb prints, a text or values for JSON; and the exit code."""


def _verb(
    verbs: Any,
    name: str,
    run: Callable[[argparse.Namespace], Answer],
    summary: str,
    path: str = "a checkpoint's directory or manifest",
) -> argparse.ArgumentParser:
    """A verb's parser, whose arguments have the names of the function's that the verb calls (:func:`_given`)."""
    parser = verbs.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    parser.set_defaults(verb=run)
    parser.add_argument("path", help=f"{path}, local or a URL that fsspec knows")
    parser.add_argument("--json", action="store_true", help="print JSON for machines instead of a table")
    _option_of(parser, "storage_options", "for fsspec; the value may be JSON")
    return parser


def _option_of(parser: argparse.ArgumentParser, name: str, purpose: str, flag: str = "") -> None:
    flag = flag or f"--{name.removesuffix('s').replace('_', '-')}"
    what = f"{purpose}; may be repeated"
    parser.add_argument(flag, dest=name, action=_InDict, type=_option, metavar="KEY=VALUE", help=what)


class _InDict(argparse.Action):
    """Collects pairs in a dict."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, pair: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest) or {}), pair[0]: pair[1]})


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a verb's function that were given; for others its own defaults hold."""
    return {key: value for key, value in vars(arguments).items() if key not in _OF_ALL and value is not None}


_OF_ALL = ("verb", "json", "path")


# -- verbs ------------------------------------------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace) -> Answer:
    report = checkpoint.inspect(arguments.path, **_given(arguments))
    if arguments.json:
        return {**dataclasses.asdict(report), "bytes": report.bytes, "imbalance": report.imbalance}, 0
    digests = "yes" if report.digests else "none: damage can't be found"
    facts = {"checkpoint": report.path}
    if report.global_step is not None or report.epoch is not None:
        facts["step"] = f"{_shown(report.global_step)}, epoch counter {_shown(report.epoch)}"
    facts |= {
        "layout": _layout(report.layout, report.world_size),
        "model": f"{report.parameters:,} elements, {size_text(report.section_bytes['model'])}",
        "optimizer": size_text(report.section_bytes["optimizer"]),
        "files": f"{len(report.files)}, {size_text(report.bytes)}",
        "ranks": _ranks(report.rank_bytes, report.imbalance),
        "digests": digests if report.manifest_digest else f"{digests}; the manifest has none of its own",
        "written by": f"{report.writer}, format version {report.format_version}, attempt {report.attempt}",
    }
    lines = [f"{name:<11} {_printable(fact, lines=False)}" for name, fact in facts.items()]
    biggest = [
        (
            line.name if line.section == "model" else f"optimizer: {line.name}",
            line.dtype,
            " × ".join(map(str, line.shape)) or "scalar",
            size_text(line.bytes),
            str(line.chunks),
        )
        for line in report.biggest
    ]
    if biggest:
        lines += ["", _table(("biggest tensors", "dtype", "shape", "size", "chunks"), biggest)]
    return "\n".join(lines), 0


def _list(arguments: argparse.Namespace) -> Answer:
    entries = checkpoint.list(arguments.path, **_given(arguments))
    code = 1 if any(entry.fault for entry in entries) else 0
    if arguments.json:
        return [{**dataclasses.asdict(entry), "committed": entry.committed.isoformat()} for entry in entries], code
    if not entries:
        return f"{arguments.path}: no committed checkpoint", code
    rows = []
    for entry in entries:
        committed = entry.committed.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
        facts = ("", "damaged") if entry.fault else (size_text(entry.bytes), entry.attempt)
        rows.append((entry.name, "" if entry.step is None else str(entry.step), committed, *facts))
    faults = [f"{entry.name}: {entry.fault}" for entry in entries if entry.fault]
    return "\n".join([_table(("checkpoint", "step", "committed (UTC)", "size", "attempt"), rows), *faults]), code


def _verify(arguments: argparse.Namespace) -> Answer:
    with _progress("checking", arguments) as progress:
        report = checkpoint.verify(arguments.path, **_given(arguments), progress=progress)
    if arguments.json:
        return {**dataclasses.asdict(report), "ok": report.ok}, 0 if report.ok else 1
    checked = f"{report.files} files, {report.tensors} tensors, {size_text(report.bytes)}"
    if report.ok:
        note = "" if report.digests else "; it has no digests, so only sizes and places were checked"
        note += "" if report.manifest_digest else "; its manifest has no digest of its own"
        return f"{report.path}: sound ({checked}{note})", 0
    found = [(fault.file, fault.tensor or "", fault.what) for fault in report.faults]
    head = f"{report.path}: {len(found)} {'fault' if len(found) == 1 else 'faults'} ({checked})"
    return f"{head}\n{_first(('file', 'tensor', 'fault'), found)}", 1


def _gather(arguments: argparse.Namespace) -> Answer:
    started = time.monotonic()
    with _progress("gathering", arguments) as progress:
        report = checkpoint.gather(arguments.path, **_given(arguments), progress=progress)
    elapsed = time.monotonic() - started
    if arguments.json:
        return {**dataclasses.asdict(report), "ok": True, "seconds": elapsed}, 0
    head = f"{report.tensors} tensors, {size_text(report.bytes)}, in {elapsed:.1f} s"
    return "\n".join([head, *report.files]), 0


def _diff(arguments: argparse.Namespace) -> Answer:
    with _progress("comparing", arguments) as progress:
        report = checkpoint.diff(arguments.path, **_given(arguments), progress=progress)
    code = 0 if report.ok else 1
    if arguments.json:
        found = [
            # JSON has no infinity, which is the difference between NaN and a number
            {**dataclasses.asdict(d), "max_difference": d.max_difference if math.isfinite(d.max_difference) else None}
            for d in report.differences
        ]
        return {**dataclasses.asdict(report), "differences": found, "ok": report.ok}, code
    compared = f"{report.tensors} tensors, {size_text(report.bytes)}"
    if report.ok:
        read = size_text(report.bytes_read)
        return f"equal ({compared}, of which {read} had to be read; verify looks at all files)", code
    rows = [(difference.section, difference.name, difference.what) for difference in report.differences]
    head = f"{len(rows)} {'difference' if len(rows) == 1 else 'differences'} ({compared})"
    return f"{head}\n{_first(('section', 'name', 'difference'), rows)}", code


# -- output -----------------------------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A line for each row, whatever texts of a checkpoint hold."""
    cells = [[_printable(cell, lines=False) for cell in row] for row in rows]
    return table([*columns], cells, to_the_right=("step", "size", "chunks"))


def _first(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    more = f"\nand {len(rows) - FAULTS_SHOWN} more (--json lists all)" if len(rows) > FAULTS_SHOWN else ""
    return _table(columns, rows[:FAULTS_SHOWN]) + more


@contextlib.contextmanager
def _progress(title: str, arguments: argparse.Namespace) -> Iterator[Callable[[int, int], None] | None]:
    """Context: a progress bar on the terminal, once the work has lasted a while; None if there is no terminal."""
    console = Console(stderr=True)
    if arguments.json or not console.is_terminal:
        yield None
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(title, total=None)
    started = time.monotonic()

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if not bar.live.is_started and time.monotonic() - started > PROGRESS_AFTER_S:
            bar.start()

    try:
        yield update
    finally:
        bar.stop()


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _say(text: str) -> None:
    print(_printable(text))


def _printable(text: str, *, lines: bool = True) -> str:
    """Escape control and unprintable characters as JSON does, since names of checkpoints and tensors may hold any.

    Args:
        lines: Keep line feeds.
    """
    hidden = (c for c in set(text) if not c.isprintable() and not (lines and c == "\n"))
    escaped = {ord(c): json.dumps(c)[1:-1] for c in hidden}
    return text.translate(escaped | {0x7F: "\\u007f"})  # which JSON allows


def _shown(value: int | None) -> str:
    return "unknown" if value is None else str(value)


def _layout(layout: Any, world_size: int) -> str:
    count = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
    if not isinstance(layout, dict):
        return count if layout is None else f"{count}, {layout}"
    sizes = {name: value for name, value in layout.items() if isinstance(value, int) and name != "rank"}
    return ", ".join([count, *(f"{name} {value}" for name, value in sizes.items())])


def _ranks(rank_bytes: dict[int, int], imbalance: float) -> str:
    sizes = [f"{rank}: {size_text(size)}" for rank, size in sorted(rank_bytes.items())]
    shown = sizes if len(sizes) <= RANKS_SHOWN else [*sizes[:RANKS_SHOWN], f"… ({len(sizes)} in all)"]
    return f"{', '.join(shown)}; the largest is {imbalance:.2f} × the mean"


# -- arguments --------------------------------------------------------------------------------------------------------


def _option(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError("it is not KEY=VALUE (and isn't shown, since it may hold a secret)")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _renaming(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is no dtype such as bfloat16")
    return dtype


def _size(text: str) -> int:
    try:
        return size(text, "the size")
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
