"""Runs a user's step over microbatches: one rank's forwards and backwards, in the order of the schedule.

The first microbatch of each signature searches for the values that cross (``known_crossings.py``). After that, each
action receives, computes and sends, and the receives of the next action are posted one action ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_shard import tree
from lightning_shard.pipeline.dataflow.backward_hooks import refuse_earlier_graph
from lightning_shard.pipeline.dataflow.crossing import Crossing
from lightning_shard.pipeline.dataflow.messages import Key
from lightning_shard.pipeline.dataflow.search import CallsAgain, Memory, OfAny, Ran, check_order, check_ran
from lightning_shard.pipeline.runtime.channel import Channel, Signature, signature
from lightning_shard.pipeline.runtime.known_crossings import Ends, KnownCrossings
from lightning_shard.pipeline.runtime.network_calls import Calls
from lightning_shard.pipeline.runtime.split_backward import Product, backward_but_products, backward_of_products
from lightning_shard.pipeline.schedules.recorded import StopWatch
from lightning_shard.pipeline.schedules.schedule import Action
from lightning_shard.pipeline.stages.stage import Stage

#: Calls the user's step for a stage on a microbatch, with the random numbers of the microbatch of this number.
RunOn = Callable[[Stage, int, Any], Any]
#: Waits for posted receives, and returns what was received.
Arriving = Callable[[], Any]


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
        self.crossings = KnownCrossings(stages, channels, remember)
        self.rehearse, self.gather = self.crossings.rehearse, self.crossings.gather
        self._ends = self.crossings.ends
        self.has_skipped_backward = False  # in this batch, since the later stages had no gradient for it
        self.watch: StopWatch | None = None
        self._call_by_call: set[Signature] = set()
        self._of_any = of_any
        self.calls = partial(Calls, [(end.stage, end.channel) for end in self._ends.values()])

    def train(
        self,
        run_on: RunOn,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        *,
        kind: str = "train",
        loss_of: Callable[[int, Any], Tensor],
        before_backward: Callable[[Stage, int, bool], None],
        after_backward: Callable[[], None] | None = None,
    ) -> list[Any]:
        """Run forwards and backwards in the schedule's order.

        Args:
            microbatches: The same on every stage.
            actions: This rank's row of the schedule.
            loss_of: Gives a microbatch's loss from its number and the step's return value, scaled so that microbatches'
                losses add up. Called on the last stage only.
            before_backward: Called before each backward, or its first part, with the stage, the microbatch's number,
                and whether it is this rank's last one.
            after_backward: Called after each whole backward, or its second part.

        Returns:
            The step's return value for each microbatch, on the rank of the last stage; else an empty list.
        """
        in_flight: dict[tuple[int, int], Ran] = {}
        owed: dict[tuple[int, int], tuple[Mapping[Key, Tensor], Sequence[Product]]] = {}  # and received parameters
        self.has_skipped_backward = False
        results: dict[int, Any] = {}
        last_backward = next(action for action in reversed(actions) if action.kind in "BI")
        arriving: dict[Action, Arriving] = {}
        named = _naming()
        for action, ran in self._in_order(run_on, microbatches, actions, kind, self.watch, arriving, in_flight):
            end = self._ends[action.stage]
            i = action.microbatch
            if ran is not None:
                in_flight[action.stage, i] = ran
                if end.stage.is_last:
                    results[i] = tree.detached(ran.result)  # keep no graph alive
                    in_flight[action.stage, i] = replace(ran, result=loss_of(i, ran.result))
                continue
            with named(f"{action.kind}{i}"):
                if action.kind == "W":
                    self._backward_of_weights(end.stage, *owed.pop((action.stage, i)))
                else:
                    before_backward(end.stage, i, action == last_backward)
                    microbatch = in_flight.pop((action.stage, i))
                    products = self._backward(end, microbatch, arriving.pop(action, None), splits=action.kind == "I")
                    if action.kind == "I":
                        weights = {k: t for k, t in microbatch.passage.received.items() if k[0] == "parameter"}
                        owed[action.stage, i] = weights, products
                    del microbatch, products  # frees the graph; products must be freed by their second part
                if after_backward is not None and action.kind != "I":
                    after_backward()
        if self.watch is not None:
            self.watch.ends()
        self.flush()
        return [results[i] for i in sorted(results)]

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
            actions: This rank's row of the schedule; backwards are left out.
            waits: Whether to wait until all sends have completed.

        Returns:
            The step's return value for each microbatch, on the rank of the last stage; else an empty list. ``None`` on
            all ranks if the step calls the network several times: then the run had no effect, and the batch must run
            by :attr:`calls`.
        """
        first = signature(microbatches[0], kind)
        if not self._of_any(first not in self._call_by_call):
            return None
        forwards = [action for action in actions if action.kind == "F"]
        results: dict[int, Any] = {}

        try:
            for action, ran in self._in_order(run_on, microbatches, forwards, kind, None, {}, {}):
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
        run_on: RunOn,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        kind: str,
        watch: StopWatch | None,
        arriving: dict[Action, Arriving],
        in_flight: Mapping[tuple[int, int], Ran],
    ) -> Iterator[tuple[Action, Ran | None]]:
        """Yield this rank's actions in order; forwards after running them, backwards for the caller to run.

        As long as the signature of a remaining microbatch isn't settled, microbatches go through all stages one at a
        time, in the same order on every rank. The schedule's order begins after that, with receives posted one action
        ahead.

        Args:
            arriving: Filled with posted receives, by action; forwards take theirs out.
            in_flight: The microbatches whose forward has run and whose backward hasn't, by stage and number.
        """
        keys = [signature(microbatch, kind) for microbatch in microbatches]
        crossings, named = self.crossings, _naming()
        found: set[Action] = set()
        again = crossings.has_to_look_again(kind)
        for i, key in enumerate(keys):
            again = again and i == 0
            if not self._of_any(again or not crossings.are_settled(keys[i:])):
                break
            searches = self._of_any(again or not crossings.are_settled([key]))
            searched: dict[int, Ran] = {}
            for index, end in self._ends.items():
                action = Action(index, "F", i)
                found.add(action)
                if watch is not None:
                    watch.begins(action)
                if not searched and searches:
                    searched = crossings.find(lambda stage, i: run_on(stage, i, microbatches[i]), i, keys)
                yield action, searched.get(index) or self._forward(end, key, run_on, i, microbatches[i])
        rest = [action for action in actions if action not in found]
        for place, action in enumerate(rest):
            if watch is not None:
                watch.begins(action)
            for each in rest[place : place + 2]:
                if each in arriving or each.kind == "W":
                    continue
                end, started = self._ends[each.stage], in_flight.get((each.stage, each.microbatch))
                crossing = end.crossings[keys[each.microbatch]] if started is None else started.crossing
                if each.kind == "F":
                    if not end.stage.is_first:
                        arriving[each] = end.channel.expect(crossing.incoming.slots)
                elif crossing.outgoing is not None and crossing.outgoing.gradients:
                    if crossing.needed_later is None:
                        break  # first, flags tell which gradients follow on this link
                    arriving[each] = end.channel.expect_gradients(crossing.outgoing.gradients)
            if action.kind == "F":
                i, end = action.microbatch, self._ends[action.stage]
                with named(f"F{i}"):
                    ran = self._forward(end, keys[i], run_on, i, microbatches[i], arriving.pop(action, None))
                yield action, ran
            else:
                yield action, None

    def _forward(
        self, end: Ends, key: Signature, run_on: RunOn, i: int, part: Any, arriving: Arriving | None = None
    ) -> Ran:
        """Run one microbatch's forward on one stage, with known crossing values."""
        stage, channel, crossing = end.stage, end.channel, end.crossings[key]
        if arriving is None and not stage.is_first:
            arriving = channel.expect(crossing.incoming.slots)
        received = arriving() if arriving is not None else {}
        if self.watch is not None:
            self.watch.computes()
        with stage.microbatch(received, crossing) as passage:
            result = run_on(stage, i, part)
            check_ran(stage, passage, crossing)
            if stage.trace is not None:
                check_order(passage, crossing)
        if crossing.outgoing is not None:
            channel.send(passage.sent, crossing.outgoing.slots)
            # gradients come back in the order of the agreed slots
            passage.sent = {key: passage.sent[key] for key in crossing.outgoing.slots}
        return Ran(stage, crossing, passage, result)

    def _backward(self, end: Ends, microbatch: Ran, arriving: Arriving | None, *, splits: bool) -> Sequence[Product]:
        """Run a whole backward; or its first part, and return the products that are left for the second."""
        products: Sequence[Product] = ()
        crossing, received = microbatch.crossing, microbatch.passage.received
        try:
            with end.stage.backward(received):
                if end.stage.is_last:
                    outputs: list[Tensor] = [microbatch.result]
                    gradients: list[Tensor | None] = [None]
                else:
                    outputs, gradients = self._needed(end.channel, microbatch, arriving)
                if outputs and splits:
                    checks = not crossing.has_checked_products
                    products = backward_but_products(outputs, gradients, received.values(), checks=checks)
                    crossing.has_checked_products = True
                elif outputs:
                    torch.autograd.backward(outputs, gradients)
        except RuntimeError as error:
            refuse_earlier_graph(error)
            raise
        if not end.stage.is_first:
            _send_gradients(end.channel, crossing, received)
        return products

    def _backward_of_weights(self, stage: Stage, received: Mapping[Key, Tensor], products: Sequence[Product]) -> None:
        if self.watch is not None:
            self.watch.computes()
        with stage.backward(received):
            backward_of_products(products)

    def _needed(
        self, channel: Channel, microbatch: Ran, arriving: Arriving | None
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """The sent values that have gradients, and these gradients, received from the next stage.

        A sent value without a gradient on the later stages gets none here: parameters that only it depends on keep
        ``None``.
        """
        crossing = microbatch.crossing
        outputs = [tensor for tensor in microbatch.passage.sent.values() if tensor.requires_grad]
        if crossing.needed_later is None and outputs:
            crossing.needed_later = channel.receive_needed(len(outputs))
        if arriving is None:
            arriving = channel.expect_gradients(crossing.outgoing.gradients if crossing.outgoing is not None else ())
        gradients = arriving()
        if self.watch is not None:
            self.watch.computes()
        needed = [
            (output, gradient)
            for output, gradient, is_needed in zip(outputs, gradients, crossing.needed_later or ())
            # without a gradient in the first microbatch, it may have one now
            if is_needed or bool(gradient.any())
        ]
        self.has_skipped_backward |= not needed
        return [output for output, _ in needed], [gradient for _, gradient in needed]


def _send_gradients(channel: Channel, crossing: Crossing, received: Mapping[Key, Tensor]) -> None:
    leaves = [tensor for tensor in received.values() if tensor.requires_grad]
    if not crossing.told_needed and leaves:
        channel.send_needed([tensor.grad is not None for tensor in leaves])
        crossing.told_needed = True
    for tensor in leaves:
        if tensor.grad is not None:
            # for x + weight[None], autograd lets both gradients alias, and a later backward adds to weight's in place
            tensor.grad = tensor.grad.clone()
    channel.send_gradients(leaves)


def _naming() -> Callable[[str], AbstractContextManager[Any]]:
    """Names actions for profilers, if one is active: ``record_function`` takes as long as a small block."""
    return record_function if torch.autograd._profiler_enabled() else nullcontext
