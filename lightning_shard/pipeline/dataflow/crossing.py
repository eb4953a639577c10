"""The dataflow across the cut between two stages: which values of earlier stages a stage needs, and their names.

Every stage runs the user's code on the same microbatch. So a value has the same name on all stages: the block that
returned it, or the number of the operation outside of the blocks, counted from the step's beginning (:class:`Trace`).
The hidden state, the output of the previous stage's last block, always crosses; other values as they are found
(``docs/decisions/crossing.md``), through the stages between, and their gradients come back. A received value replaces
the result of the operation of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.arguments import few
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.functions import leaves
from lightning_shard.pipeline.dataflow.messages import BlockCall, Counted, Delivery, End, Key, Slot
from lightning_shard.pipeline.dataflow.taint import Hollow, Origin, Unknown, fill, mark, refuse, said_of_hook
from lightning_shard.user_hooks import is_of_fsdp

if TYPE_CHECKING:
    from lightning_shard.pipeline.dataflow.fetching import Ledger


_NOTHING_YET = Counted()
_FROM_THE_FIRST = "Use from an epoch's first step on what only later ones need; in a loss, with a weight of 0."


class StageEnd(BaseException):
    """Exits the user's step where this stage's part ends; not an ``Exception``, so that no handler there catches it."""


class LateValue(Exception):
    """A stage needs a value that is computed from parameters of a later one. Becomes a :class:`StepError`.

    Attributes:
        parameters: Their names, as far as known.
    """

    def __init__(self, sentence: str, parameters: Sequence[str]) -> None:
        self.parameters = [*parameters]
        super().__init__(sentence + _why_late(self.parameters))


@dataclass
class Crossing:
    """The values that cross into this stage and out of it, for microbatches of one signature.

    Attributes:
        incoming: What the previous stage sends.
        asked: Values that the next stage requested.
        outgoing: What is sent to the next stage; ``None`` on the last one.
        leaves_after: The end of this stage's part, if it is after a block.
        needed_later: Of the sent values that require gradients, which received one; known from the first backward on.
        told_needed: Whether the previous stage was sent these flags.
        is_settled: Whether this holds for all later microbatches of the signature.
        has_checked_products: Whether a whole backward has verified that the products can be deferred.
    """

    incoming: Delivery
    asked: list[Key] = field(default_factory=list)
    outgoing: Delivery | None = None
    leaves_after: End | None = None
    needed_later: list[bool] | None = None
    told_needed: bool = False
    is_settled: bool = False
    has_checked_products: bool = False

    def is_like(self, other: Crossing) -> bool:
        """Whether the same values cross, of the same blocks, and the same of them need gradients."""
        return self._structure() == other._structure()

    def _structure(self) -> Any:
        needs_gradient = {key: slot.requires_grad for key, slot in self.incoming.slots.items()}
        return {*self.asked}, self.leaves_after, [*self.incoming.blocks], needs_gradient

    def is_traced(self) -> bool:
        """Whether operations must be counted. Blocks' outputs cross without that."""
        return "operation" in map(itemgetter(0), chain(self.incoming.slots, self.asked))


@dataclass
class Passage:
    """One microbatch's forward on this stage: received values, progress, and values to send.

    It has many attributes, since what its hooks, stand-ins and unknown values note of the run is one record.

    Args:
        crossing: The values that cross, as far as known.

    Attributes:
        hollow: The parameters that other stages hold, by name.
        received: Values from the previous stage.
        blocks: The blocks' calls by place; those of earlier stages as these announced them.
        wanted: Names of the values to send, beside the hidden state.
        sent: Values to send.
        failed: Whether a search ends here, at a second call of the network or an error.
        counted: Operations outside of the blocks so far.
        entered_at: The same, where the previous stage has left the step: when the first block of this stage was called,
            or after the block at ``entered_after``.
        entered_after: Where the previous stage left the step, if it is after a block.
        leaves_after: The end of this stage's part, where it is known to be after a block.
        until: Where this stage has left the step; ``None`` as long as it runs, and if it ran to its end.
        last_block: The place of the last block that has returned, here or by a stand-in.
        counted_at_last_block: The operations before it returned.
        in_block: Whether a block of this stage is being called.
        in_hooks: Whether hooks of an earlier stage's block are called, whose operations aren't counted.
        calls: Calls of the network.
        active: Whether the microbatch's forward runs.
        in_step: Whether any step of the user's runs.
        differentiates: Whether gradients were enabled when it began.
        searching: Whether this run searches for the values that cross.
        ledger: While searching, the values by name (``fetching.py``).
        at_end: While searching, sends to the next stage, and serves it.
        in_place_of: The tensors that the user's code holds in place of received values that require gradients.
    """

    stage: int
    hollow: Mapping[str, Hollow]
    crossing: InitVar[Crossing | None] = None
    received: dict[Key, Tensor] = field(default_factory=dict)
    counted: Counted = _NOTHING_YET
    in_step: Callable[[], bool] = lambda: True
    searching: bool = False
    active: bool = False

    def __post_init__(self, crossing: Crossing | None) -> None:
        crossing = crossing or Crossing(Delivery())
        self.blocks: dict[int, BlockCall] = dict((crossing.outgoing or crossing.incoming).blocks)
        self.wanted: frozenset[Key] = frozenset(crossing.asked)
        self.sent: dict[Key, Tensor] = {}
        self.failed = False
        until = crossing.incoming.until
        self.entered_at: Counted | None = None
        self.entered_after = until if until is not None and until.after else None
        self.leaves_after = crossing.leaves_after
        self.until: End | None = None
        self.last_block: int | None = None
        self.counted_at_last_block = _NOTHING_YET
        self.in_block = self.in_hooks = False
        self.calls = 0
        self.differentiates = self.active and torch.is_grad_enabled()
        self.ledger: Ledger | None = None
        self.at_end: Callable[[], None] | None = None
        self.in_place_of: list[Tensor] = []
        self._objects_cross: bool | None = None

    def wants(self, kind: str, block: int) -> bool:
        """Whether effects of this kind (``"inside"``, ``"changed"``) of a block must be recorded."""
        return self.searching or any(key[:2] == (kind, block) for key in self.wanted)

    def follows(self, block: int) -> bool:
        """Whether to follow the changes that a block makes to objects."""
        changes = self.blocks[block].objects if block in self.blocks else ()
        if not changes or self.searching:
            return bool(changes)
        if self._objects_cross is None:
            self._objects_cross = any(key[0] == "object" for key in chain(self.wanted, self.received))
        return self._objects_cross or not all(change.is_cache for change in changes)

    def enter(self) -> None:
        """The code that follows wasn't run by the previous stage."""
        if self.entered_at is None:
            self.entered_at = self.counted
            self.forget_hooks()

    def ends(self) -> None:
        """This stage's part of the step has ended; called where root's hooks see what is sent, if they have to."""
        at_end, self.at_end = self.at_end, None
        if at_end is not None:
            at_end()

    def forget_hooks(self) -> None:
        """Remove tensor hooks from received values: the previous stage ran the same code so far, so it has them."""
        for tensor in self.in_place_of:
            if tensor._backward_hooks:
                for number in _hooks_of_code(tensor):
                    del tensor._backward_hooks[number]

    def check_hooks(self) -> None:
        """Refuse tensor hooks on received values that were registered after this stage's first block was called.

        No other stage has such a hook, and it would see only a part of the gradient.

        Raises:
            StepError: There is one.
        """
        if self.entered_at is None:
            self.forget_hooks()
            return
        for tensor in self.in_place_of:
            if tensor._backward_hooks and _hooks_of_code(tensor):
                raise StepError(
                    "A step registers a hook on a tensor that an earlier pipeline stage computed, after later blocks"
                    " have run: it would see the gradient of these stages only. Register it where the tensor is"
                    " computed, or use pipeline_parallel_size=1.",
                    breaks=4,
                )

    def produced(self, key: Key, tensor: Tensor, *, written: bool = False) -> Tensor:
        """Register a computed value; return what the user's code continues with: the received value, if any.

        Args:
            written: Whether an existing tensor was changed in place.
        """
        if torch.is_grad_enabled() != self.differentiates:
            with torch.set_grad_enabled(self.differentiates):  # also in the user's torch.no_grad()
                return self.produced(key, tensor, written=written)
        if written and self.ledger is not None:
            self.ledger.memory.is_written(tensor)
        if key in self.received:
            sent = self.received[key].clone()  # code may change it in place; the received leaf gathers a gradient
            if not written:
                tensor = sent
            elif isinstance(tensor, Unknown):
                fill(tensor, sent)
            if sent.requires_grad:
                self.in_place_of.append(tensor)
            if self.ledger is not None:
                self.ledger.memory.receives(key, tensor)
        unknown = isinstance(tensor, Unknown)
        if self.ledger is not None:
            self.ledger.enter(key, tensor)
        if key in self.wanted and not unknown:
            self.send(key, tensor)
        return tensor

    def send(self, key: Key, tensor: Tensor) -> None:
        """Copy a value for sending, since the user's code may change it in place later."""
        refuse(tensor, "The next pipeline stage")
        self.sent[key] = tensor.clone()
        if self.ledger is not None:
            self.ledger.memory.sends(key, tensor)

    def unknown(self, slot: Slot, text: str, device: torch.device, *, without_memory: bool = False) -> Tensor:
        """An unknown tensor for this slot. It has its own memory, since models may write into it; but in a cache."""
        has_nan = slot.dtype.is_floating_point or slot.dtype.is_complex
        shape = () if without_memory else slot.shape
        data = torch.full(shape, torch.nan if has_nan else 0, dtype=slot.dtype, device=device).expand(slot.shape)
        tensor: Any = mark(data, Origin(text, self.on_missing))
        tensor.needs = slot.requires_grad
        return tensor

    def on_missing(self, values: Sequence[Unknown], sentence: str) -> None:
        """Handle unknown values that are needed here: get them from the previous stage, or refuse the step."""
        try:
            self.request(values, sentence)
        except LateValue as late:
            raise StepError(str(late), breaks=1) from None

    def request(self, values: Sequence[Unknown], sentence: str) -> None:
        """Fetch unknown values from the previous stage, or leave the step after the last block.

        Raises:
            LateValue: The values are computed from parameters of a later stage, and no block has been called.
            StepError: They can't be requested for another reason.
        """
        if not self.in_step():
            raise StepError(said_of_hook(sentence), breaks=1)
        if not self.active:
            raise StepError(f"{sentence} {_FROM_THE_FIRST}", breaks=1)
        if self.ledger is None:
            raise StepError(
                f"{sentence} It was not needed in the first microbatch of these shapes: what crosses between stages may"
                f" depend on a batch's shapes, not on its values or its number. {_FROM_THE_FIRST}",
                breaks=1,
            )
        try:
            self.ledger.fetch(values, sentence)
        except LateValue as late:
            if self.last_block is None or self.in_block:
                raise
            # code after the last block, on a stage before those that run it
            self.end_after_last_block(str(late))
            raise StageEnd from None

    def end_after_last_block(self, why: str = "") -> None:
        """Move this stage's end back to where the last block has returned: the next stage runs what follows."""
        assert self.last_block is not None
        assert self.ledger is not None
        self.until, self.counted = End(self.last_block, True, why), self.counted_at_last_block
        self.ledger.forget_from(self.counted.number)


def switched_off(name: str) -> StepError:
    """The error for a block that is called where gradients are switched off, in a step that needs them."""
    return StepError(
        f"{name} and other blocks run with gradients switched off within a step that needs them, so no gradient would"
        " cross the stages: with activation checkpointing, use use_reentrant=False; if they are frozen,"
        " requires_grad_(False) is enough, without torch.no_grad(); or name the blocks that train by pipeline_blocks,"
        " or use pipeline_parallel_size=1.",
        breaks=3,
    )


def _hooks_of_code(tensor: Tensor) -> list[int]:
    """The ids of a tensor's hooks, without those that sharding registers."""
    return [number for number, hook in tensor._backward_hooks.items() if not is_of_fsdp(hook)]  # type: ignore[union-attr]


def _why_late(names: Sequence[str]) -> str:
    """The sentence that names the parameters of a later stage that a value is computed from, if there are any."""
    if not names:
        return ""
    return (
        f" Blocks of this stage seem to need {few(names)}, of a later stage: register parts in __init__, and call them"
        " in forward, in the order in which they run; give the LightningModule an example_input_array, whose run shows"
        " that order; or cut elsewhere (placement=[…])."
    )


def parameters_crossing(root: nn.Module, passage: Passage) -> AbstractContextManager[None]:
    """Context of a step: requested parameters are sent, and received parameters replace hollow ones.

    Raises:
        StepError: A requested parameter is sharded over ranks of this stage, as one of a block is before its call.
    """
    for key in passage.wanted:
        if key[0] == "parameter":
            received = passage.received.get(key)
            sent = sendable_parameter(root, key[1], passage.stage) if received is None else received
            passage.sent[key] = sent.clone()
    return parameters_in_place(root, passage.received)


def held_parameter(root: nn.Module, name: str) -> Tensor | None:
    """A parameter that a rank holds, whichever of its stages is shown."""
    parent, _, key = name.rpartition(".")
    return root.get_submodule(parent)._parameters.get(key)


def sendable_parameter(root: nn.Module, name: str, stage: int) -> Tensor:
    """
    Raises:
        StepError: It is sharded over ranks of this stage.
    """
    parameter = held_parameter(root, name)
    if parameter is None or isinstance(parameter, DTensor):
        raise StepError(
            f"{name}, of stage {stage}, is used on a later pipeline stage, and several ranks hold it in parts when a"
            " step begins: have its module return what is needed of it there; or use"
            " data_parallel_size=1 and tensor_parallel_size=1, or pipeline_parallel_size=1.",
            breaks=8,
        )
    return parameter


def parameters_in_place(root: nn.Module, received: Mapping[Key, Tensor]) -> AbstractContextManager[None]:
    """Context in which received parameters replace hollow ones."""
    for key in received:
        if key[0] == "parameter":
            return _in_place(root, {key[1]: tensor for key, tensor in received.items() if key[0] == "parameter"})
    return nullcontext()


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


def unknown_states(modules: Iterable[nn.Module]) -> list[Unknown]:
    """The unknown tensors among modules' attributes (without parameters), such as states of metrics."""
    kept = chain.from_iterable(vars(module).values() for module in modules)
    return [
        leaf for value in kept for leaf in leaves(value) if isinstance(leaf, Unknown) and not isinstance(leaf, Hollow)
    ]


# Messages for steps that call blocks in another order than they are placed, or none of them.

_MAY = (
    "may depend on the kind of step, the epoch and a batch's shapes, not on its values, its number or random numbers,"
    " as where layers are dropped. Call all of them, and choose between what goes in and what comes out by torch.where;"
    " or use pipeline_parallel_size=1."
)


def none_called(method: str, blocks: Sequence[str]) -> str:
    """The message for a step that calls no block."""
    return (
        f"{method} returned without calling the network, or it runs none of {few(blocks)} (a block's methods other than"
        " __call__ don't count); with several pipeline stages every step calls the network once, and at least one of"
        " its blocks: call it, name modules that every step calls by pipeline_blocks, or use pipeline_parallel_size=1."
    )


def out_of_order(method: str, name: str, before: Collection[str]) -> str:
    """The message for a step that calls a block after blocks of later stages."""
    return (
        f"{method} came to {few(before)} before {name}, which an earlier pipeline stage holds. A step may leave blocks"
        " out, and calls the others in the order in which they are placed: name blocks in the order in which every step"
        " runs them (pipeline_blocks=[…]), or use pipeline_parallel_size=1."
    )


def missing_now(method: str, names: Collection[str]) -> str:
    """The message for a microbatch without blocks that an earlier one of its shapes has called."""
    return (
        f"{method} didn't call {few(names)}, and did for an earlier microbatch of the same shapes: which blocks run"
        f" {_MAY}"
    )


def called_now(name: str) -> str:
    """The message for a block that runs, and didn't for an earlier microbatch of the same shapes."""
    return f"{name} runs, and didn't for an earlier microbatch of the same shapes: which blocks run {_MAY}"
