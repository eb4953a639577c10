"""Keeps results of operations between a forward and its second run: selective activation checkpointing, uncompiled.

torch's own contexts keep the tensors that the code goes on with. Where it changes one in place (attention scores that
are scaled and masked, ``nn.ReLU(inplace=True)``, torch's recurrent layers), the second run gets it changed already and
changes it again: torch raises an error, or where the change is made through a view with a version of its own, gradients
are wrong. Here a kept result is copied before it is changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
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
_REMEDY = 'activation_checkpointing="selective" keeps its results: use activation_checkpointing=True.'


class _Result:
    """A result's tensors, each as an alias or as a copy, with its version."""

    def __init__(self, value: Any) -> None:
        self.put(tree_map_only(Tensor, alias, value))

    def put(self, value: Any) -> None:
        self.value, self.versions = value, _versions(value)


class KeptResults:
    """The results of one forward that are kept: :class:`FirstRun` adds them, :class:`SecondRun` takes them."""

    def __init__(self, keeps: Keeps) -> None:
        self.keeps = keeps
        self._is_read = False
        self._results: dict[Any, list[_Result]] = defaultdict(list)
        self._by_memory: dict[int, list[_Result]] = defaultdict(list)

    def copy_those_in(self, value: Any) -> None:
        """Copy the results whose memory a value's tensors have, before it is changed in place, or may be."""
        for tensor in tree.tensors(value):
            for result in self._by_memory.pop(_memory(tensor), ()):
                result.put(tree_map_only(Tensor, Tensor.clone, result.value))

    def add(self, operation: Any, value: Any) -> None:
        result = _Result(value)
        self._results[operation].append(result)
        for tensor in tree.tensors(result.value):
            self._by_memory[_memory(tensor)].append(result)

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

    def take(self, operation: Any) -> Any:
        """The next result of an operation, which is forgotten.

        Raises:
            StepError: There is none, or it was changed after the forward.
        """
        if not self._results[operation]:
            raise StepError(f"A block runs {operation} for the backward more often than before. {_REMEDY}")
        result = self._results[operation].pop(0)
        if result.versions != _versions(result.value):
            raise StepError(f"A result of {operation} was changed in place after the block had returned. {_REMEDY}")
        return result.value


class FirstRun(TorchDispatchMode):
    """Context of the forward."""

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
                raise StepError(
                    f"A block calls {operation} on tensors that need gradients, which torch (2.11 to 2.14) computes"
                    ' wrongly while activation_checkpointing="selective" looks on: change them one by one, or use'
                    " activation_checkpointing=True."
                )
            self._kept.copy_those_in(written)
        value = operation(*args, **kwargs)
        if self._kept.keeps(operation, args, kwargs):
            self._kept.add(operation, value)
        return value


class SecondRun(TorchDispatchMode):
    """Context of the second run, in which kept results are given instead of computed."""

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


def _versions(value: Any) -> list[int]:
    return [each._version for each in tree.tensors(value)]


def _memory(tensor: Tensor) -> int:
    return int(local_tensor(tensor).untyped_storage()._cdata)
