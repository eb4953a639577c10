"""Traces the user's code around the blocks, operation by operation, where results of operations cross a cut.

Traces opaque functions as one operation each: autograd functions, ``torch.func`` transforms, scripted code.

torch's function modes see the operations inside ``Function.forward``, where gradients are disabled, and not the
function itself. Inside a transform, such as ``vmap``, or a scripted function, tensors lose their class, and so their
mark as unknown. So while a thread traces, such calls are patched to report to its trace as one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.jit import ScriptFunction, ScriptModule
from torch.overrides import TorchFunctionMode

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Passage
from lightning_shard.pipeline.dataflow.functions import arguments_read, leaves, writes
from lightning_shard.pipeline.dataflow.messages import Key
from lightning_shard.pipeline.dataflow.taint import (
    REMEDY,
    Hollow,
    Origin,
    Unknown,
    base_of,
    collecting_unknown,
    first_unknown,
    mark,
    memory_of,
    miss,
    of_thread,
    storage_of,
)
from lightning_shard.torch_private import TRANSFORMS, function_mode, is_in_function, replaced

if TYPE_CHECKING:
    from lightning_shard.pipeline.dataflow.fetching import Ledger

_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)


class Trace(TorchFunctionMode):
    """Counts the operations of the user's code outside of the blocks, and substitutes received values for results.

    Each call of a torch function that returns or changes a tensor counts as one operation. So does each call of a part
    around the blocks, and of an opaque function, as a whole. The numbering is the same on all
    stages.
    """

    def __init__(self, passage: Passage) -> None:
        super().__init__()
        self.passage = passage
        self._suspended = 0
        self._off = False
        #: By their address, which these storages keep from being used anew: memory that unknown values were written to.
        self._written: dict[int, tuple[torch.UntypedStorage, Unknown, Origin, tuple[str, ...]]] = {}
        self._of_own = False
        self._late: tuple[str, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._suspended or (not torch.is_grad_enabled() and self.passage.differentiates and is_in_function()):
            return func(*args, **kwargs)
        if func in _BACKWARDS:
            raise StepError(
                f"The step takes gradients itself ({func.__name__}), and with several pipeline stages they would be of"
                " one stage only: use pipeline_parallel_size=1.",
                breaks=4,
            )
        self.mark_written_aliases((args, kwargs))
        name = getattr(func, "__name__", "")
        written = [*args[: writes(name)], *leaves(kwargs.get("out", ()))]
        changed = [leaf for leaf in written if isinstance(leaf, Tensor)]
        ledger, own = self.passage.ledger, False
        if ledger is not None:
            ledger.is_written(changed)
            own = ledger.is_own(leaves((args, kwargs)))
        result = _computed(func, args, kwargs, ledger)
        result = self._count_operation(name, result, changed, own=own)
        if ledger is not None:
            for leaf in changed:
                if isinstance(leaf, Unknown) and not isinstance(leaf, Hollow):
                    self._written[memory_of(leaf)] = storage_of(leaf), leaf, leaf.origin, leaf.late
        return result

    def mark_written_aliases(self, value: Any) -> None:
        """Mark known tensors as unknown if an unknown value was written to their memory through another view."""
        for leaf in leaves(value) if self._written else ():
            if type(leaf) is not Tensor or (written := self._written.get(address := memory_of(leaf))) is None:
                continue
            _, source, origin, late = written
            if not isinstance(source, Unknown) and memory_of(source) == address:  # fetched since, into this memory
                del self._written[address]
                continue
            unknown: Any = mark(leaf, origin)
            unknown.late = late

    def begins(self, args: Any, name: str = "The step", *, is_own: bool = False) -> None:
        """A part around the blocks, or an opaque function, begins: it counts as one operation on ``args``.

        Args:
            is_own: Whether it has parameters that no earlier stage has.
        """
        if not self._suspended:
            self.mark_written_aliases(args)
            ledger = self.passage.ledger
            if ledger is not None:
                operands = tree.leaves(args)
                self._of_own = is_own or ledger.is_own(operands)
                ledger.knows_operands(name, operands, combines=self._of_own)
                self._late = ledger.late([leaf for leaf in operands if isinstance(leaf, Unknown)])
        elif self.passage.ledger is not None:
            self.passage.ledger.knows_operands(name, tree.leaves(args))
        self.suspend()

    def ends(self, name: str, result: Any, *, unknown: Sequence[Unknown] = ()) -> Any:
        """The part or function has returned; returns what the user's code continues with.

        Args:
            name: The operation's name.
            result: What it returned.
            unknown: Unknown values that the result is computed from, if its class doesn't show that it is unknown.
        """
        for leaf in tree.tensors(result) if unknown else ():
            mark(leaf, unknown[0].origin)
        if self._suspended == 1:  # still suspended: copies made here are no operations of the network
            for leaf in tree.tensors(result) if self._late else ():
                if isinstance(leaf, Unknown) and not isinstance(leaf, Hollow):
                    leaf.late = leaf.late or self._late
            result = self._count_operation(name, result, [], own=self._of_own)
        self.resume()
        return result

    def _count_operation(self, name: str, result: Any, changed: list[Tensor], *, own: bool) -> Any:
        passage = self.passage
        given = tree.tensors(result)
        if own and passage.ledger is not None:
            passage.ledger.comes_of_own([*given, *changed])
        if not given and not changed:
            return result
        number = passage.counted.number
        passage.counted = passage.counted.and_then(name)
        written = [*changed, *(base for base in map(base_of, changed) if base is not None)]
        new: dict[int, Tensor] = {}
        for place, leaf in enumerate([*given, *written]):
            if id(leaf) not in new:
                in_place = any(leaf is other for other in written)
                key: Key = ("operation", number, place, name)
                new[id(leaf)] = passage.produced(key, leaf, written=in_place)
        if all(new[id(leaf)] is leaf for leaf in given):
            return result
        return tree.map_leaves(lambda leaf: new.get(id(leaf), leaf), result)

    def suspend(self) -> None:
        """Stop counting: a block, part or function begins, whose inner operations don't count."""
        self._suspended += 1
        if self._suspended == 1 and function_mode() is self:
            self.__exit__(None, None, None)
            self._off = True

    def resume(self) -> None:
        self._suspended -= 1
        if self._suspended == 0 and self._off:
            self._off = False
            self.__enter__()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the user's step, in which calls of opaque functions on this thread are reported to it, too."""
        if self.passage.ledger is not None:
            self.passage.ledger.begin()
        self.__enter__()
        of_thread.trace = self
        try:
            with replaced(*_PATCHED):
                yield
        finally:
            of_thread.trace = None
            if not self._off:
                self.__exit__(None, None, None)


def _computed(func: Any, args: Any, kwargs: Any, ledger: Ledger | None) -> Any:
    """Call one of torch's functions; detects unknown tensors that it reads as numbers.

    Most functions accept tensors where numbers are expected (``torch.zeros(n)``, ``full(…, x)``, ``clamp(…, 0, x)``),
    and read them without calling ``__torch_function__``: then the values are missing.
    """
    name = getattr(func, "__name__", "")
    unknown = first_unknown(arguments_read(name, args, kwargs))
    if unknown is None:
        return func(*args, **kwargs)
    sentence = f"{name} takes {unknown.origin.text} as a number. {REMEDY}"
    try:
        result = func(*args, **kwargs)
    except StepError:
        raise  # already a message of ours
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        miss([unknown], f"{sentence[: -len(REMEDY)]}It gives: {error}. {REMEDY}")
        return func(*args, **kwargs)
    given = {id(leaf) for leaf in leaves((args, kwargs))}
    if first_unknown((args, kwargs) if ledger is None else ledger.substituted((args, kwargs))) is None:
        return result  # it has been fetched
    if any(
        isinstance(leaf, Tensor) and not isinstance(leaf, Unknown) and id(leaf) not in given for leaf in leaves(result)
    ):
        miss([unknown], sentence)
        return func(*args, **kwargs)
    return result


_apply: Any = Function.__dict__["apply"]


def _reporting_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    call = _apply.__get__(None, cls)
    trace = of_thread.trace
    if trace is None:
        return call(*args, **kwargs)
    trace.begins((args, kwargs))
    return trace.ends(cls.__name__, call(*args, **kwargs), unknown=[])


def _reporting(call: Callable[..., Any]) -> Callable[..., Any]:
    def reporting(*args: Any, **kwargs: Any) -> Any:
        trace = of_thread.trace
        if trace is None:
            return call(*args, **kwargs)
        trace.begins((args, kwargs))
        with collecting_unknown((args, kwargs)) as unknown:  # they may also come from a closure
            result = call(*args, **kwargs)
        return trace.ends(call.__name__, result, unknown=unknown)

    return reporting


_PATCHED: list[tuple[Any, str, Any]] = [
    (Function, "apply", classmethod(_reporting_apply)),
    *(
        (holder, name, _reporting(getattr(holder, name)))
        for holder, name in [*TRANSFORMS, *((kind, "__call__") for kind in (ScriptFunction, ScriptModule))]
    ),
]
"""Each patched function: its holder, its name, and the replacement that reports to the trace."""
