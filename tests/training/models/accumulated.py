"""What is expected of a module whose loss mixes the samples of a batch: one process that accumulates gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.testing.alike import OneProcess
from lightning_shard.testing.compare import Moment, Record


def accumulating(
    alone: OneProcess,
    make_module: Callable[[], Any],
    make_batches: Callable[[], Iterable[Any]],
    parts: int,
    timeout_s: float,
) -> OneProcess:
    """``alone``, to be compared with a run on one process of each batch in ``parts``, their gradients accumulated."""
    steps = parts * sum(1 for _ in make_batches())
    limits = dict.fromkeys(("accumulate_grad_batches", "limit_val_batches", "limit_predict_batches"), parts)
    settings = {**alone._run.trainer, **limits}
    cut = partial(in_parts, make_batches, parts)
    expected = OneProcess(make_module, cut, steps=steps, trainer=settings, timeout_s=timeout_s, seed=alone._run.seed)
    expected.record = _of_batches(expected.record, parts)
    expected._run = alone._run
    return expected


def in_parts(make_batches: Callable[[], Iterable[Any]], parts: int) -> Iterator[Any]:
    for batch in make_batches():
        yield from tree.split(batch, parts)


def _of_batches(record: Record, parts: int) -> Record:
    """The record of whole batches, each of which was run in so many."""
    found: Record = {}
    for name, moment in record.items():
        kind, _, number = name.rpartition(" ")
        if not number.isdigit():
            found[name] = moment
        elif int(number) % parts == parts - 1:
            numbers = range(int(number) - parts + 1, int(number) + 1)
            found[f"{kind} {int(number) // parts}"] = _together([record[f"{kind} {each}"] for each in numbers])
    last = [moment for name, moment in found.items() if name.startswith("training batch")][-1]
    found["the end of training"].logs.update(last.logs)
    return found


def _together(moments: list[Moment]) -> Moment:
    """Samples joined, losses added (Lightning has divided them by the number of parts), logs averaged."""
    *_, last = moments
    outputs: dict[str, Any] = {}
    for key, value in last.outputs.items():
        values = [moment.outputs[key] for moment in moments]
        outputs[key] = torch.cat(values) if isinstance(value, Tensor) else sum(values)
    logs = {key: sum(moment.logs[key] for moment in moments) / len(moments) for key in last.logs}
    return replace(last, outputs=outputs, logs=logs)
