"""Plans of one network share what was counted of it: a count depends on few of a plan's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from lightning_shard import tree
from lightning_shard.dryrun import planning
from lightning_shard.dryrun.counting.model import Model
from lightning_shard.dryrun.search import workshop
from recipes.gpt import LanguageModel

_COUNTED: dict[str, Any] = {}


def _once(count: Callable[..., Any]) -> Callable[..., Any]:
    """As ``count``, which counts a GPT once for all layouts that have the counts in common; other modules each time."""

    def counted(model: Model, *what: Any) -> Any:
        if not isinstance(model.module, LanguageModel):
            return count(model, *what)
        held = [(name, t.shape, t.dtype) for name, t in model.module.state_dict().items()]
        settings, sample = model.settings, [tensor.shape[1:] for tensor in tree.tensors(model.batch)]
        cut = settings.tensor_parallel_plan if what[:1] != (1,) else None
        kind = type(model.module), model.precision, model.device_type, settings.gathered_dtype
        key = repr((count.__name__, kind, held, sample, cut, model.blocks, what))
        if key not in _COUNTED:
            _COUNTED[key] = count(model, *what)
        return _COUNTED[key]

    return counted


@pytest.fixture(scope="module", autouse=True)
def plans_share_counts() -> Iterator[None]:
    counts = {"count_each": _once(planning.count_each), "count_two_parts": _once(planning.count_two_parts)}
    with (
        mock.patch.multiple(planning, **counts, ask=_once(planning.ask)),
        mock.patch.multiple(workshop, **counts),
    ):
        yield
