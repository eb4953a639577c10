"""Starting from other programs' files: plain Lightning's ``.ckpt``, a safetensors file, a transformers folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl

from lightning_shard.checkpoint import Checkpoint, StoredTensor
from lightning_shard.errors import StateMismatchError

WEIGHTS_ALONE = "lightning_shard_weights_alone"
"""A key of what is loaded: there is no optimizer's state, and none is missing."""


def weights_alone(stored: Checkpoint) -> dict[str, Any]:
    """A checkpoint for Lightning of a file that has weights only: training begins with them, at its first step."""
    return {
        WEIGHTS_ALONE: True,
        "pytorch-lightning_version": pl.__version__,
        "state_dict": dict(stored),
        "epoch": 0,
        "global_step": 0,
        "optimizer_states": [],
        "lr_schedulers": [],
    }


def with_prefix(stored: Mapping[str, StoredTensor], names: set[str]) -> dict[str, StoredTensor]:
    """Stored tensors by the names that a module has for them, if these have one beginning more.

    So it is with a transformers model's file, where a LightningModule holds the model as ``self.model``.
    """
    if not names.isdisjoint(stored) or not stored:
        return dict(stored)
    first = next(iter(stored))
    for name in sorted(names):
        prefix = name.removesuffix(first)
        if prefix != name and prefix.endswith(".") and all(prefix + key in names for key in stored):
            return {prefix + key: value for key, value in stored.items()}
    return dict(stored)


def name_numbered(
    tensors: Mapping[str, StoredTensor], states: Sequence[dict[str, Any]], names: Sequence[Sequence[Sequence[str]]]
) -> tuple[dict[str, StoredTensor], list[dict[str, Any]]]:
    """Optimizers' state that plain torch numbered by parameter, named by it.

    Args:
        tensors: By ``"{optimizer}/{number}/{key}"``.
        states: Each optimizer's values that aren't tensors, and its groups.
        names: Of all stages' parameters, for each optimizer and group, in the order of ``configure_optimizers``.

    Raises:
        StateMismatchError: Other groups, or others' sizes.
    """
    named: list[dict[str, Any]] = []
    by_number: list[dict[str, str]] = []
    for index, (state, groups) in enumerate(zip(states, names, strict=True)):
        saved = [group["params"] for group in state["param_groups"]]
        if [len(numbers) for numbers in saved] != [len(group) for group in groups]:
            raise StateMismatchError(
                f"The checkpoint's optimizer {index} has groups of {[len(numbers) for numbers in saved]} parameters,"
                f" and configure_optimizers made ones of {[len(group) for group in groups]}: make the same groups."
            )
        find = {number: name for numbers, group in zip(saved, groups) for number, name in zip(numbers, group)}
        by_number.append(find)
        described = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], groups)]
        values = {find[number]: entries for number, entries in state["values"].items()}
        named.append({**state, "values": values, "param_groups": described})
    paths = {path: path.split("/", 2) for path in tensors}
    found = {f"{i}/{by_number[int(i)][n]}/{key}": tensors[path] for path, (i, n, key) in paths.items()}
    return found, named
