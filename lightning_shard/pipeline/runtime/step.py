"""Runs a user's step over microbatches: one rank's forwards and backwards, in the order of the schedule.

The first microbatch of each signature searches for the values that cross between stages (``search.py``). After that,
each action receives, computes and sends, and the receives of the next action are posted one action ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_shard import tree
from lightning_shard.errors import RankFailure, StepError
from lightning_shard.pipeline.dataflow.backward_hooks import refusing_earlier_graphs
from lightning_shard.pipeline.dataflow.crossing import Crossing
from lightning_shard.pipeline.dataflow.messages import Key, Request, Slot
from lightning_shard.pipeline.dataflow.search import (
    CallsAgain,
    Memory,
    OfAny,
    Post,
    Ran,
    RunStep,
    Search,
    check_order,
    check_ran,
    find_crossing,
)
from lightning_shard.pipeline.runtime.call_by_call import CallByCall
from lightning_shard.pipeline.runtime.channel import Channel, Signature, signature
from lightning_shard.pipeline.runtime.split_backward import Product, backward_but_products, backward_of_products
from lightning_shard.pipeline.schedules.recorded import UNWATCHED, Watch
from lightning_shard.pipeline.schedules.schedule import Action
from lightning_shard.pipeline.stages.stage import Stage

_KNOWN = 1024
"""Of so many signatures it is remembered what crosses."""

#: Calls the user's step for a stage on a microbatch, with the random numbers of the microbatch of this number.
RunOn = Callable[[Stage, int, Any], Any]
#: Waits for posted receives, and returns what was received.
Arriving = Callable[[], Any]


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward, on one stage."""

    crossing: Crossing
    received: Mapping[Key, Tensor]
    sent: Mapping[Key, Tensor]
    loss: Tensor | None


@dataclass(frozen=True)
class _Owed:
    """The pending second part of a microbatch's backward on one stage; ``received`` holds parameters only."""

    received: Mapping[Key, Tensor]
    products: Sequence[Product]


@dataclass
class _Ends:
    """A stage of this rank, its channel to the neighbours, and the values that cross its cuts.

    Attributes:
        crossings: By signature.
        latest: What was last searched for, by the kind of step.
    """

    stage: Stage
    channel: Channel
    crossings: dict[Signature, Crossing] = field(default_factory=dict)
    latest: dict[str, Crossing] = field(default_factory=dict)


class PipelinedStep:
    """Runs one rank's part of every step.

    Args:
        stages: This rank's stages of the cut model, in order.
        channels: Each stage's channel to its neighbours.
        remember: Takes a snapshot of what a step may change beside gradients; with ``puts_back=False`` for its check
            alone.
        of_any: Whether a condition holds on any data rank, where forwards make collective calls over data ranks: then
            all ranks run a microbatch as often as the one that runs it most often.
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        channels: Iterable[Channel],
        remember: Callable[..., Memory],
        of_any: OfAny = bool,
    ) -> None:
        self._ends = {stage.index: _Ends(stage, channel) for stage, channel in zip(stages, channels, strict=True)}
        self._remember = remember
        self.has_skipped_backward = False  # in this batch, since the later stages had no gradient for it
        self.has_split_backward = False  # in any batch
        self.watch: Watch = UNWATCHED
        self._again: set[str] = set()
        self.looked_again_at: str | None = None
        self.found_other = False  # when it last looked again
        self._call_by_call: set[Signature] = set()
        self._of_any = of_any
        self.returns: Callable[[Stage, list[Tensor]], None] = lambda stage, sent: None
        self.call_by_call = CallByCall([(end.stage, end.channel) for end in self._ends.values()])

    def train(
        self,
        run_on: RunOn,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        *,
        loss_of: Callable[[int, Any], Tensor],
        before_backward: Callable[[Stage, int, bool], None],
        after_backward: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Run forwards and backwards in the schedule's order.

        Args:
            run_on: Calls the step for a stage on a microbatch, with the random numbers of that of a number.
            microbatches: The microbatches, the same on every stage.
            actions: This rank's row of the schedule.
            loss_of: Gives a microbatch's loss from its number and the step's return value, scaled so that microbatches'
                losses add up. Called on the last stage only.
            before_backward: Called before each backward, or its first part, with the stage, the microbatch's number,
                and whether it is this rank's last one.
            after_backward: Called after each whole backward, or its second part.

        Returns:
            The step's return value for each microbatch, on the rank of the last stage; else an empty list.
        """
        in_flight: dict[tuple[int, int], _InFlight] = {}
        owed: dict[tuple[int, int], _Owed] = {}
        self.has_skipped_backward = False
        results: dict[int, Any] = {}
        last_backward = next(action for action in reversed(actions) if action.kind in "BI")
        arriving: dict[Action, Arriving] = {}

        def run(stage: Stage, i: int) -> Any:
            return run_on(stage, i, microbatches[i])

        def crossing_of(action: Action) -> Crossing | None:
            started = in_flight.get((action.stage, action.microbatch))
            return started.crossing if started is not None else None

        for action, ran in self._in_order(run, microbatches, actions, "train", self.watch, arriving, crossing_of):
            end = self._ends[action.stage]
            i = action.microbatch
            if ran is not None:
                loss = None
                if end.stage.is_last:
                    loss = loss_of(i, ran.result)
                    results[i] = tree.map_leaves(_detached, ran.result)  # keep no graph alive
                in_flight[action.stage, i] = _InFlight(ran.crossing, ran.passage.received, ran.passage.sent, loss)
                continue
            with _named(f"{action.kind}{i}"):
                if action.kind == "W":
                    self._backward_of_weights(end.stage, owed.pop((action.stage, i)))
                else:
                    before_backward(end.stage, i, action == last_backward)
                    microbatch = in_flight.pop((action.stage, i))
                    products = self._backward(end, microbatch, arriving.pop(action, None), splits=action.kind == "I")
                    if action.kind == "I":
                        parameters = {key: t for key, t in microbatch.received.items() if key[0] == "parameter"}
                        owed[action.stage, i] = _Owed(parameters, products)
                    del microbatch, products  # frees the graph; products must be freed by their second part
                if action.kind != "I":
                    after_backward()
        self.watch.ends()
        self.flush()
        return [results[i] for i in sorted(results)]

    def rehearse(self, run: Callable[[Stage], Any], kind: str) -> Exception | None:
        """Run one more microbatch forward through all stages, one after the other, in a single round of a search.

        Each stage sends what it last sent for this kind of step. Of a microbatch of other shapes more may be needed, or
        the code may not take it.

        Args:
            run: Calls the step for a stage.

        Returns:
            ``None`` on all ranks if the microbatch has passed all stages; else an error on all ranks.
        """
        errors: list[Exception] = []

        def attempt(stage: Stage, _: int) -> Any:
            try:
                return run(stage)
            except RankFailure:
                raise
            except Exception as error:
                errors.append(error)
                stage.passage.missing = Request(done=False)

        post = Post([*self._ends.values()][-1].channel)
        searches = [Search(end.stage, end.channel, post) for end in self._ends.values()]
        for search, end in zip(searches, self._ends.values()):
            search.begin_as(end.latest[kind])
            try:
                search.run(attempt, 0, serves=False)
            except StepError as error:
                errors.append(error)
                search.fail(Request(done=False))
        answers = [search.end() for search in reversed(searches)]
        post.close()
        all_passed = all(self.gather(all(answer.done for answer in answers) and not errors))
        self.flush()
        return None if all_passed else next(iter(errors), StepError("Another stage's run failed."))

    def gather(self, value: Any) -> list[Any]:
        """All ranks' values, the last stage's last; a collective call over the pipeline."""
        return [*self._ends.values()][-1].channel.gather(value)

    def look_again(self, step: str) -> None:
        """Search once more for what crosses, in the next batch of each kind that begins with ``step``: at a new epoch.

        What a step computes may depend on the epoch. :attr:`looked_again_at` is then the kind, and if
        :attr:`found_other` is true on any stage, all have to :meth:`forget` what they know of other signatures.
        """
        kinds = {kind for end in self._ends.values() for kind in end.latest}
        self._again |= {kind for kind in kinds if kind.split()[0] == step}

    def knows_others(self, kind: str) -> bool:
        """Whether more than the latest signature is known of a kind of step; the same on all stages."""
        return any(sum(key[0] == kind for key in end.crossings) > 1 for end in self._ends.values())

    def forget(self, kind: str) -> None:
        """Forget what crosses for signatures of this kind, but the latest."""
        for end in self._ends.values():
            latest = end.latest[kind]
            end.crossings = {k: each for k, each in end.crossings.items() if k[0] != kind or each is latest}

    def knows(self, microbatches: Sequence[Any], kind: str) -> bool:
        """Whether it is known which values cross, so that a stage needs no answer from the next one to run its part."""
        return kind not in self._again and all(
            self._is_settled(signature(microbatch, kind)) for microbatch in microbatches
        )

    def evaluate(
        self,
        run_on: RunOn,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        kind: str,
        *,
        waits: bool = True,
    ) -> list[Any] | None:
        """Run forwards only: microbatches stream through the stages.

        Args:
            run_on: Calls the step for a stage on a microbatch, of this number.
            microbatches: The microbatches, the same on every stage.
            actions: This rank's row of the schedule; backwards are left out.
            kind: The kind of step.
            waits: Whether to wait until all sends have completed.

        Returns:
            The step's return value for each microbatch, on the rank of the last stage; else an empty list. ``None`` on
            all ranks if the step calls the network several times: then the run had no effect, and the batch must run
            :attr:`call_by_call`.
        """
        first = signature(microbatches[0], kind)
        if not self._of_any(first not in self._call_by_call):
            return None
        forwards = [action for action in actions if action.kind == "F"]
        results: dict[int, Any] = {}

        def run(stage: Stage, i: int) -> Any:
            return run_on(stage, i, microbatches[i])

        try:
            for action, ran in self._in_order(run, microbatches, forwards, kind, UNWATCHED, {}, lambda _: None):
                if ran is None:
                    continue
                if ran.stage.is_last:
                    results[action.microbatch] = ran.result
        except CallsAgain:
            self._call_by_call.add(first)
            return None
        if waits:
            self.flush()
        return [results[i] for i in sorted(results)]

    @property
    def sent(self) -> list[int]:
        """The number of tensors that each stage of this rank has sent so far."""
        return [end.channel.sent for end in self._ends.values()]

    def flush(self, until: Sequence[int] | None = None) -> None:
        """Wait until sends have completed: all of them, or those counted by an earlier value of :attr:`sent`."""
        numbers: Sequence[int | None] = [None] * len(self._ends) if until is None else until
        for end, number in zip(self._ends.values(), numbers):
            end.channel.flush(number)

    def _in_order(
        self,
        run: RunStep,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        kind: str,
        watch: Watch,
        arriving: dict[Action, Arriving],
        crossing_of: Callable[[Action], Crossing | None],
    ) -> Iterator[tuple[Action, Ran | None]]:
        """Yield this rank's actions in order; forwards after running them, backwards for the caller to run.

        As long as the signature of a remaining microbatch isn't settled, microbatches go through all stages one at a
        time, in the same order on every rank. The schedule's order begins after that, with receives posted one action
        ahead.

        Args:
            arriving: Filled with posted receives, by action; forwards take theirs out.
            crossing_of: The crossing of an action's microbatch, if that is in flight.
        """
        keys = [signature(microbatch, kind) for microbatch in microbatches]
        found: set[Action] = set()
        again = kind in self._again
        if again:
            self._again.discard(kind)
            self.looked_again_at, self.found_other = kind, False
        for i, key in enumerate(keys):
            again = again and i == 0
            if not self._of_any(again or not all(map(self._is_settled, keys[i:]))):
                break
            searches = self._of_any(again or not self._is_settled(key))
            searched: dict[int, Ran] = {}
            for index, end in self._ends.items():
                action = Action(index, "F", i)
                found.add(action)
                watch.begins(action)
                if not searched and searches:
                    searched = self._find_crossing(run, i, keys, kind)
                yield action, searched.get(index) or self._forward(end, run, i, key)
        rest = [action for action in actions if action not in found]
        for place, action in enumerate(rest):
            watch.begins(action)
            for each in rest[place : place + 2]:
                end = self._ends[each.stage]
                crossing = crossing_of(each) or end.crossings[keys[each.microbatch]]
                if each not in arriving and not _expect(each, end, crossing, arriving):
                    break  # first, flags tell which gradients follow on this link
            if action.kind == "F":
                i, end = action.microbatch, self._ends[action.stage]
                with _named(f"F{i}"):
                    ran = self._forward(end, run, i, keys[i], arriving.pop(action, None))
                yield action, ran
            else:
                yield action, None

    def _is_settled(self, key: Signature) -> bool:
        """Whether the values that cross are final for this signature; the same answer on all stages."""
        return all(key in end.crossings and end.crossings[key].is_settled for end in self._ends.values())

    def _find_crossing(self, run: RunStep, i: int, keys: Sequence[Signature], kind: str) -> dict[int, Ran]:
        post = Post([*self._ends.values()][-1].channel)
        searches = [Search(end.stage, end.channel, post) for end in self._ends.values()]
        if all(kind in end.latest for end in self._ends.values()):
            for search, end in zip(searches, self._ends.values()):
                search.begin_as(end.latest[kind])
        memory = self._remember(puts_back=not torch.is_grad_enabled() or len(self._ends) > 1)
        try:
            find_crossing(searches, run, i, self.returns)
            memory.check()
        except CallsAgain:
            memory.put_back()
            raise
        finally:
            memory.forget()
        ran = {}
        for search, end in zip(searches, self._ends.values()):
            crossing = search.crossing
            self.found_other |= kind not in end.latest or not crossing.is_like(end.latest[kind])
            # A first microbatch may run more operations than others, to fill caches. So if operations are counted, the
            # second microbatch is searched too. Whether any stage counts them is known to all stages.
            crossing.is_settled = crossing.is_settled or keys[i] in end.crossings
            end.crossings[keys[i]] = end.latest[kind] = crossing
            _forget_oldest(end.crossings, keys)
            ran[end.stage.index] = search.ran
        return ran

    def _forward(self, end: _Ends, run: RunStep, i: int, key: Signature, arriving: Arriving | None = None) -> Ran:
        """Run one microbatch's forward on one stage, with known crossing values."""
        stage, channel, crossing = end.stage, end.channel, end.crossings[key]
        if arriving is None and not stage.is_first:
            arriving = channel.expect(crossing.incoming.slots)
        received = arriving() if arriving is not None else {}
        self.watch.computes()
        with stage.microbatch(received, crossing) as passage:
            result = run(stage, i)
            check_ran(stage, passage, crossing)
        check_order(passage, crossing)
        if crossing.outgoing is not None:
            channel.send(passage.sent, crossing.outgoing.slots)
            # gradients come back in the order of the agreed slots
            passage.sent = {key: passage.sent[key] for key in crossing.outgoing.slots}
        return Ran(stage, crossing, passage, result)

    def _backward(
        self, end: _Ends, microbatch: _InFlight, arriving: Arriving | None, *, splits: bool
    ) -> Sequence[Product]:
        """Run a whole backward; or its first part, and return the products that are left for the second."""
        products: Sequence[Product] = ()
        with end.stage.backward(microbatch.received), refusing_earlier_graphs():
            if microbatch.loss is not None:
                outputs: list[Tensor] = [microbatch.loss]
                gradients: list[Tensor | None] = [None]
            else:
                outputs, gradients = self._needed(end.channel, microbatch, arriving)
            if outputs and splits:
                crossing = microbatch.crossing
                received = microbatch.received.values()
                products = backward_but_products(outputs, gradients, received, checks=not crossing.has_checked_products)
                crossing.has_checked_products = True
            elif outputs:
                torch.autograd.backward(outputs, gradients)
        if not end.stage.is_first:
            _send_gradients(end.channel, microbatch)
        return products

    def _backward_of_weights(self, stage: Stage, owed: _Owed) -> None:
        self.watch.computes()
        self.has_split_backward |= bool(owed.products)
        with stage.backward(owed.received):
            backward_of_products(owed.products)

    def _needed(
        self, channel: Channel, microbatch: _InFlight, arriving: Arriving | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The sent values that have gradients, and these gradients, received from the next stage.

        A sent value without a gradient on the later stages gets none here: parameters that only it depends on keep
        ``None``.
        """
        crossing = microbatch.crossing
        outputs = [tensor for tensor in microbatch.sent.values() if tensor.requires_grad]
        if crossing.needed_later is None and outputs:
            crossing.needed_later = channel.receive_needed(len(outputs))
        if arriving is None:
            arriving = channel.expect_gradients(_that_need_gradients(crossing))
        gradients = arriving()
        self.watch.computes()
        needed = [
            (output, gradient)
            for output, gradient, is_needed in zip(outputs, gradients, crossing.needed_later or ())
            # without a gradient in the first microbatch, it may have one now
            if is_needed or bool(gradient.any())
        ]
        self.has_skipped_backward |= not needed
        return [output for output, _ in needed], [gradient for _, gradient in needed]


def _forget_oldest(crossings: dict[Signature, Crossing], in_use: Sequence[Signature]) -> None:
    """Limit what is known where batches are of ever new shapes; on all stages alike, since all search together."""
    if len(crossings) > _KNOWN:
        crossings.pop(next((key for key in crossings if key not in in_use), None), None)  # type: ignore[arg-type]


def _expect(action: Action, end: _Ends, crossing: Crossing, arriving: dict[Action, Arriving]) -> bool:
    """Post an action's receives; returns whether it is known yet what it receives."""
    if action.kind == "W":
        return True  # nothing
    if action.kind == "F":
        if not end.stage.is_first:
            arriving[action] = end.channel.expect(crossing.incoming.slots)
        return True
    slots = _that_need_gradients(crossing)
    if slots and crossing.needed_later is None:
        return False
    if slots:
        arriving[action] = end.channel.expect_gradients(slots)
    return True


def _that_need_gradients(crossing: Crossing) -> list[Slot]:
    return [slot for slot in crossing.outgoing.slots.values() if slot.requires_grad] if crossing.outgoing else []


def _send_gradients(channel: Channel, microbatch: _InFlight) -> None:
    crossing = microbatch.crossing
    received = [tensor for tensor in microbatch.received.values() if tensor.requires_grad]
    if not crossing.told_needed and received:
        channel.send_needed([tensor.grad is not None for tensor in received])
        crossing.told_needed = True
    for tensor in received:
        if tensor.grad is not None:
            # for x + weight[None], autograd lets both gradients alias, and a later backward adds to weight's in place
            tensor.grad = tensor.grad.clone()
    channel.send_gradients(received)


def _named(action: str) -> AbstractContextManager[Any]:
    """Names an action for profilers, if one is active: ``record_function`` takes as long as a small block."""
    return record_function(action) if torch.autograd._profiler_enabled() else nullcontext()


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
