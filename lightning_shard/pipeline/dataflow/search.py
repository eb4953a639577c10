"""Find out what crosses the cuts: the first microbatch of a signature, run until no stage misses anything.

In each round it goes through all stages, one after the other. A stage that misses a value asks the one before, which
asks in turn for what it doesn't know; the stages behind it are told that nothing comes. Then all state is put back as
it was, and the next round begins. Nobody asks for a name twice, so this ends. No other microbatch is on its way
meanwhile: of two stages on one rank, the first would wait for an answer that the second must give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Crossing, Delivery, Key, Passage, Request
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step on microbatch ``i``, as far as a stage runs it; returns its result, on the last stage.
RunStep = Callable[[Stage, int], Any]


class CallsAgain(Exception):
    """A step calls the network several times; known on all stages."""


class Memory(Protocol):
    """What a step may change beside gradients, as it was."""

    def put_back(self) -> None: ...

    def check(self) -> None:
        """After each run: see that it changed nothing that can't be put back."""

    def changed(self) -> list[str]:
        """Paths to what isn't as it was."""

    def forget(self) -> None:
        """Nothing will be put back any more."""


@dataclass(frozen=True)
class MemoryBeside:
    """A memory, and what puts back something that it doesn't know of."""

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
    """One stage's part in it.

    Attributes:
        asked: What the next stage has asked for.
        unavailable: What of it is computed from parameters that a later stage holds.
        passage: Of the last round; ``None`` if nothing came.
        result: What the step returned then.
        crossing: What is known so far.
    """

    stage: Stage
    channel: Channel
    asked: list[Key] = field(default_factory=list)
    unavailable: set[Key] = field(default_factory=set)
    passage: Passage | None = None
    result: Any = None
    crossing: Crossing = field(default_factory=lambda: Crossing(Delivery()))

    @property
    def ran(self) -> Ran:
        """The last round, in which something came."""
        assert self.passage is not None
        return Ran(self.stage, self.crossing, self.passage, self.result)

    def run(self, run: RunStep, i: int) -> None:
        """Run this stage's part with what comes, and send the next stage what it gets."""
        stage, channel = self.stage, self.channel
        self.passage, sends = None, False
        incoming = Delivery() if stage.is_first else channel.hear()
        if incoming is not None:
            received = {} if stage.is_first else channel.receive(incoming.slots)
            self.crossing = Crossing(incoming, self.asked, self.unavailable)
            with stage.microbatch(received, self.crossing, searching=True) as self.passage:
                self.result = run(stage, i)
                if self.passage.missing is None:
                    check_ran(stage, self.passage)
            sends = self.passage.missing is None
        if stage.is_last:
            return
        if not sends:
            channel.announce(None)
            return
        assert self.passage is not None
        self.crossing.outgoing = stage.delivery(self.passage, self.crossing)
        channel.announce(self.crossing.outgoing)
        channel.send(self.passage.sent, self.crossing.outgoing.slots)

    def answer(self) -> Request:
        """Hear the next stage's answer, and answer the stage before: what is missing, or that nothing is."""
        if self.passage is None:
            return Request(done=False)
        request = self.passage.missing or self._of_next(self.passage)
        if request.done:
            self.crossing.is_settled = not (self.crossing.incoming.traced or request.traced)
        if not self.stage.is_first:
            self.channel.request(request)
        return request

    def _of_next(self, passage: Passage) -> Request:
        """Whether what was sent is all that the next stage needs, and if not, what this stage needs for it."""
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
            raise StepError(f"{answer.sentence} The value ({named}) can't be sent between stages.")
        self.asked.extend(answer.keys)
        needed: dict[Key, None] = {}
        for key in answer.keys:
            own = passage.ask(key, answer.sentence)
            if own is None:
                self.unavailable.add(key)
            else:
                needed.update(dict.fromkeys(own))
        return Request(False, tuple(needed), answer.sentence)


def find_crossing(searches: Sequence[Search], run: RunStep, i: int, memory: Memory) -> None:
    """Run one microbatch through all stages, until none misses anything.

    Args:
        searches: Of this rank's stages, in their order.
        memory: What its runs change.

    Raises:
        CallsAgain: The step calls the network several times; all is put back, and the memory forgotten.
    """
    while True:
        for search in searches:
            search.run(run, i)
        answers = [search.answer() for search in reversed(searches)]
        memory.check()
        if all(answer.done for answer in answers):
            break
        memory.put_back()
        if any(answer.again for answer in answers):
            memory.forget()
            raise CallsAgain
    for search in searches:
        assert search.passage is not None
        check_order(search.passage, search.crossing)
        search.passage.known.clear()
    _check_complete(searches, run, i, memory)


def run_anew(ran: Ran, run: RunStep, i: int) -> Ran:
    """Run a stage's part of a microbatch once more, on what came for it."""
    stage, crossing = ran.stage, ran.crossing
    received = {
        key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in ran.passage.received.items()
    }
    with stage.microbatch(received, crossing) as again:
        result = run(stage, i)
    if crossing.outgoing is not None:
        again.sent = {key: again.sent[key] for key in crossing.outgoing.slots}
    return Ran(stage, crossing, again, result)


def _check_complete(searches: Sequence[Search], run: RunStep, i: int, memory: Memory) -> None:
    """Where NaN came up on a stage: whether it is the network's own, or came from a hollow parameter.

    Unknown values are followed through torch's functions; this finds one that went another way, such as through a
    scripted function. Then NaN goes where unknown values are 0 instead. Once per signature.

    Raises:
        StepError: It came from a hollow parameter.
    """
    found = [_added_nan(search) for search in searches]
    if not any(found):
        return
    memory.put_back()
    for search, nan in zip(searches, found):
        with search.stage.unknown_values_being(0.0):
            again = run_anew(search.ran, run, i)
        search.passage, search.result = again.passage, again.result
        own = _nan_of((again.passage.sent, again.result)) if nan else []
        if len(own) != len(nan) or not all(map(torch.equal, own, nan)):
            raise StepError(
                f"Stage {search.stage.index} turned finite values into NaN that a plain run wouldn't have: code around"
                " its blocks computes something that only an earlier stage has in a way that can't be followed, such as"
                " a scripted function. Use torch's own functions there, make it a part of the blocks, or use"
                " pipeline_parallel_size=1."
            )


def _added_nan(search: Search) -> list[Tensor]:
    """Where there is NaN in what a stage hands on, and none came."""
    assert search.passage is not None
    if search.stage.is_first or _nan_of(search.passage.received):
        return []
    return _nan_of((search.passage.sent, search.result))


def _nan_of(values: Any) -> list[Tensor]:
    """Where there is NaN, if anywhere; waits for the device."""
    masks = [tensor.detach().isnan() for tensor in tree.tensors(values) if tensor.is_floating_point()]
    return masks if any(bool(mask.any()) for mask in masks) else []


def check_ran(stage: Stage, passage: Passage) -> None:
    if not passage.finished:
        raise StepError(
            "The step returned without calling the network, or the network skipped its blocks; with several"
            " pipeline stages every step calls it exactly once, and its blocks in the order of pipeline_blocks. Call"
            " it, or use pipeline_parallel_size=1."
        )
    if passage.memory is not None:
        passage.memory.check(passage.sent, stage.blocks)


def check_order(passage: Passage, crossing: Crossing) -> None:
    """Values are told by the number of their operation: both sides of a cut must have counted the same."""
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
