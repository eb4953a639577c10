"""What crosses the cut between two stages: everything that earlier stages made and this one needs.

Every stage runs the user's code on the same microbatch, so a value has the same name on all of them: which operation
outside of the blocks, counted from the step's beginning, gave it (:class:`Trace`), or which block. The hidden state
always crosses: what the last block of the stage before returned. What else does is found in the first microbatch of a
signature. A stage runs its part; if something that it needs is unknown here, it asks the stage before for it, by name,
and runs its part again with what it was sent. A stage that is asked for what it doesn't know asks in turn. So
conditioning, masks and position biases made of parameters, skips, residuals around blocks, an encoder's states and what
is collected from blocks cross too, through the stages between, and their gradients come back.

Later microbatches are sent all of it at once. In place of what an operation gives here, the sent value is put, so the
user's code goes on with it as if it had been computed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, NoReturn
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.shared_memory import SharedMemory
from lightning_shard.pipeline.taint import Hollow, Origin, Unknown, fill, leaves, mark

Key = tuple[Any, ...]
"""A value's name: ``("operation", number, leaf, function)``, ``("parameter", name)``, or of a block's call
(:class:`BlockCall`) ``("block", block, leaf)``, ``("inside", block, call, leaf)``, ``("kept", block, attribute,
leaf)``, ``("changed", block, argument)``."""

LARGEST_PARAMETER = 2**24
"""Elements of a parameter that may be sent with each microbatch, to a stage that uses it beside its holder."""


class Counted(NamedTuple):
    """How many operations were counted, and a checksum of their names: the same on both sides of a cut."""

    number: int = 0
    names: int = 0

    def and_then(self, name: str) -> Counted:
        return Counted(self.number + 1, crc32(name.encode(), self.names))


_NOTHING_YET = Counted()


class StageEnd(BaseException):
    """Leaves the user's step where this stage's part of it ends; not an ``Exception``, so that no step catches it."""


@dataclass(frozen=True)
class Slot(tree.Leaf):
    """Where a tensor stands in what crosses, and what it is; of a block's output also which argument it is, if any."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    argument: int | None = field(default=None, compare=False)

    @staticmethod
    def of(leaf: Any) -> Any:
        return Slot(tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, eq=False)
class Value:
    """How an unknown tensor came about: its name, and the unknown ones that it was computed from."""

    key: Key
    parents: tuple[Value, ...] = ()
    hollow: Hollow | None = None


@dataclass(frozen=True)
class BlockCall(tree.Leaf):
    """What a block did where it is, for the stages where it is stood in for; with slots for tensors.

    Attributes:
        output: What it returned.
        inside: What the forward hooks of modules inside it saw: a module's name, and arguments and output.
        kept: The attributes that modules inside it have set: a module's name, the attribute's, and its value; ``None``
            for what holds no tensor.
        changed: Which of the leaves among its arguments it has written to.
        handed_on: Which lists, dicts and dataclasses among its arguments it returned: their place in what it returned,
            ``None`` if they are all of it, and in the arguments.
    """

    output: Any
    inside: tuple[tuple[str, Any], ...] = ()
    kept: tuple[tuple[str, str, Any], ...] = ()
    changed: tuple[int, ...] = ()
    handed_on: tuple[tuple[int | None, int], ...] = ()


@dataclass(frozen=True)
class Delivery(tree.Leaf):
    """What one stage sends the next of each microbatch of a signature.

    Attributes:
        slots: What each value is.
        blocks: What each block so far did.
        unavailable: What was asked for and is computed from parameters that a later stage holds.
        counted: The operations until the next stage's first block was called.
        traced: Whether operations' results cross here or further up.
        apart: What shares memory with another value where it was computed.
    """

    slots: dict[Key, Slot] = field(default_factory=dict)
    blocks: dict[int, BlockCall] = field(default_factory=dict)
    unavailable: frozenset[Key] = frozenset()
    counted: Counted | None = None
    traced: bool = False
    apart: frozenset[Key] = frozenset()


@dataclass(frozen=True)
class Request(tree.Leaf):
    """The answer to a delivery: what is missing yet, and the sentence that refuses it; or that nothing is.

    Attributes:
        again: The step calls the network once more: it is to be run call by call (``calls.py``).
        traced: Whether operations' results cross further down.
    """

    done: bool
    keys: tuple[Key, ...] = ()
    sentence: str = ""
    again: bool = False
    traced: bool = False


@dataclass
class Crossing:
    """What crosses into this stage and out of it, for microbatches of one signature.

    Attributes:
        needed_later: Which of the values sent that need gradients have got one; known from the first backward on.
        told_needed: Whether the stage before was told so.
        is_settled: Whether it holds for all later microbatches of the signature.
        has_checked_products: Whether a backward has shown that it can be run in two parts.
    """

    incoming: Delivery
    asked: list[Key] = field(default_factory=list)
    unavailable: set[Key] = field(default_factory=set)
    outgoing: Delivery | None = None
    needed_later: list[bool] | None = None
    told_needed: bool = False
    is_settled: bool = False
    has_checked_products: bool = False

    def is_traced(self) -> bool:
        """Whether operations must be counted; the hidden state crosses without that."""
        return any(key[0] == "operation" for key in chain(self.incoming.slots, self.asked))


@dataclass
class Passage:
    """One microbatch's way through this stage: what came in, how far the step got, what goes out.

    Attributes:
        searching: Whether it is being found out what crosses.
        blocks: What each block has done, of earlier stages as announced.
        wanted: Names of what goes out, beside the hidden state.
        known: By the name of every value outside of the blocks, ``None``, or what it would be computed from if it isn't
            known here. While searching only.
        missing: What this stage needs and doesn't know.
        hollow: The parameters that other stages hold, by name.
        filler: What unknown values are.
        asks_for_origins: Whether what is missing is to be computed here, from what blocks and parameters gave. So it is
            with state: an earlier stage adds to its own, which is another.
        in_place_of: What the user's code holds of values that were received and need gradients.
        memory: While searching, what of it shares memory.
    """

    stage: int
    hollow: Mapping[str, Hollow]
    searching: bool = False
    received: dict[Key, Tensor] = field(default_factory=dict)
    blocks: dict[int, BlockCall] = field(default_factory=dict)
    unavailable: frozenset[Key] = frozenset()
    wanted: frozenset[Key] = frozenset()
    sent: dict[Key, Tensor] = field(default_factory=dict)
    known: dict[Key, Value | None] = field(default_factory=dict)
    missing: Request | None = None
    counted: Counted = _NOTHING_YET
    entered_at: Counted | None = None
    finished: bool = False
    calls: int = 0
    active: bool = False
    differentiates: bool = False
    filler: float = torch.nan
    asks_for_origins: bool = False
    in_place_of: list[Tensor] = field(default_factory=list)
    memory: SharedMemory | None = None
    _kept: dict[int, dict[tuple[str, str], None]] | None = None

    def kept_by(self, number: int) -> list[tuple[str, str]]:
        """The modules within a part, and their attributes, that cross as kept by its call, an operation's number."""
        if self._kept is None:
            self._kept = defaultdict(dict)
            for key in chain(self.wanted, self.received):
                if key[0] == "operation" and isinstance(key[2], tuple):
                    self._kept[key[1]][key[2][:2]] = None
        return [*self._kept.get(number, ())]

    @property
    def entered(self) -> bool:
        return self.entered_at is not None

    def wants(self, kind: str, block: int) -> bool:
        """Whether what a block does beside returning something goes out."""
        return self.searching or self.is_asked_for(kind, block)

    def is_asked_for(self, kind: str, block: int) -> bool:
        """Whether a later stage has asked for some of that."""
        return bool(self.wanted) and any(key[:2] == (kind, block) for key in self.wanted)

    def forget_hooks(self) -> None:
        """Of received values' gradients: the stage before has run the same code until now, and has them too."""
        for tensor in self.in_place_of:
            for number in _hooks_of_code(tensor):
                del tensor._backward_hooks[number]  # type: ignore[union-attr]

    def check_hooks(self) -> None:
        """Once this stage's blocks have begun, no other one has a hook that is set, and it would see a part only.

        Raises:
            StepError: There is one, on a value that was received.
        """
        if self.entered and any(map(_hooks_of_code, self.in_place_of)):
            raise StepError(
                "A step registers a hook on a tensor that an earlier pipeline stage computed, after later blocks have"
                " run: it would see the gradient of these stages only. Register it where the tensor is computed, or"
                " use pipeline_parallel_size=1."
            )

    def check_differentiates(self) -> None:
        if torch.is_grad_enabled() != self.differentiates:
            raise StepError(
                "The blocks run with gradients switched off within a step that needs them, so no gradient would cross"
                " the stages: with activation checkpointing, use use_reentrant=False; to freeze them,"
                " requires_grad_(False) in place of torch.no_grad(); or use pipeline_parallel_size=1."
            )

    def produced(self, key: Key, tensor: Tensor, parents: tuple[Value, ...] = (), *, written: bool = False) -> Tensor:
        """A value of this name was computed: what the user's code goes on with.

        Args:
            written: Whether it is a tensor that was there before, and was changed.
        """
        if torch.is_grad_enabled() == self.differentiates:
            return self._produced(key, tensor, parents, written)
        with torch.set_grad_enabled(self.differentiates):  # also where the code around it has no gradients
            return self._produced(key, tensor, parents, written)

    def _produced(self, key: Key, tensor: Tensor, parents: tuple[Value, ...], written: bool) -> Tensor:
        if written and self.memory is not None:
            self.memory.is_written(tensor)
        if key in self.received:
            sent = self.received[key].clone()  # code may change it in place: what was received gathers a gradient
            if not written:
                tensor = sent
            elif isinstance(tensor, Unknown):
                fill(tensor, sent)
            if sent.requires_grad:
                self.in_place_of.append(tensor)
            if self.memory is not None:
                self.memory.receives(key, tensor)
        unknown = isinstance(tensor, Unknown)
        if self.searching:
            value = Value(key, parents) if unknown else None
            self.known[key] = value
            if unknown:
                tensor.value = value  # type: ignore[attr-defined]
        if key in self.wanted and not unknown:
            self.send(key, tensor)
        return tensor

    def send(self, key: Key, tensor: Tensor) -> None:
        """It is to go out as it is now: code may change it in place."""
        self.sent[key] = tensor.clone()
        if self.memory is not None:
            self.memory.sends(key, tensor)

    def unknown(self, slot: Slot, key: Key, text: str, device: torch.device) -> Tensor:
        """In place of a value that isn't known here; of its own memory, since models may write into it."""
        has_nan = slot.dtype.is_floating_point or slot.dtype.is_complex
        data = torch.full(slot.shape, self.filler if has_nan else 0, dtype=slot.dtype, device=device)
        tensor: Any = mark(data, Origin(text, self.on_missing))
        tensor.value = Value(key)
        return tensor

    def on_missing(self, values: Sequence[Unknown], sentence: str) -> NoReturn:
        """What is needed here is unknown: ask the stage before for it, or refuse the step."""
        if not self.active:
            raise StepError(sentence)
        if not self.searching:
            raise StepError(
                f"{sentence} It was not needed in the first microbatch of these shapes: what crosses between stages may"
                " depend on a batch's shapes, not on its values."
            )
        keys = list(dict.fromkeys(chain.from_iterable(self._sources(value, sentence) for value in values)))
        if not keys:
            raise StepError(sentence)
        self.missing = Request(done=False, keys=tuple(keys), sentence=sentence)
        raise StageEnd

    def ask(self, key: Key, sentence: str) -> list[Key] | None:
        """What to ask the stage before for, so that this stage can hand on a value.

        Returns:
            ``None`` where the value is computed from parameters that a later stage holds: it may be computed there.

        Raises:
            StepError: No stage can have it.
        """
        if key[0] == "parameter":
            return [key] if key[1] in self.hollow and key not in self.received else []
        if key not in self.known:
            raise StepError(
                f"{sentence} Stage {self.stage} didn't compute it: a step must run the same code on every stage (its"
                " code around the blocks may not depend on random numbers, or on what a stage holds)."
            )
        value = self.known[key]
        if value is None:
            return []
        if any(root.hollow is not None and root.hollow.holder > self.stage for root in _roots(value)):
            return None
        return self._sources_of(value, sentence)

    def _sources(self, unknown: Unknown, sentence: str) -> list[Key]:
        value = value_of(unknown)
        if value is None:
            raise StepError(sentence)  # computed where nothing is recorded, as in a hook of a block
        return self._sources_of(value, sentence)

    def _sources_of(self, value: Value, sentence: str) -> list[Key]:
        """The nearest values that the stage before has come to: it ran all code until this stage's first block."""
        if self.stage == 0:
            raise StepError(sentence + _why_late(value))
        keys: list[Key] = []
        waiting, seen = [value], {id(value)}
        while waiting:
            each = waiting.pop()
            if self._is_had_before(each, sentence):
                keys.append(each.key)
            else:
                waiting += _not_yet(each.parents, seen)
        return keys

    def _is_had_before(self, value: Value, sentence: str) -> bool:
        if value.hollow is not None:
            if value.hollow.holder > self.stage:
                raise StepError(sentence + _why_late(value))
            if value.hollow.numel() > LARGEST_PARAMETER:
                raise StepError(
                    f"{sentence} {value.hollow.fqn} is used on both sides of a cut, and too large to be sent with each"
                    f" microbatch ({value.hollow.numel()} elements, at most {LARGEST_PARAMETER}): use two modules that"
                    " share their weights."
                )
            return True
        kind, number = value.key[:2]
        if kind != "operation":
            return True
        if self.asks_for_origins and value.parents and not any(parent.hollow is not None for parent in value.parents):
            return False
        return (self.entered_at is None or number < self.entered_at.number) and value.key not in self.unavailable


def _hooks_of_code(tensor: Tensor) -> list[int]:
    """A tensor's hooks, by their numbers, but for those that sharding sets on what it sees."""
    hooks = tensor._backward_hooks or {}
    return [n for n, hook in hooks.items() if not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")]


def _not_yet(values: Iterable[Value], seen: set[int]) -> list[Value]:
    """Those that weren't seen, each once: what a value is computed from may meet again."""
    new = {id(value): value for value in values if id(value) not in seen}
    seen.update(new)
    return list(new.values())


def value_of(unknown: Unknown) -> Value | None:
    """``None`` where it wasn't recorded."""
    if isinstance(unknown, Hollow):
        return Value(("parameter", unknown.fqn), hollow=unknown)
    return unknown.value


def _why_late(value: Value) -> str:
    """Why no earlier stage has it: it's computed from a parameter that a later one holds."""
    names = sorted({root.hollow.fqn for root in _roots(value) if root.hollow is not None})
    if not names:
        return ""
    return (
        f" Of {' and '.join(names)} it seems that blocks of this stage run earlier: register parts in __init__, and"
        " call them in forward, in the order in which they run."
    )


def _roots(value: Value) -> Iterator[Value]:
    waiting, seen = [value], {id(value)}
    while waiting:
        each = waiting.pop()
        if not each.parents:
            yield each
        waiting += _not_yet(each.parents, seen)


def parameters_crossing(root: nn.Module, passage: Passage) -> AbstractContextManager[None]:
    """Inside a step: parameters that are asked for are sent, and received ones stand in for hollow ones.

    Raises:
        StepError: Ranks of this stage hold one in parts, as one of a block that isn't gathered before its call.
    """
    for key in passage.wanted:
        if key[0] == "parameter" and key not in passage.received:
            parameter = root.get_parameter(key[1])
            if type(parameter) is nn.Parameter:
                passage.sent[key] = parameter.clone()
            elif isinstance(parameter, DTensor):
                raise StepError(
                    f"{key[1]}, of stage {passage.stage}, is used on a later pipeline stage, and several ranks hold it"
                    " in parts when a step begins: have its module return (or keep as an attribute) what is needed of"
                    " it there; or use data_parallel_size=1 and tensor_parallel_size=1, or pipeline_parallel_size=1."
                )
    for key, tensor in passage.received.items():
        if key[0] == "parameter" and key in passage.wanted:
            passage.sent[key] = tensor.clone()
    return parameters_in_place(root, passage.received)


def parameters_in_place(root: nn.Module, received: Mapping[Key, Tensor]) -> AbstractContextManager[None]:
    """Inside, received parameters stand in for hollow ones."""
    parameters = {key[1]: tensor for key, tensor in received.items() if key[0] == "parameter"}
    return _in_place(root, parameters) if parameters else nullcontext()


@contextmanager
def _in_place(root: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    placed: list[tuple[nn.Module, str, Any]] = []
    for fqn, tensor in parameters.items():
        parent, _, name = fqn.rpartition(".")
        module = root.get_submodule(parent)
        placed.append((module, name, module.__dict__[name]))
        module.__dict__[name] = tensor
    try:
        yield
    finally:
        for module, name, hollow in placed:
            module.__dict__[name] = hollow


def keep(module: nn.Module, key: str, value: Any) -> None:
    """Set an attribute, or a buffer, of a module whose code has set it on another stage."""
    (module._buffers if key in module._buffers else module.__dict__)[key] = value


def unknown_states(modules: Iterable[nn.Module]) -> list[Unknown]:
    """What modules keep beside parameters, as metrics do, and isn't known here."""
    kept = chain.from_iterable(vars(module).values() for module in modules)
    return [
        leaf for value in kept for leaf in leaves(value) if isinstance(leaf, Unknown) and not isinstance(leaf, Hollow)
    ]
