"""Runs a signature's first microbatch through all stages, each of which fetches what it misses (``fetching.py``).

Stage s begins when stage s − 1 has sent to it, and stage s − 1 then serves it until it is done, which it is when all
later stages are. So requests nest as calls do. Each wait of a rank serves requests to all of its stages.

If a step calls no block of later stages, a stage before the last comes to its end, or to code that needs what later
stages hold. The end of its part is then where the last block returned, and the last stage runs what follows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_shard.errors import RankFailure, StepError
from lightning_shard.pipeline.dataflow.crossing import Crossing, Passage
from lightning_shard.pipeline.dataflow.messages import Delivery, Key, Request, Slot
from lightning_shard.pipeline.dataflow.search import CallsAgain, Ran, RunStep, check_order, check_ran
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.stages.stage import Stage

FETCHES = os.environ.get("LIGHTNING_SHARD_FETCHES", "") != ""
"""Whether a first microbatch fetches in place what a stage misses, rather than run again."""


class Post:
    """The messages of a search between the stages of this rank and others."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._arrived: dict[tuple[int, int], Any] = {}
        self.stages: dict[int, InPlace] = {}

    def wait(self, source: int, to: int) -> Any:
        """The next message from one stage to another, of this rank; requests to any of its stages are served."""
        while (source, to) not in self._arrived:
            sender, receiver, message = self._channel.next_letter()
            if isinstance(message, Request) and message.keys:
                self.stages[receiver].serve(message)
            else:
                self._arrived[sender, receiver] = message
        return self._arrived.pop((source, to))


@dataclass
class InPlace:
    """One stage's part.

    Attributes:
        asked: Values to send at once, as they crossed for the last microbatch of this kind of step.
        passage: The run; ``None`` if the previous stage sent nothing.
        done: What the next stage said at its end, on the last stage this one.
        failed: Whether an earlier stage has failed, or met a second call of the network.
    """

    stage: Stage
    channel: Channel
    post: Post
    asked: list[Key] = field(default_factory=list)
    passage: Passage | None = None
    result: Any = None
    done: Request | None = None
    failed: Request | None = None
    crossing: Crossing = field(default_factory=lambda: Crossing(Delivery()))

    def __post_init__(self) -> None:
        self.post.stages[self.stage.index] = self

    def begin_as(self, other: Crossing) -> None:
        """Send what another signature's search has found at once."""
        self.asked = [key for key in other.asked if key[0] != "inside"]

    @property
    def ran(self) -> Ran:
        assert self.passage is not None
        return Ran(self.stage, self.crossing, self.passage, self.result)

    def run(self, run: RunStep, i: int, *, serves: bool) -> None:
        """Receive from the previous stage, run this stage's part, and send to the next stage.

        Args:
            serves: Whether to serve the next stage at once, inside of what the step runs in, until it is done.
        """
        stage = self.stage
        incoming = Delivery() if stage.is_first else self.post.wait(stage.index - 1, stage.index)
        if isinstance(incoming, Request):
            self.fail(incoming)
            return
        received = {} if stage.is_first else self.channel.receive(incoming.slots)
        self.crossing = Crossing(incoming, self.asked)
        with stage.microbatch(received, self.crossing, searching=True, ask=self._ask) as self.passage:
            self.passage.at_end = lambda: self._end(serves=serves)
            self.result = run(stage, i)
            self.passage.ends()

    def _end(self, *, serves: bool) -> None:
        """The stage has left the step: announce and send what it has for the next stage."""
        stage, passage, crossing = self.stage, self.passage, self.crossing
        assert passage is not None
        if passage.missing is not None:  # it calls the network again, or failed
            self.fail(passage.missing)
            return
        check_ran(stage, passage, crossing)
        if stage.is_last:
            return
        crossing.leaves_after = passage.until if passage.until is not None and passage.until.after else None
        crossing.outgoing = stage.delivery(passage, crossing)
        self.channel.post(crossing.outgoing, stage.index + 1)
        self.channel.send(passage.sent, crossing.outgoing.slots)
        if serves:
            self._wait_until_done()

    def fail(self, why: Request) -> None:
        self.failed = why
        if not self.stage.is_last:
            self.channel.post(why, self.stage.index + 1)

    def end(self) -> Request:
        """Wait until all later stages are done, and report that to the previous one."""
        if not self.stage.is_last and self.failed is None:
            self._wait_until_done()
        passage = self.passage
        done = self.failed or self.done or Request(done=True)
        crossing = self.crossing
        if self.failed is None and passage is not None and done.done:
            assert passage.memory is not None
            check_order(passage, crossing)
            passage.memory.check(passage.sent, self.stage.blocks)
            if not self.stage.is_last:
                crossing.outgoing = self.stage.delivery(passage, crossing)
            done = Request(done=True, traced=done.traced or crossing.is_traced())
            crossing.is_settled = not (crossing.incoming.traced or done.traced)
        if passage is not None and passage.ledger is not None:
            passage.ledger.clear()
        if not self.stage.is_first:
            self.channel.post(done, self.stage.index - 1)
        return done

    def _wait_until_done(self) -> None:
        if self.done is None:
            self.done = self.post.wait(self.stage.index + 1, self.stage.index)

    def _ask(self, keys: Sequence[Key], sentence: str) -> Mapping[Key, Tensor]:
        """Ask the previous stage; returns leaves.

        Raises:
            StepError: It can't answer.
        """
        before = self.stage.index - 1
        self.channel.post(Request(False, tuple(keys), sentence), before)
        answer = self.post.wait(before, self.stage.index)
        if isinstance(answer, StepError):
            raise answer
        received = self.channel.receive(answer.slots)
        self.crossing.incoming.slots.update(answer.slots)
        assert self.passage is not None and self.passage.memory is not None
        self.passage.memory.also(answer.aliased)
        return received

    def serve(self, request: Request) -> None:
        """Send the next stage what it asks for."""
        passage = self.passage
        assert passage is not None and passage.ledger is not None and passage.memory is not None
        try:
            self.stage.check_asked(request.keys)
            values = passage.ledger.answer(request.keys, request.sentence)
        except RankFailure:
            raise
        except StepError as error:
            self.channel.post(error, self.stage.index + 1)
            return
        self.asked.extend(key for key in request.keys if key not in self.asked)
        slots = {key: Slot.of(value) for key, value in values.items()}
        self.channel.post(Delivery(slots, aliased=passage.memory.aliased()), self.stage.index + 1)
        self.channel.send(values, slots)


def find_in_place(
    searches: Sequence[InPlace],
    run: RunStep,
    i: int,
    returns: Callable[[Stage, list[Tensor]], None] = lambda stage, sent: None,
) -> None:
    """Run one microbatch through all stages; each search then knows what crosses.

    Args:
        searches: Those of this rank's stages, in order.
        returns: Called for a stage with the values that it has sent, where some of them were after its run.

    Raises:
        CallsAgain: The step calls the network several times; on all ranks.
    """
    for search in searches:
        search.run(run, i, serves=search is searches[-1])
    answers = [search.end() for search in reversed(searches)]
    if not all(answer.done for answer in answers):
        raise CallsAgain
    for search in searches[:-1]:
        if search.asked:
            returns(search.stage, [*search.ran.passage.sent.values()])
