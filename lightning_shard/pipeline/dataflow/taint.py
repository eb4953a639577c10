"""Taint tracking: marks values that aren't known on this stage, because another stage's parameters determine them.

The user's code runs on every stage, also around blocks of other stages, and most of what it computes there is
discarded. So computing with unknown values is allowed, through any operation and in any dtype: the result is an
:class:`Unknown` tensor, which records its origin. An unknown value is missing where it would count: as an input of a
block on this stage, in a loss, a log or a result, and where Python needs it as a number. A missing value is requested
from the previous stage (``crossing.py``), or the step is refused.

Unknown tensors are recognised by their class. So known tensors have no overhead: no values are read, and the device is
not synchronised.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_shard import tree
from lightning_shard.dense import has_no_memory
from lightning_shard.pipeline.dataflow.functions import (
    ABOUT,
    AS_NUMBERS,
    AS_TEXT,
    OF_VALUES,
    SHAPED_BY_VALUES,
    SIZED_BY_NUMBERS,
    TAKES_SOME,
    TO_INTEGERS,
    arguments_read,
    leaves,
    without_graph,
    writes,
)
from lightning_shard.sharding import put_attributes
from lightning_shard.torch_private import is_in_transform, set_version, swap

if TYPE_CHECKING:
    from lightning_shard.pipeline.dataflow.trace import Trace

REMEDY = (
    "A pipeline stage knows what its own blocks and earlier stages compute, and nothing that needs a later stage's"
    " parameters: move this code into a block or behind the last one, use pipeline_parallel_size=1, or report this"
    " network as an issue."
)
_REMEDY_IN_HOOKS = (
    "With several pipeline stages, a stage has its own parameters only between steps:"
    " trainer.strategy.gather_full_parameters(), called on all ranks, gives rank 0 all of them, and a checkpoint has"
    " the buffers too; or use pipeline_parallel_size=1."
)


def said_of_hook(sentence: str) -> str:
    """The same message, where it isn't a step that misses a value but a hook."""
    said = sentence.removesuffix(REMEDY)
    return said.replace("The step", "A hook", 1) + _REMEDY_IN_HOOKS if said != sentence else sentence


@dataclass(frozen=True)
class Origin:
    """Why a value is unknown.

    Attributes:
        text: A noun phrase for messages: "what is computed from …".
        on_missing: Called with unknown values that are needed here, and the error message; fetches them, or raises.
    """

    text: str
    on_missing: Callable[[Sequence[Unknown], str], None]

    @property
    def at_end(self) -> str:
        """The text without its comma, for the end of a clause."""
        return self.text.rstrip(",")


class _OfThread(threading.local):
    """
    Attributes:
        found: Unknown tensors that are collected.
        trace: Of a step whose operations are counted.
    """

    found: list[Unknown] | None = None
    trace: Trace | None = None


of_thread = _OfThread()


class Unknown(torch.Tensor):
    """A tensor whose values aren't known on this stage: NaN, without a graph.

    Attributes:
        key: Its name (``messages.Key``), if it has one.
        late: The parameters of later stages that it is computed from, as far as that is followed.
        needs: Whether the value requires gradients where it is known.
        base: The unknown tensor whose memory it shares.
        offset: Where it begins there, in elements.
    """

    origin: Origin
    key: Any = None
    late: tuple[str, ...] = ()
    needs: bool = False
    base: Tensor | None = None
    offset: int = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        ledger = of_thread.trace.passage.ledger if of_thread.trace is not None else None
        if ledger is not None:
            args, kwargs = ledger.substituted((args, kwargs))
        attribute = func.__self__.__name__ if name == "__get__" else ""
        if name in ABOUT or (attribute and attribute not in OF_VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in ("register_hook", "retain_grad") and isinstance(args[0], Unknown) and args[0].needs:
            # the stage that has the value does it
            return RemovableHandle(OrderedDict()) if name == "register_hook" else None
        given = leaves(args) + leaves(kwargs) if kwargs else leaves(args)
        taken = given if name not in TAKES_SOME else leaves(arguments_read(name, args, kwargs))
        unknown = []
        for leaf in taken:
            if isinstance(leaf, Unknown) and (leaf.base is None or not is_view_of_known(leaf)):
                unknown.append(leaf)
        if not unknown:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if of_thread.found is not None:
            of_thread.found += unknown
        origin = unknown[0].origin
        is_written = bool(args) and writes(name)
        if is_written and isinstance(args[0], Unknown if ledger is None else Hollow) and has_no_memory(args[0]):
            return args[0]  # the user's code initialises or changes another stage's parameter: ignored
        if name in AS_TEXT:
            return f"<{origin.at_end}: not known on this pipeline stage>"
        if name in AS_NUMBERS:
            miss([unknown[0]], f"The step asks for {origin.text} as a number ({name}). {REMEDY}")
            return func(*args, **kwargs)
        if _is_shaped_by_values(name, args, kwargs) or _selects(name, args):
            miss(unknown, f"The size of what {name} gives depends on {origin.at_end}. {REMEDY}")
            return func(*args, **kwargs)
        written = [leaf for leaf in (*args[:is_written], *leaves(kwargs.get("out", ()))) if isinstance(leaf, Tensor)]
        late: tuple[str, ...] = ()
        if ledger is not None:
            into_known = any(not isinstance(leaf, Unknown) for leaf in written)
            if ledger.knows_operands(name, given, into_known=into_known):
                return func(*args, **kwargs)
            late = ledger.late(unknown)
        needs = False
        if torch.is_grad_enabled() and name != "detach" and attribute != "data":
            for leaf in given:
                if isinstance(leaf, Tensor) and (leaf.needs if isinstance(leaf, Unknown) else leaf.requires_grad):
                    needs = True
        try:
            with without_graph() if ledger is not None else torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except (RuntimeError, IndexError, ValueError) as error:
            miss(unknown, f"{name} can't be computed of {origin.at_end} ({error}). {REMEDY}")
            return func(*args, **kwargs)
        for leaf in written:
            _mark_written(leaf, origin, late)
        with torch._C.DisableTorchFunctionSubclass():
            known = [*map(id, given)]  # arguments that are returned keep their state
            for leaf in leaves(result):
                if isinstance(leaf, Tensor) and id(leaf) not in known:
                    if name in TO_INTEGERS and not leaf.dtype.is_floating_point and not has_no_memory(leaf):
                        leaf.zero_()  # NaN cast to an index is out of range, which on CUDA kills the process
                    one: Any = mark(leaf, origin)
                    one.late, one.needs, one.base = late, needs, None if is_in_transform(leaf) else leaf._base
            return result if ledger is None else tree.map_leaves(partial(_apart, known, unknown), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Unknown:
        return self


class Hollow(Unknown):
    """A placeholder for a parameter that another stage holds: shape and dtype, expanded from a single NaN.

    Its ``grad`` is ``None``, or where :meth:`given_gradients` says so an unknown gradient, if it trains.
    """

    fqn: str
    holder: int
    trains: bool
    stands_for_parameter = True

    @property
    def needs(self) -> bool:  # type: ignore[override]
        return self.trains

    _gives: Callable[[], bool] | None = None

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        if not self.trains or Hollow._gives is None or not Hollow._gives():
            return None
        nan = _nan_like(self, self.device)
        nan.origin = Origin(f"the gradient of {self.fqn}, which stage {self.holder} holds,", self.origin.on_missing)
        nan.fqn, nan.holder, nan.trains = self.fqn, self.holder, False
        return nan

    @grad.setter
    def grad(self, _: Tensor | None) -> None:
        """Ignored: the stage that holds the parameter sets its gradient."""

    @grad.deleter
    def grad(self) -> None:
        """Ignored, as setting it is."""

    @staticmethod
    @contextmanager
    def given_gradients(gives: Callable[[], bool] | None) -> Iterator[None]:
        """Context in which ``grad`` isn't ``None`` where ``gives`` returns true."""
        before, Hollow._gives = Hollow._gives, gives
        try:
            yield
        finally:
            Hollow._gives = before

    @staticmethod
    def of(
        parameter: Tensor,
        device: torch.device,
        name: str,
        stage: int,
        on_missing: Callable[[Sequence[Unknown], str], None],
    ) -> Hollow:
        hollow = _nan_like(parameter, device)
        hollow.origin = Origin(f"what is computed from {name}, which stage {stage} holds,", on_missing)
        hollow.fqn, hollow.holder, hollow.trains = name, stage, parameter.requires_grad
        put_attributes(hollow, parameter.__dict__)
        return hollow

    def as_parameter(self) -> Hollow:
        """Another one that passes for a parameter, which trains if the one that it stands for does."""
        one: Any = _nan_like(self, self.device)
        one._is_param = True
        put_attributes(one, self.__dict__)
        with torch._C.DisableTorchFunctionSubclass():
            one.requires_grad_(self.trains)
        return one  # type: ignore[no-any-return]


def _nan_like(tensor: Tensor, device: torch.device) -> Hollow:
    nan = torch.full((), torch.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)
    return torch.Tensor._make_subclass(Hollow, nan)


def _apart(known: Collection[int], operands: Sequence[Unknown], leaf: Any) -> Any:
    """A result in the same memory, which is no view, and which no node of autograd refers to: it may be fetched.

    Args:
        known: The ids of the arguments, which stay.
        operands: Unknown ones; the result may share the memory of one.
    """
    if not isinstance(leaf, Unknown) or id(leaf) in known or is_in_transform(leaf):
        return leaf
    with without_graph():
        one: Any = Tensor._make_subclass(Unknown, leaf.detach())
        one.origin, one.late = leaf.origin, leaf.late
        one.needs = leaf.needs and (leaf.is_floating_point() or leaf.is_complex())
        for source in operands:
            if isinstance(source, Hollow) or is_in_transform(source) or has_no_memory(source):
                continue
            if memory_of(source) == memory_of(one):
                one.base = source if source.base is None else source.base
                one.offset = int(one.storage_offset() - one.base.storage_offset())
    return one


def put_values(unknown: Unknown, values: Tensor) -> None:
    """Make an unknown tensor known: all variables that refer to it see these values, with their graph.

    Where C++ holds the tensor too, such as for an activation checkpoint, it is overwritten.
    """
    with torch._C.DisableTorchFunction():
        size, stride = unknown.size(), unknown.stride()
        overlaps = any(length > 1 and step == 0 for length, step in zip(size, stride))
        real = (values.new_empty(size) if overlaps else values.new_empty_strided(size, stride)).copy_(values)
        if not real.is_inference():  # nobody has written to it
            set_version(real, unknown._version)
        put_tensor(unknown, real)


def is_view_of_known(leaf: Unknown) -> bool:
    """Makes an unknown tensor a view of the one whose memory it shares, if that is known by now."""
    base = leaf.base
    if base is None or isinstance(base, Unknown):
        return False
    with torch._C.DisableTorchFunction():
        is_shared = memory_of(base) == memory_of(leaf)
        if is_shared and leaf._base is base:
            leaf.__class__ = Tensor  # type: ignore[assignment]
            return True
        if base.dtype != leaf.dtype or leaf.is_conj() or leaf.is_neg() or leaf.offset < 0:
            return False
        offset = leaf.storage_offset() if is_shared else base.storage_offset() + leaf.offset
        with torch.set_grad_enabled(leaf.needs):
            view = base.as_strided(leaf.size(), leaf.stride(), offset)
        put_tensor(leaf, view if leaf.needs else view.detach())
    return True


def put_tensor(unknown: Unknown, real: Tensor) -> None:
    """Put this tensor in the place of an unknown one."""
    with torch._C.DisableTorchFunction():
        for name in ("origin", "key", "late", "needs", "base", "offset"):
            unknown.__dict__.pop(name, None)  # other attributes are the user's
        unknown.__class__ = Tensor  # type: ignore[assignment]
        if unknown._use_count() == 1:  # type: ignore[attr-defined]
            swap(unknown, real)
        else:
            _overwrite(unknown, real)


def mark(tensor: Tensor, origin: Origin) -> Tensor:
    """Mark a new tensor as unknown, in place, and return it.

    Raises:
        StepError: It is of another class, such as a DTensor, so results computed from it couldn't be tracked.
    """
    if isinstance(tensor, Unknown):
        return tensor
    if type(tensor) is not Tensor:
        said = f"A {type(tensor).__name__} is made of {origin.text} on a stage that doesn't know it. {REMEDY}"
        origin.on_missing((), said)
    tensor.__class__ = Unknown  # torch's lazy parameters change their class likewise
    tensor.origin = origin  # type: ignore[attr-defined]
    return tensor


def fill(tensor: Tensor, values: Tensor) -> None:
    """Make a possibly unknown tensor known, in place, with these values."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor.__class__ = Tensor  # type: ignore[assignment]
        _overwrite(tensor, values)


class _Overwritten(torch.autograd.Function):
    """``copy_`` that gives what it overwrites no gradient, in place of zeros.

    What is overwritten may be computed from a hollow's NaN, and the gradient of that is zero times NaN.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(tensor)
        return tensor.copy_(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, gradient


_overwrite: Any = _Overwritten.apply  # not the one that is patched to report the user's functions


def _mark_written(tensor: Tensor, origin: Origin, late: tuple[str, ...]) -> None:
    """Mark a tensor that was changed in place, and the base that it is a view of."""
    base = base_of(tensor)
    for written in (tensor,) if base is None else (tensor, base):
        unknown: Any = mark(written, origin)
        if not isinstance(written, Hollow):
            unknown.late, unknown.key = late, None


def _is_shaped_by_values(name: str, args: Any, kwargs: Any) -> bool:
    if name in SIZED_BY_NUMBERS:
        return first_unknown((args[1:], kwargs)) is not None
    if "dim" in kwargs and first_unknown(kwargs["dim"]) is not None:
        return True
    if name == "repeat_interleave":  # the repeats, a number or a tensor, may be the only argument
        return isinstance(kwargs["repeats"] if "repeats" in kwargs else args[:2][-1], Unknown)
    return name in SHAPED_BY_VALUES


def _selects(name: str, args: Sequence[Any]) -> bool:
    """Whether a function selects the elements where an unknown mask is true."""
    if name == "where" and len(args) == 1:
        return True
    if name not in ("__getitem__", "index"):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return any(isinstance(leaf, Unknown) and leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves(args[1:]))


def base_of(tensor: Tensor) -> Tensor | None:
    if type(tensor) is Unknown and tensor.base is not None:
        return tensor.base
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._base


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """A tensor's storage, also an unknown one's."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage()


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's storage: equal for tensors that share memory."""
    return storage_of(tensor).data_ptr()


def refuse(value: Any, where: str) -> None:
    """Raise if a nested value holds unknown tensors: they are missing.

    Args:
        where: The consumer of the value, as the beginning of the error message.
    """
    if type(value) is Tensor or value is None:
        return
    if tree.leaves(value, Unknown):
        found = [(path, leaf) for path, leaf in tree.walk(value) if isinstance(leaf, Unknown)]
        unknown = [(path, leaf) for path, leaf in found if not is_view_of_known(leaf)]
        if not unknown:
            return
        path, first = unknown[0]
        place = f" ({'.'.join(path)})" if path else ""
        miss(
            [leaf for _, leaf in unknown],
            f"{where}{place} takes {first.origin.at_end}. Its value isn't known there. {REMEDY}",
        )


def miss(values: Sequence[Unknown], sentence: str) -> None:
    """Fetch values that are needed here, in place; raises if that can't be done."""
    values[0].origin.on_missing(values, sentence)


@contextmanager
def collecting_unknown(given: Any) -> Iterator[list[Unknown]]:
    """Yield a list that collects unknown tensors: those in ``given``, and the arguments of torch functions inside."""
    outer, of_thread.found = of_thread.found, [leaf for leaf in leaves(given) if isinstance(leaf, Unknown)]
    try:
        yield of_thread.found
    finally:
        if outer is not None:
            outer += of_thread.found
        of_thread.found = outer


def first_unknown(value: Any) -> Unknown | None:
    return next((leaf for leaf in leaves(value) if isinstance(leaf, Unknown)), None)
