"""Which blocks are found in each architecture, and how two stages share its parameters; nothing is trained.

::

    python -m tests.training.models.found_blocks before.json            # all of them in a few minutes
    python -m tests.training.models.found_blocks after.json before.json # and what differs from an earlier file
    python -m tests.training.models.found_blocks after.json --real # sizes of transformers' default configurations

A change of the search for blocks is compared so with the code before it. Architectures are built on meta.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_shard.errors import ShardError
from lightning_shard.pipeline.placement import place
from lightning_shard.plugin.assembly.placing import blocks_of, costs_of
from lightning_shard.plugin.settings import Settings
from tests.training.models import networks, transformers_models
from tests.training.models.overrides import override
from tests.training.models.sizes import MORE_SIZES, SIZES, STAGES, VARIANTS

LIMIT_S = 60
"""Of an architecture, in seconds of the processor."""


def built(name: str, family: str, model_type: str, *, real: bool = False) -> Any:
    """The LightningModule of an architecture, on meta, in the first sizes in which it can be built."""
    kind = transformers_models.class_of(name).config_class or transformers_models._config_class(model_type)
    if real:
        return transformers_models.Model(name, kind())
    own = override(name, model_type)
    settings = own.config if own else {}
    error: Exception | None = None
    for variant in VARIANTS:
        sizes = [*{**SIZES, **(MORE_SIZES if own else {}), **variant}.items(), *(STAGES.items() if own else ())]
        try:
            return transformers_models.Model(name, transformers_models._small(kind, sizes, settings))
        except Exception as one:
            error = error or one
    raise error or AssertionError


def found(module: Any) -> dict[str, Any]:
    """Names of the blocks, in short; the blocks of two stages, and their percentages of parameters and of cost."""
    blocks = blocks_of(module, Settings("auto", None, None), 2)
    assert blocks is not None
    blocks, cost = costs_of(module, blocks, runs=True)
    row: dict[str, Any] = {"blocks": _short(blocks.names)}
    if len(blocks) > 1:
        placed = place(cost, 2)
        row["counts"] = placed.counts
        for name in ("parameters", "cost"):
            values = [getattr(stage, name) for stage in placed.stages]
            row[name] = [round(100 * value / max(1, sum(values)), 1) for value in values]
    return row


def _short(names: tuple[str, ...]) -> list[str]:
    """Names of lists, each with how many of its modules follow each other."""
    short: list[list[Any]] = []
    for name in names:
        listed = name.rpartition(".")[0] if name.rpartition(".")[2].isdigit() else name
        if short and short[-1][0] == listed:
            short[-1][1] += 1
        else:
            short.append([listed, 1])
    return [f"{name} × {number}" for name, number in short]


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("earlier", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="parts of names, with commas between them")
    parser.add_argument("--real", action="store_true", help="transformers' default configurations")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers_models.bound_memory()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    rows: dict[str, Any] = json.loads(arguments.results.read_text()) if arguments.results.exists() else {}
    own = {} if arguments.real else dict.fromkeys(networks.NETWORKS, ("", ""))
    others = {name: (family, kind) for name, (family, kind, _) in transformers_models.architectures().items()}
    for name, (family, model_type) in {**own, **others}.items():
        if name in rows or not any(part in name for part in arguments.only.split(",")):
            continue
        try:
            with at_most(LIMIT_S):
                with torch.device("meta"):
                    module = built(name, family, model_type, real=arguments.real) if family else networks.make(name)
                rows[name] = found(module)
        except ShardError as error:
            rows[name] = {"refused": str(error)}
        except Exception as error:
            rows[name] = {"not built": f"{type(error).__name__}: {error}".partition("\n")[0][:160]}
        arguments.results.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(rows)} architectures, {sum('blocks' in row for row in rows.values())} with blocks")
    if arguments.earlier:
        before = json.loads(arguments.earlier.read_text())
        for name, row in rows.items():
            if name in before and row != before[name]:
                print(f"{name}\n  before: {before[name]}\n  now:    {row}")


if __name__ == "__main__":
    main()
