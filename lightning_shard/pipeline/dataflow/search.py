"""Finds which values cross the cuts, by running a signature's first microbatch until no stage misses a value.

In each round, the microbatch goes through all stages in order. A stage that misses a value requests it from the
previous stage, which in turn requests what it doesn't know; the stages after it are told that nothing is sent this
round. Then all state is restored, and the next round begins. No stage requests a name twice, so this terminates. No
other microbatch is in flight meanwhile: with two stages on one rank, the first would wait for an answer of the second.

The values that crossed for the last microbatch of the same kind of step are sent from the first round on: batches whose
lengths always differ mostly need the same, and so a single round. If they don't, the search begins anew, from nothing.

If a step calls no block of later stages, a stage before the last comes to its end, or to code that needs what later
stages hold. In the next round it leaves after the last block that was called, and the last stage runs what follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Crossing, Passage
from lightning_shard.pipeline.dataflow.messages import Delivery, End, Key, Request
from lightning_shard.pipeline.dataflow.uncalled import called_now, missing_now, none_called
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step on microbatch ``i``, up to the end of the stage's part; returns its result, on the last stage.
RunStep = Callable[[Stage, int], Any]


#: Whether a condition holds on any of the ranks that have to run alike; a collective call over them.
OfAny = Callable[[bool], bool]


class CallsAgain(Exception):
    """A step calls the network several times; raised on all stages."""


class Memory(Protocol):
    """A snapshot of what a step may change beside gradients."""

    def put_back(self) -> None: ...

    def check(self) -> None:
        """After each run: raise if it changed something that can't be restored."""

    def changed(self) -> list[str]:
        """Paths of what differs from the snapshot."""

    def forget(self) -> None:
        """Release the snapshot: it won't be restored any more."""


@dataclass(frozen=True)
class MemoryBeside:
    """A snapshot, together with a function that restores something outside of it."""

    memory: Memory
    put_rest_back: Callable[[], None]

    def put_back(self) -> None:
        self.memory.put_back()
        self.put_rest_back()

    def check(self) -> None:
        self.memory.check()

    def changed(self) -> list[str]:
        return self.memory.changed()

    def forget(self) -> None:
        self.memory.forget()


@dataclass(frozen=True)
class Ran:
    """A microbatch's forward on one stage."""

    stage: Stage
    crossing: Crossing
    passage: Passage
    result: Any


@dataclass
class Search:
    """One stage's part of the search.

    Attributes:
        asked: Values that the next stage requested, in all rounds.
        unavailable: Those of them that are computed from parameters of a later stage.
        passage: The last round's run; ``None`` if the previous stage sent nothing.
        again: Whether this or an earlier stage has met a second call of the network in the last round.
        result: The step's return value in that run.
        leaves_after: The end of this stage's part, once it is known to be after a block.
        crossing: What was found so far.
    """

    stage: Stage
    channel: Channel
    asked: list[Key] = field(default_factory=list)
    unavailable: set[Key] = field(default_factory=set)
    passage: Passage | None = None
    again: bool = False
    result: Any = None
    leaves_after: End | None = None
    crossing: Crossing = field(default_factory=lambda: Crossing(Delivery()))

    def begin_as(self, other: Crossing) -> None:
        """Send what another signature's search has found, where that was simply sent."""
        others = other.unavailable or other.leaves_after or any(key[0] == "inside" for key in other.asked)
        self.asked = [] if others else [*other.asked]

    def resume(self, other: Crossing) -> None:
        """Send what was found before, whatever it is."""
        self.asked, self.unavailable, self.leaves_after = [*other.asked], {*other.unavailable}, other.leaves_after

    def begin_anew(self) -> None:
        self.asked, self.unavailable, self.leaves_after = [], set(), None

    @property
    def ran(self) -> Ran:
        """The run of the last round."""
        assert self.passage is not None
        return Ran(self.stage, self.crossing, self.passage, self.result)

    def run(self, run: RunStep, i: int) -> None:
        """Receive from the previous stage, run this stage's part, and send to the next stage."""
        stage, channel = self.stage, self.channel
        self.passage, sends = None, False
        incoming = Delivery() if stage.is_first else channel.hear()
        self.again = isinstance(incoming, Request)
        if isinstance(incoming, Delivery):
            received = {} if stage.is_first else channel.receive(incoming.slots)
            self.crossing = Crossing(incoming, self.asked, self.unavailable, leaves_after=self.leaves_after)
            with stage.microbatch(received, self.crossing, searching=True) as self.passage:
                self.result = run(stage, i)
                if self.passage.missing is None:
                    check_ran(stage, self.passage, self.crossing)
            self.leaves_after = self.passage.found_end or self.leaves_after
            sends = self.passage.missing is None
        if stage.is_last:
            return
        if not sends:
            missing = self.passage.missing if self.passage is not None else None
            self.again |= missing is not None and missing.again
            channel.announce(Request(done=False, again=True) if self.again else None)
            return
        assert self.passage is not None
        self.crossing.outgoing = stage.delivery(self.passage, self.crossing)
        channel.announce(self.crossing.outgoing)
        channel.send(self.passage.sent, self.crossing.outgoing.slots)

    def answer(self) -> Request:
        """Receive the next stage's request, and send one to the previous stage: what is missing, or that nothing is."""
        if self.passage is None:
            return Request(done=False, again=self.again)
        request = self.passage.missing or self._receive_answer(self.passage)
        if request.done:
            self.crossing.is_settled = not (self.crossing.incoming.traced or request.traced)
        if not self.stage.is_first:
            self.channel.request(request)
        return request

    def _receive_answer(self, passage: Passage) -> Request:
        """Receive the next stage's request; return what this stage needs from the previous one to fulfil it."""
        crossing = self.crossing
        if self.stage.is_last:
            return Request(done=True, traced=crossing.is_traced())
        answer = self.channel.requested()
        if answer.again:
            return answer
        if answer.done:
            return replace(answer, traced=answer.traced or crossing.is_traced())
        if again := set(answer.keys) & set(self.asked):
            named = ", ".join(sorted(" ".join(map(str, key)) for key in again))
            raise StepError(
                f"{answer.sentence} It was sent, and is still unknown (internal name: {named}): please report this."
            )
        self.asked.extend(answer.keys)
        needed: dict[Key, None] = {}
        for key in answer.keys:
            own = passage.ask(key, answer.sentence)
            if own is None:
                self.unavailable.add(key)
            else:
                needed.update(dict.fromkeys(own))
        return Request(False, tuple(needed), answer.sentence)


def find_crossing(
    searches: Sequence[Search],
    run: RunStep,
    i: int,
    memory: Memory,
    of_any: OfAny = bool,
    *,
    as_before: bool = False,
) -> None:
    """Run one microbatch through all stages, round by round, until no stage misses a value.

    Args:
        searches: The searches of this rank's stages, in order.
        memory: The snapshot that is restored before each further round.
        of_any: As for :class:`PipelinedStep`.
        as_before: Whether the first round sends what another search has found; the same on all ranks.

    Raises:
        CallsAgain: The step calls the network several times. The snapshot has been restored and released.
    """
    while True:
        for search in searches:
            search.run(run, i)
        answers = [search.answer() for search in reversed(searches)]
        memory.check()
        if not of_any(not all(answer.done for answer in answers)):
            break
        memory.put_back()
        if any(answer.again for answer in answers):
            memory.forget()
            raise CallsAgain
        if as_before:  # that wasn't enough, or not the same
            for search in searches:
                search.begin_anew()
            as_before = False
    for search in searches:
        assert search.passage is not None
        check_order(search.passage, search.crossing)
        search.passage.known.clear()
    _check_complete(searches, run, i, memory, of_any)


def rerun(ran: Ran, run: RunStep, i: int) -> Ran:
    """Rerun a stage's part of a microbatch, on the values received for it."""
    stage, crossing = ran.stage, ran.crossing
    received = {
        key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in ran.passage.received.items()
    }
    with stage.microbatch(received, crossing) as again:
        result = run(stage, i)
        check_ran(stage, again, crossing)
    if crossing.outgoing is not None:
        again.sent = {key: again.sent[key] for key in crossing.outgoing.slots}
    return Ran(stage, crossing, again, result)


def _check_complete(searches: Sequence[Search], run: RunStep, i: int, memory: Memory, of_any: OfAny) -> None:
    """Check whether NaN that a stage sends is the network's own, or leaked from a hollow parameter.

    Unknown values are tracked through torch's functions. One that bypasses them, such as through a scripted function,
    loses its class but is still NaN. So the stage's part is rerun with 0 in place of unknown values: NaN that then
    disappears has leaked. Runs once per signature.

    Raises:
        StepError: NaN leaked from a hollow parameter.
    """
    found = [_added_nan(search) for search in searches]
    if not of_any(any(found)):
        return
    memory.put_back()
    for search, nan in zip(searches, found):
        with search.stage.unknown_values_being(0.0):
            again = rerun(search.ran, run, i)
        search.passage, search.result = again.passage, again.result
        own = _nan_masks((again.passage.sent, again.result)) if nan else []
        if len(own) != len(nan) or not all(map(torch.equal, own, nan)):
            raise StepError(
                f"Stage {search.stage.index} turned finite values into NaN that a plain run wouldn't have: code around"
                " its blocks computes something that only an earlier stage has in a way that can't be followed, such as"
                " a scripted function. Use torch's own functions there, make it a part of the blocks, or use"
                " pipeline_parallel_size=1."
            )


def _added_nan(search: Search) -> list[Tensor]:
    """Masks of NaN in what a stage sends and returns, if any; empty if the stage received NaN, or is the first."""
    assert search.passage is not None
    if search.stage.is_first or _nan_masks(search.passage.received):
        return []
    return _nan_masks((search.passage.sent, search.result))


def _nan_masks(values: Any) -> list[Tensor]:
    """Masks of NaN in tensors; empty if there is none. Synchronises with the device."""
    masks = [t.detach().isnan() for t in tree.tensors(values) if t.is_floating_point() or t.is_complex()]
    return masks if any(bool(mask.any()) for mask in masks) else []


def check_ran(stage: Stage, passage: Passage, crossing: Crossing) -> None:
    """Check where the stage has left the step, and that it changed no memory that sent values share.

    Where a run that searches comes to the step's end before the last stage, no later block is called. This is noted,
    and in the next round the stage leaves after the last block that was called: the last stage runs what follows. An
    evaluation step that calls no block runs whole on every stage, and nothing is sent.

    Raises:
        StepError: A training step calls no block, or a step other blocks than the previous stage or an earlier
            microbatch did.
    """
    until, incoming = passage.until, crossing.incoming.until
    agreed = crossing.outgoing.until if crossing.outgoing is not None else None
    if until is None and passage.last_block is None:
        if agreed is not None:
            raise StepError(missing_now(stage.method, [stage.blocks[agreed.place]]))
        if passage.differentiates or incoming is not None:
            raise StepError(none_called(stage.method, stage.blocks))
        return
    if agreed is None and crossing.outgoing is not None and not passage.searching:
        raise StepError(called_now(stage.blocks[passage.last_block or 0]))
    if until is None and not stage.is_last and passage.ledger is not None:
        passage.end_after_last_block()
        until = passage.until
    if until is None and not stage.is_last and passage.searching:
        assert passage.last_block is not None
        passage.found_end, passage.missing = End(passage.last_block, after=True), Request(done=False)
        return
    passes = not passage.entered and until is not None and not until.after  # all of its blocks are left out
    if incoming is not None and not passage.entered and not (passes and not incoming.after):
        raise StepError(missing_now(stage.method, [stage.blocks[incoming.place]]))
    if agreed is not None and (until is None or until.after != agreed.after):
        raise StepError(missing_now(stage.method, [stage.blocks[agreed.place]]))
    passage.enter()
    slots = crossing.outgoing.slots if crossing.outgoing is not None and not passage.searching else {}
    if unsent := [stage.blocks[key[1]] for key in slots if key[0] == "block" and key not in passage.sent]:
        raise StepError(missing_now(stage.method, unsent))
    if passage.memory is not None and passage.ledger is None:
        passage.memory.check(passage.sent, stage.blocks)


def check_order(passage: Passage, crossing: Crossing) -> None:
    """Check that both sides of a cut counted the same operations, since values are named by operation number."""
    if not crossing.is_traced():
        return
    entered = crossing.incoming.counted
    ended = crossing.outgoing.counted if crossing.outgoing else None
    if entered not in (None, passage.entered_at) or ended not in (None, passage.counted):
        raise StepError(
            f"Stage {passage.stage} ran other code around the blocks than the stage before, or than for an earlier"
            " microbatch of the same shapes, so what crosses between stages isn't known: what a network runs may depend"
            " on a batch's shapes, not on its values or on random numbers. Or use pipeline_parallel_size=1."
        )
