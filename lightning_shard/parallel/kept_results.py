"""Keeps results of operations between a forward and its second run: selective activation checkpointing, uncompiled.

torch's own contexts keep the tensors that the code goes on with. Where it changes one in place (attention scores that
are scaled and masked, ``nn.ReLU(inplace=True)``, torch's recurrent layers), the second run gets it changed already and
changes it again: torch raises an error, or where the change is made through a view with a version of its own, gradients
are wrong. Here a kept result is copied before it is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import SAC_IGNORED_OPS

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.sharding import local_tensor
from lightning_shard.torch_private import alias, written_by

Keeps = Callable[[Any, Any, Any], bool]
"""Whether to keep the result of an operation with these arguments, positional and by name."""


@dataclass
class _Result:
    """A result's tensors, each as an alias, with its version; a copy has none to compare."""

    value: Any
    versions: list[int | None]

    @classmethod
    def of(cls, value: Any) -> _Result:
        kept = tree_map_only(Tensor, alias, value)
        return cls(kept, [each._version for each in tree.tensors(kept)])

    def copy(self) -> None:
        self.value = tree_map_only(Tensor, Tensor.clone, self.value)
        self.versions = [None for _ in self.versions]

    def is_as_kept(self) -> bool:
        return all(v in (None, each._version) for each, v in zip(tree.tensors(self.value), self.versions))


@dataclass
class KeptResults:
    """The results of one forward.

    Args:
        keeps: Which are kept.
    """

    keeps: Keeps
    _is_read: bool = False
    _results: dict[Any, list[_Result]] = field(default_factory=lambda: defaultdict(list))
    _by_memory: dict[int, list[_Result]] = field(default_factory=lambda: defaultdict(list))

    def first_run(self) -> TorchDispatchMode:
        """Context of the forward."""
        return _FirstRun(self)

    def second_run(self) -> TorchDispatchMode:
        """Context of the second run, in which kept results are given instead of computed."""
        return _SecondRun(self)

    def begin_second_run(self) -> None:
        """
        Raises:
            StepError: There was one, which has forgotten what it read, and ended where no more was needed.
        """
        if self._is_read:
            raise StepError(
                "A second backward, or gradients taken twice, go through a block whose results"
                ' activation_checkpointing="selective" keeps for one: use activation_checkpointing=True.'
            )
        self._is_read = True
        self._by_memory.clear()

    def copy_those_in(self, value: Any) -> None:
        """Copy the results whose memory a value's tensors have, before it is changed in place, or may be."""
        for tensor in tree.tensors(value):
            for result in self._by_memory.pop(_memory(tensor), ()):
                result.copy()

    def add(self, operation: Any, value: Any) -> None:
        result = _Result.of(value)
        self._results[operation].append(result)
        for tensor in tree.tensors(result.value):
            self._by_memory[_memory(tensor)].append(result)

    def take(self, operation: Any) -> Any:
        """The next result of an operation, which is forgotten.

        Raises:
            StepError: There is none, or it was changed after the forward.
        """
        if not self._results[operation]:
            raise StepError(f"A block runs {operation} for the backward more often than before. {_REMEDY}")
        result = self._results[operation].pop(0)
        if not result.is_as_kept():
            raise StepError(f"A result of {operation} was changed in place after the block had returned. {_REMEDY}")
        return result.value


_REMEDY = 'activation_checkpointing="selective" keeps its results: use activation_checkpointing=True.'


_SEVERAL = (
    "A block calls {operation} on tensors that need gradients, which torch (2.11 to 2.14) computes wrongly while"
    ' activation_checkpointing="selective" looks on: change them one by one, or use activation_checkpointing=True.'
)


class _FirstRun(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation in SAC_IGNORED_OPS:
            return operation(*args, **kwargs)
        for place, name in written_by(operation):
            written = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(written, (list, tuple)) and any(each.requires_grad for each in tree.tensors(written)):
                raise StepError(_SEVERAL.format(operation=operation))
            self._kept.copy_those_in(written)
        value = operation(*args, **kwargs)
        if self._kept.keeps(operation, args, kwargs):
            self._kept.add(operation, value)
        return value


class _SecondRun(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self._kept = kept

    def __enter__(self) -> Any:
        self._kept.begin_second_run()
        return super().__enter__()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if operation not in SAC_IGNORED_OPS and self._kept.keeps(operation, args, kwargs):
            return self._kept.take(operation)
        return operation(*args, **kwargs)


def _memory(tensor: Tensor) -> int:
    return int(local_tensor(tensor).untyped_storage()._cdata)
