"""What a call of the network leaves in attributes and buffers, for code that runs between calls on all ranks.

Each rank has the modules of all stages, but sees what its own ones keep only. So after a call ranks tell each other:
of blocks and parts the rank that holds them, and of modules around all blocks the last stage's, which runs their code
to its end. Numbers, texts and small tensors are sent. Larger tensors are unknown elsewhere, and objects are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from lightning_shard.pipeline.dataflow.kept import Attributes, Name, put_into
from lightning_shard.pipeline.dataflow.taint import Unknown
from lightning_shard.pipeline.stages.stage import Stage, modules_of
from lightning_shard.state.patch import Unsendable, received, sent

_SENT = 1024
"""The most elements of a tensor that is sent."""

Told = Mapping[Name, tuple[bool, Any]]
"""Values, and whether they are the objects of before, changed in place."""


class KeptInCalls:
    """Of one rank, in one step.

    Args:
        stages: This rank's.
        place: Makes what this rank has of a tensor that another rank keeps, sent or not, given words for it.

    Attributes:
        told: What this rank tells others of the last call.
    """

    def __init__(self, stages: Sequence[Stage], place: Callable[[Any, str], Tensor]) -> None:
        self._last = stages[-1]
        self._place = place
        self._root = stages[-1].entrances[0]
        self._own = [*modules_of(self._root, stages[-1])]
        self._others = [named for stage in stages[:-1] for named in modules_of(self._root, stage)]
        if stages[-1].is_last:
            self._own += [named for named in self._root.named_modules() if named[1] in stages[-1].entrances]
        self._before = Attributes()
        self._taken: dict[Name, Any] = {}
        self.told: dict[Name, tuple[bool, Any]] = {}

    def stages_begin(self) -> None:
        """Before this rank's stages run; none of their views is in place."""
        self._before = Attributes([*self._own, *self._others])

    def stages_end(self) -> None:
        self.told = {}
        for each in self._before.changed():
            with suppress(Unsendable):
                value = received(lambda held: held.cpu() if isinstance(held, Tensor) else held, sent(each.value, _SENT))
                self.told[each.module, each.name] = each.in_place, value

    def take(self, told: Told) -> None:
        """Set what another rank has told, or of a rank with several stages another one than the last."""
        own = {path for path, _ in self._own}
        for (path, name), (in_place, value) in told.items():
            if path in own:
                continue
            taken = received(partial(self._placed, path, name), value)
            before = self._taken.get((path, name))
            if in_place and _write(before, taken):
                taken = before
            self._taken[path, name] = taken
            self._last.keep(self._root.get_submodule(path), name, taken)

    def _placed(self, path: str, name: str, tensor: Any) -> Tensor:
        return self._place(tensor, f"what {path or 'the LightningModule'} keeps as {name}, on another stage,")


def _write(held: Any, value: Any) -> bool:
    """Give what code may have read before a call the values of after it; returns whether it has them now."""
    if not isinstance(held, Tensor):
        return held is not None and put_into(held, value)
    if isinstance(held, Unknown) or isinstance(value, Unknown) or held.shape != value.shape:
        return False
    held.copy_(value)
    return True
