"""Run a user's step over microbatches through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.profiler import record_function

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.calls import Calls, Remember
from lightning_shard.pipeline.channel import Channel, signature
from lightning_shard.pipeline.crossing import Crossing, Delivery, Key, Passage, Request, Slot, StageEnd
from lightning_shard.pipeline.recorded import UNWATCHED, Watch
from lightning_shard.pipeline.schedule import Action
from lightning_shard.pipeline.stage import Stage
from lightning_shard.pipeline.taint import refuse


class _CallsAgain(Exception):
    """A step calls the network several times; known on all stages."""


#: Waits for what was posted to be received.
Arriving = Callable[[], Any]
#: Calls the user's step on microbatch ``i``; returns its result, on the last stage.
RunStep = Callable[[int], Any]


class Memory(Protocol):
    """What a step may change beside gradients, as it was."""

    def put_back(self) -> None: ...

    def check(self) -> None:
        """After each run: see that it changed nothing that can't be put back."""

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

    def forget(self) -> None:
        self.memory.forget()


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward."""

    crossing: Crossing
    received: Mapping[Key, Tensor]
    sent: Mapping[Key, Tensor]
    loss: Tensor | None


class PipelinedStep:
    """One stage's part of every step.

    Args:
        stage: The stage of the model that was cut.
        channel: This rank's ends of its pipeline.
        remember: Notes what a step may change beside gradients.
    """

    def __init__(self, stage: Stage, channel: Channel, remember: Callable[[], Memory]) -> None:
        self.stage = stage
        self.channel = channel
        self._remember = remember
        self.has_skipped_backward = False  # in this batch, since the later stages had no gradient for it
        self.watch: Watch = UNWATCHED
        self._crossings: dict[Hashable, Crossing] = {}
        self._call_by_call: set[Hashable] = set()

    def train(
        self,
        run: RunStep,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        *,
        loss_of: Callable[[Any], Tensor],
        before_backward: Callable[[int, bool], None],
        backward: Callable[[Tensor], None],
    ) -> list[Any]:
        """Forwards and backwards in the schedule's order.

        Args:
            run: Calls the step on a microbatch by number.
            microbatches: What they hold; the same on every stage.
            actions: This stage's order.
            loss_of: The loss in what the step returned, scaled to be summed over microbatches; last stage only.
            before_backward: Told before each backward which microbatch's it is, and whether it's the last.
            backward: Runs the loss's backward.

        Returns:
            What the step returned for each microbatch, on the last stage; else an empty list.
        """
        in_flight: dict[int, _InFlight] = {}
        self.has_skipped_backward = False
        results: dict[int, Any] = {}
        signatures = [signature(microbatch, "train") for microbatch in microbatches]
        last_backward = next(a.microbatch for a in reversed(actions) if a.kind == "B")
        arriving: dict[Action, Arriving] = {}
        for place, action in enumerate(actions):
            self.watch.begins(action)
            _, kind, i = action
            for each in actions[place : place + 2]:  # one action ahead
                started = in_flight.get(each.microbatch)
                crossing = started.crossing if started else self._crossings.get(signatures[each.microbatch])
                if each not in arriving and not self._expect(each, crossing, arriving):
                    break  # what comes next on this link is a conversation
            with record_function(f"{kind}{i}"):
                if kind == "F":
                    passage, result = self._forward(run, i, signatures[i], arriving.pop(action, None))
                    loss = None
                    if self.stage.is_last:
                        loss = loss_of(result)
                        results[i] = tree.map_leaves(_detached, result)  # keep no graph alive
                    in_flight[i] = _InFlight(self._crossings[signatures[i]], passage.received, passage.sent, loss)
                else:
                    before_backward(i, i == last_backward)
                    self._backward(in_flight.pop(i), backward, arriving.pop(action, None))
        self.watch.ends()
        self.channel.flush()
        return [results[i] for i in sorted(results)]

    def knows(self, microbatches: Sequence[Any], kind: str) -> bool:
        """Whether it is known what crosses, so that a stage may run its part without an answer from the next one."""
        found = [self._crossings.get(signature(microbatch, kind)) for microbatch in microbatches]
        return all(crossing is not None and crossing.is_settled for crossing in found)

    def evaluate(self, run: RunStep, microbatches: Sequence[Any], kind: str, *, waits: bool = True) -> list[Any] | None:
        """Forwards only: microbatches stream through the stages.

        Args:
            waits: Until all that was sent has left.

        Returns:
            What the step returned for each microbatch, on the last stage; else an empty list. ``None`` on all where it
            calls the network several times: then nothing was done, and the batch is to go :meth:`call_by_call`.
        """
        keys = [signature(microbatch, kind) for microbatch in microbatches]
        if keys[0] in self._call_by_call:
            return None
        actions = [Action(self.stage.index, "F", i) for i in range(len(keys))]
        arriving: dict[Action, Arriving] = {}
        results = []
        try:
            for i, (action, key) in enumerate(zip(actions, keys)):
                for each in actions[i : i + 2]:
                    crossing = self._crossings.get(keys[each.microbatch])
                    if each not in arriving and not self._expect(each, crossing, arriving):
                        break
                with record_function(f"F{i}"):
                    results.append(self._forward(run, i, key, arriving.pop(action, None))[1])
        except _CallsAgain:
            self._call_by_call.add(keys[0])
            return None
        if waits:
            self.channel.flush()
        return results if self.stage.is_last else []

    def flush(self) -> None:
        """Wait until all that was sent has left."""
        self.channel.flush()

    def call_by_call(self, run: Callable[[], Any], after_call: Callable[[int], None]) -> Any:
        """A step that calls the network several times, on its whole batch.

        Args:
            run: Calls the step.
            after_call: Told after each call of the network how many there were.

        Returns:
            What the step returned; on the last stage only.
        """
        stage = self.stage
        calls = Calls(
            stage.index, stage.is_last, stage.entrances, stage.device, self.channel, self._through_stages, after_call
        )
        with stage.calling(calls):
            result = run()
            calls.end()
        return result

    def _through_stages(self, call: Callable[[], Any], remember: Remember) -> Any:
        """One call of the network, and what it returned (on the last stage)."""
        stage = self.stage

        def run(_: int) -> Any:
            try:
                with stage.running(stage.entrances[0]):
                    output = call()
                    if stage.is_last:
                        refuse(output, "What the network returns")
                    return output
            except StageEnd:
                return None

        result = self._find_crossing(run, 0, lambda: MemoryBeside(self._remember(), remember()))[1]
        self.channel.flush()
        return result

    def _expect(self, action: Action, crossing: Crossing | None, arriving: dict[Action, Arriving]) -> bool:
        """Post what an action receives; whether it is known yet what that is."""
        if crossing is None:
            return False
        if action.kind == "F":
            if not crossing.is_settled:
                return False
            if not self.stage.is_first:
                arriving[action] = self.channel.expect(crossing.incoming.slots)
            return True
        slots = _that_need_gradients(crossing)
        if slots and crossing.needed_later is None:
            return False
        if slots:
            arriving[action] = self.channel.expect_gradients(slots)
        return True

    def _forward(self, run: RunStep, i: int, key: Hashable, arriving: Arriving | None = None) -> tuple[Passage, Any]:
        """One microbatch's forward, and what the step returned (on the last stage)."""
        crossing = self._crossings.get(key)
        if crossing is None or not crossing.is_settled:
            passage, result, found = self._find_crossing(run, i, self._remember)
            # A first microbatch may run more operations than others, to fill caches: where they are counted, the second
            # one's are. All stages know alike whether any of them counts.
            found.is_settled = found.is_settled or crossing is not None
            self._crossings[key] = found
            return passage, result
        received = arriving() if arriving is not None else {}
        self.watch.computes()
        with self.stage.microbatch(received, crossing) as passage:
            result = run(i)
            _check_ran(self.stage, passage)
        _check_order(passage, crossing)
        if crossing.outgoing is not None:
            self.channel.send(passage.sent, crossing.outgoing.slots)
            # gradients come back in the order in which values were agreed to be sent
            passage.sent = {key: passage.sent[key] for key in crossing.outgoing.slots}
        return passage, result

    def _find_crossing(self, run: RunStep, i: int, remember: Callable[[], Memory]) -> tuple[Passage, Any, Crossing]:
        """The first microbatch of a signature: run it until neither this stage nor a later one misses anything.

        A stage that misses a value asks the one before, which runs its part again to send it. In between everything is
        put back as it was. Nobody asks for a name twice, so this ends.
        """
        stage, channel = self.stage, self.channel
        memory = remember()
        asked: list[Key] = []
        unavailable: set[Key] = set()
        while True:
            incoming, received = Delivery(), {}
            if not stage.is_first:
                incoming = channel.hear()
                received = channel.receive(incoming.slots)
            crossing = Crossing(incoming, asked, unavailable)
            with stage.microbatch(received, crossing, searching=True) as passage:
                result = run(i)
                if passage.missing is None:
                    _check_ran(stage, passage)
            request = passage.missing or self._deliver(passage, crossing)
            if request.done:
                crossing.is_settled = not (incoming.traced or request.traced)
            if not stage.is_first:
                channel.request(request)
            if request.done:
                memory.check()
                _check_order(passage, crossing)
                passage.known.clear()
                passage, result = self._check_complete(run, i, passage, result, crossing, memory)
                memory.forget()
                return passage, result, crossing
            memory.check()
            memory.put_back()
            if request.again:
                memory.forget()
                raise _CallsAgain

    def _check_complete(
        self, run: RunStep, i: int, passage: Passage, result: Any, crossing: Crossing, memory: Memory
    ) -> tuple[Passage, Any]:
        """Where NaN came up here: whether it is the network's own, or came from a hollow parameter.

        Unknown values are followed through torch's functions; this finds one that went another way, such as through a
        scripted function. Then NaN goes where unknown values are 0 instead. Once per signature.

        Raises:
            StepError: It came from a hollow parameter.
        """
        found = [] if self.stage.is_first or _nan_of(passage.received) else _nan_of((passage.sent, result))
        if not found:
            return passage, result
        memory.put_back()
        received = {
            key: tensor.detach().requires_grad_(tensor.requires_grad) for key, tensor in passage.received.items()
        }
        with self.stage.unknown_values_being(0.0), self.stage.microbatch(received, crossing) as again:
            result = run(i)
        if crossing.outgoing is not None:
            again.sent = {key: again.sent[key] for key in crossing.outgoing.slots}
        own = _nan_of((again.sent, result))
        if len(own) != len(found) or not all(map(torch.equal, own, found)):
            raise StepError(
                f"Stage {passage.stage} turned finite values into NaN that a plain run wouldn't have: code around its"
                " blocks computes something that only an earlier stage has in a way that can't be followed, such as a"
                " scripted function. Use torch's own functions there, make it a part of the blocks, or use"
                " pipeline_parallel_size=1."
            )
        return again, result

    def _deliver(self, passage: Passage, crossing: Crossing) -> Request:
        """Send what the next stage gets; whether that is all it needs, and if not, what this stage needs for it."""
        if self.stage.is_last:
            return Request(done=True, traced=crossing.is_traced())
        crossing.outgoing = self.stage.delivery(passage, crossing)
        self.channel.announce(crossing.outgoing)
        self.channel.send(passage.sent, crossing.outgoing.slots)
        answer = self.channel.requested()
        if answer.again:
            return answer
        if answer.done:
            return replace(answer, traced=answer.traced or crossing.is_traced())
        if again := set(answer.keys) & set(crossing.asked):
            raise StepError(f"{answer.sentence} {sorted(again, key=str)} can't be sent between stages.")
        crossing.asked.extend(answer.keys)
        needed: dict[Key, None] = {}
        for key in answer.keys:
            own = passage.ask(key, answer.sentence)
            if own is None:
                crossing.unavailable.add(key)
            else:
                needed.update(dict.fromkeys(own))
        return Request(False, tuple(needed), answer.sentence)

    def _backward(
        self, microbatch: _InFlight, backward: Callable[[Tensor], None], arriving: Arriving | None = None
    ) -> None:
        with self.stage.backward(microbatch.received):
            if microbatch.loss is not None:
                backward(microbatch.loss)
            else:
                self._backward_of_sent(microbatch, arriving)
        if not self.stage.is_first:
            self._send_gradients(microbatch)

    def _backward_of_sent(self, microbatch: _InFlight, arriving: Arriving | None) -> None:
        """What has no gradient on the later stages has none here: parameters that only it needs keep ``None``."""
        crossing = microbatch.crossing
        outputs = [tensor for tensor in microbatch.sent.values() if tensor.requires_grad]
        if crossing.needed_later is None and outputs:
            crossing.needed_later = self.channel.receive_needed(len(outputs))
        if arriving is None:
            arriving = self.channel.expect_gradients(_that_need_gradients(crossing))
        gradients = arriving()
        self.watch.computes()
        needed = [
            (output, gradient)
            for output, gradient, is_needed in zip(outputs, gradients, crossing.needed_later or ())
            # what had none in the first microbatch may have one now
            if is_needed or bool(gradient.any())
        ]
        self.has_skipped_backward |= not needed
        if needed:
            torch.autograd.backward([output for output, _ in needed], [gradient for _, gradient in needed])

    def _send_gradients(self, microbatch: _InFlight) -> None:
        crossing = microbatch.crossing
        received = [tensor for tensor in microbatch.received.values() if tensor.requires_grad]
        if not crossing.told_needed and received:
            self.channel.send_needed([tensor.grad is not None for tensor in received])
            crossing.told_needed = True
        self.channel.send_gradients(received)


def _that_need_gradients(crossing: Crossing) -> list[Slot]:
    return [slot for slot in crossing.outgoing.slots.values() if slot.requires_grad] if crossing.outgoing else []


def _check_ran(stage: Stage, passage: Passage) -> None:
    if not passage.finished:
        raise StepError(
            "The step returned without calling the network, or the network skipped its blocks; with several"
            " pipeline stages every step calls it exactly once, and its blocks in the order of pipeline_blocks. Call"
            " it, or use pipeline_parallel_size=1."
        )


def _check_order(passage: Passage, crossing: Crossing) -> None:
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


def _nan_of(values: Any) -> list[Tensor]:
    """Where there is NaN, if anywhere; waits for the device."""
    masks = [tensor.detach().isnan() for tensor in tree.tensors(values) if tensor.is_floating_point()]
    return masks if any(bool(mask.any()) for mask in masks) else []


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf
