"""Runs a signature's first microbatch through all stages, each of which fetches what it misses (``fetching.py``).

Stage s begins when stage s − 1 has sent to it, and may then ask stage s − 1, which serves it: requests nest as calls
do. Messages go in collective calls of the pipeline's ranks, of which all but one wait. Each wait of a rank serves
requests to all of its stages, also the last one, for the end of all ranks' runs. No other microbatch is in flight
meanwhile.

The values that crossed for the last microbatch of the same kind of step are sent at once: batches whose lengths always
differ mostly need the same.

If a step calls no block of later stages, a stage before the last comes to its end, or to code that needs what later
stages hold. The end of its part is then where the last block returned, and the last stage runs what follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import Crossing, Passage, called_now, missing_now, none_called
from lightning_shard.pipeline.dataflow.messages import Delivery, Key, Request, Slot
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step on microbatch ``i``, up to the end of the stage's part; returns its result, on the last stage.
RunStep = Callable[[Stage, int], Any]


#: Whether a condition holds on any of the ranks that have to run alike; a collective call over them.
OfAny = Callable[[bool], bool]


class CallsAgain(Exception):
    """A step calls the network several times; raised on all stages."""


class Memory(Protocol):
    """The state that a step may change beside gradients."""

    def put_back(self) -> None: ...

    def check(self) -> None:
        """After each run: raise if it changed something that can't be restored."""

    def changed(self) -> list[str]:
        """Paths of what is another one now."""

    def forget(self) -> None:
        """Nothing will be restored any more."""


@dataclass(frozen=True)
class Ran:
    """A microbatch's forward on one stage.

    Attributes:
        result: What the step returned, on the last stage; its loss, until its backward.
    """

    stage: Stage
    crossing: Crossing
    passage: Passage
    result: Any


#: A message from one stage to another: a delivery, a request, or an error; ``None`` for a run that has failed.
Letter = tuple[int, int, Any]


class Verdict(NamedTuple):
    """What is so on any stage, when all have run.

    Attributes:
        failed: A run has failed, or met a second call of the network.
        is_traced: Results of operations cross a cut.
        found_other: Something else crosses than in the kind's latest search.
    """

    failed: bool
    is_traced: bool
    found_other: bool


class Post:
    """The messages of a search between the stages of this rank and others.

    Not by receives from any rank: on gloo these abort the process if another one ends (torch 2.13).

    Args:
        channel: That of this rank's last stage.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._to_here: deque[Letter] = deque()
        self._to_others: list[Letter] = []
        self._arrived: dict[tuple[int, int], Any] = {}
        self._verdict: Verdict | None = None
        self.stages: dict[int, Search] = {}

    def send(self, message: Any, source: int, to: int) -> None:
        """Send a message from one stage, of this rank, to another; it leaves when this rank waits."""
        box = self._to_here if self._channel.is_here(to) else self._to_others
        box.append((source, to, message))

    def wait(self, source: int, to: int) -> Any:
        """The next message from one stage to another, of this rank; requests to any of its stages are served."""
        while (source, to) not in self._arrived:
            if self._to_here:
                self._take()
            else:
                self._exchange(None)
        return self._arrived.pop((source, to))

    def close(self) -> Verdict:
        """This rank's stages have run: serve others until all have."""
        while self._verdict is None:
            while self._to_here:
                self._take()
            of_stages = zip(*((s.failed, s.crossing.is_traced(), s.found_other) for s in self.stages.values()))
            said = self._exchange(tuple(map(any, of_stages)))
            if None not in said:
                self._verdict = Verdict(*map(any, zip(*said)))
        return self._verdict

    def _take(self) -> None:
        sender, receiver, message = self._to_here.popleft()
        if isinstance(message, Request):
            self.stages[receiver].serve(message)
        else:
            self._arrived[sender, receiver] = message

    def _exchange(self, verdict: tuple[bool, ...] | None) -> list[Any]:
        """Send and receive messages; returns the verdicts of ranks whose stages have run."""
        said = self._channel.gather((self._to_others, verdict))
        self._to_others = []
        self._to_here.extend(each for letters, _ in said for each in letters if self._channel.is_here(each[1]))
        return [own for _, own in said]


@dataclass
class Search:
    """One stage's part.

    Attributes:
        crossing: What crosses; as it begins, the values to send at once.
        latest: What was found for the last microbatch of this kind of step.
        passage: The run; ``None`` if the previous stage sent nothing.
        failed: Whether this stage or an earlier one has failed, or met a second call of the network.
    """

    stage: Stage
    channel: Channel
    post: Post
    passage: Passage | None = field(default=None, init=False)
    result: Any = field(default=None, init=False)
    failed: bool = field(default=False, init=False)
    crossing: Crossing = field(default_factory=lambda: Crossing(Delivery()), init=False)
    latest: Crossing | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.post.stages[self.stage.index] = self

    def begin_as(self, latest: Crossing) -> None:
        """Send what the kind's latest search has found at once."""
        self.latest = latest
        self.crossing.asked += [key for key in latest.asked if key[0] != "inside"]

    @property
    def found_other(self) -> bool:
        """Whether something else crosses than in the kind's latest search."""
        return self.latest is not None and not self.crossing.is_like(self.latest)

    @property
    def ran(self) -> Ran:
        assert self.passage is not None
        return Ran(self.stage, self.crossing, self.passage, self.result)

    def _send(self, message: Any, to: int) -> None:
        self.post.send(message, self.stage.index, to)

    def run(self, run: RunStep, i: int) -> None:
        """Receive from the previous stage, run this stage's part, and send to the next stage.

        A rank's last stage serves others inside of what its step runs in, until all have run.
        """
        stage = self.stage
        incoming = Delivery() if stage.is_first else self.post.wait(stage.index - 1, stage.index)
        if incoming is None:
            self.fail()
            return
        received = {} if stage.is_first else self.channel.expect(incoming.slots)()
        self.crossing.incoming = incoming
        with stage.microbatch(received, self.crossing, ask=self._ask) as self.passage:
            self.passage.at_end = self._end
            self.result = run(stage, i)
            self.passage.ends()

    def _end(self) -> None:
        """The stage has left the step: announce and send what it has for the next stage."""
        stage, passage, crossing = self.stage, self.passage, self.crossing
        assert passage is not None
        if passage.failed:
            self.fail()
            return
        check_ran(stage, passage, crossing)
        if stage.is_last:
            return
        crossing.leaves_after = passage.until if passage.until is not None and passage.until.after else None
        crossing.outgoing = stage.delivery(passage, crossing)
        self._send(crossing.outgoing, stage.index + 1)
        self.channel.send(passage.sent, crossing.outgoing.slots)
        if stage.index == max(self.post.stages):
            self.post.close()

    def fail(self) -> None:
        self.failed = True
        if not self.stage.is_last:
            self._send(None, self.stage.index + 1)

    def settle(self, verdict: Verdict) -> None:
        """All stages have run: it is known what crosses here.

        Raises:
            StepError: It can't, or this stage ran other code than the one before.
        """
        passage, crossing = self.passage, self.crossing
        if passage is None:
            return
        assert passage.ledger is not None
        if not verdict.failed:
            check_order(passage, crossing)
            passage.ledger.memory.check(passage.sent, self.stage.blocks)
            if not self.stage.is_last:
                crossing.outgoing = self.stage.delivery(passage, crossing)
            crossing.is_settled = not verdict.is_traced
        passage.ledger = None

    def _ask(self, keys: Sequence[Key], sentence: str) -> Mapping[Key, Tensor]:
        """Ask the previous stage; returns leaves.

        Raises:
            StepError: It can't answer.
        """
        before = self.stage.index - 1
        self._send(Request(tuple(keys), sentence), before)
        answer = self.post.wait(before, self.stage.index)
        if isinstance(answer, StepError):
            raise answer
        received = self.channel.expect(answer.slots)()
        self.crossing.incoming.slots.update(answer.slots)
        assert self.passage is not None
        assert self.passage.ledger is not None
        self.passage.ledger.memory.also(answer.aliased)
        return received

    def serve(self, request: Request) -> None:
        """Send the next stage what it asks for."""
        passage = self.passage
        assert passage is not None
        assert passage.ledger is not None
        try:
            self.stage.check_asked(request.keys)
            values = passage.ledger.answer(request.keys, request.sentence)
        except StepError as error:
            self._send(error, self.stage.index + 1)
            return
        asked = self.crossing.asked
        asked.extend(key for key in request.keys if key not in asked)
        slots = {key: Slot.of(value) for key, value in values.items()}
        self._send(Delivery(slots, aliased=passage.ledger.memory.aliased()), self.stage.index + 1)
        self.channel.send(values, slots)


def find_crossing(
    searches: Sequence[Search],
    run: RunStep,
    i: int,
    returns: Callable[[Stage, list[Tensor]], None] = lambda stage, sent: None,
) -> bool:
    """Run one microbatch through all stages; each search then knows what crosses.

    Args:
        searches: Those of this rank's stages, in order.
        returns: Called for a stage with the values that it has sent, where some of them were after its run.

    Returns:
        Whether any stage, on any rank, has found something else than in the kind's latest search.

    Raises:
        CallsAgain: The step calls the network several times; on all ranks.
    """
    for search in searches:
        search.run(run, i)
    verdict = searches[0].post.close()
    for search in searches:
        search.settle(verdict)
    if verdict.failed:
        raise CallsAgain
    for search in searches[:-1]:
        if search.crossing.asked:
            returns(search.stage, [*search.ran.passage.sent.values()])
    return verdict.found_other


def check_ran(stage: Stage, passage: Passage, crossing: Crossing) -> None:
    """Check where the stage has left the step.

    Where a run that searches comes to the step's end before the last stage, no later block is called: the last stage
    runs what follows the last one that was. An evaluation step that calls no block runs whole on every stage, and
    nothing is sent.

    Raises:
        StepError: A training step calls no block, or a step other blocks than the previous stage or an earlier
            microbatch did.
    """
    until, incoming = passage.until, crossing.incoming.until
    agreed = crossing.outgoing.until if crossing.outgoing is not None else None
    if until is None and passage.last_block is None:
        if agreed is not None:
            raise StepError(missing_now(stage.method, [stage.blocks[agreed.place]]), breaks=1)
        if passage.differentiates or incoming is not None:
            raise StepError(none_called(stage.method, stage.blocks), breaks=3)
        return
    if agreed is None and crossing.outgoing is not None and not passage.searching:
        raise StepError(called_now(stage.blocks[passage.last_block or 0]), breaks=1)
    if until is None and not stage.is_last and passage.searching:
        passage.end_after_last_block()
        until = passage.until
    entered = passage.entered_at is not None
    passes = not entered and until is not None and not until.after  # all of its blocks are left out
    if incoming is not None and not entered and not (passes and not incoming.after):
        raise StepError(missing_now(stage.method, [stage.blocks[incoming.place]]), breaks=1)
    if agreed is not None and (until is None or until.after != agreed.after):
        raise StepError(missing_now(stage.method, [stage.blocks[agreed.place]]), breaks=1)
    if not entered:
        passage.enter()
    slots = crossing.outgoing.slots if crossing.outgoing is not None and not passage.searching else {}
    if slots.keys() <= passage.sent.keys():
        return
    if unsent := [stage.blocks[key[1]] for key in slots if key[0] == "block" and key not in passage.sent]:
        raise StepError(missing_now(stage.method, unsent), breaks=1)


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
            " on a batch's shapes, not on its values or on random numbers. Or use pipeline_parallel_size=1.",
            breaks=1,
        )
