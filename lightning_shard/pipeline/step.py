"""Run a user's step over microbatches through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shard.errors import StepError
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.channel import Channel, signature
from lightning_shard.pipeline.schedule import Action
from lightning_shard.pipeline.stage import Stage
from lightning_shard.pipeline.taint import refuse

#: Calls the user's step on microbatch ``i``; returns whether StageEnd ended it, and its result (or the hidden state).
RunStep = Callable[[int], tuple[bool, Any]]


@dataclass
class _InFlight:
    """A microbatch between its forward and its backward."""

    received: Any
    sent: Any
    loss: Tensor | None


class PipelinedStep:
    """One stage's part of every step.

    Args:
        stage: The stage of the model that was cut.
        channel: This rank's ends of its pipeline.
    """

    def __init__(self, stage: Stage, channel: Channel) -> None:
        self.stage = stage
        self.channel = channel
        self._checked: set[Hashable] = set()

    def train(
        self,
        run: RunStep,
        microbatches: Sequence[Any],
        actions: Sequence[Action],
        *,
        loss_of: Callable[[Any], Tensor],
        before_backward: Callable[[bool], None],
        backward: Callable[[Tensor], None],
    ) -> list[Any]:
        """Forwards and backwards in the schedule's order.

        Args:
            run: Calls the step on a microbatch by number.
            microbatches: What they hold; the same on every stage.
            actions: This stage's order.
            loss_of: The loss in what the step returned, scaled to be summed over microbatches; last stage only.
            before_backward: Told before each backward whether it's the last.
            backward: Runs the loss's backward.

        Returns:
            What the step returned for each microbatch, on the last stage; else an empty list.
        """
        in_flight: dict[int, _InFlight] = {}
        results: dict[int, Any] = {}
        last_backward = next(a.microbatch for a in reversed(actions) if a.kind == "B")
        for kind, i in actions:
            if kind == "F":
                received, output = self._forward(run, i, signature(microbatches[i], "train"))
                loss = None
                if self.stage.is_last:
                    loss = loss_of(output)
                    results[i], output = tree.map_leaves(_detached, output), None  # keep no graph alive
                in_flight[i] = _InFlight(received, output, loss)
            else:
                before_backward(i == last_backward)
                self._backward(in_flight.pop(i), backward)
        self.channel.flush()
        return [results[i] for i in sorted(results)]

    def evaluate(self, run: RunStep, microbatches: Sequence[Any], kind: str) -> list[Any]:
        """Forwards only: microbatches stream through the stages."""
        results = [self._forward(run, i, signature(microbatch, kind))[1] for i, microbatch in enumerate(microbatches)]
        self.channel.flush()
        return results if self.stage.is_last else []

    def _forward(self, run: RunStep, i: int, key: Hashable) -> tuple[Any, Any]:
        """One microbatch's forward: what was received, and what the step returned (last stage) or what was sent on."""
        received = None if self.stage.is_first else self.channel.receive_state(key)
        with self.stage.microbatch(received) as passage:
            ended, result = run(i)
            if passage.output is None:
                raise StepError(
                    "The step returned without calling the network, or the network skipped its blocks; with several"
                    " pipeline stages every step calls it exactly once. Call it, or use pipeline_parallel_size=1."
                )
            assert ended != self.stage.is_last, "a stage ends exactly where its last block does"
            if self.stage.is_last:
                refuse(result, "What the step returns")
            output = result if self.stage.is_last else passage.output
            state = passage.output
        self._check_complete(key, received, (state, result))
        if not self.stage.is_last:
            self.channel.send_state(output, key)
        return received, output

    def _backward(self, microbatch: _InFlight, backward: Callable[[Tensor], None]) -> None:
        if microbatch.loss is not None:
            backward(microbatch.loss)
        else:
            outputs, gradients = self.channel.receive_gradients(microbatch.sent)
            if outputs:
                torch.autograd.backward(outputs, gradients)
        if not self.stage.is_first:
            self.channel.send_gradients(microbatch.received)

    def _check_complete(self, key: Hashable, received: Any, state: Any) -> None:
        """Once per signature: NaN that came from a hollow parameter and not from the stage before.

        Unknown values are followed through torch's functions; this finds one that went another way, such as through an
        autograd function of the model's own.
        """
        if self.stage.is_first or key in self._checked:
            return
        self._checked.add(key)
        if _has_nan(state) and not _has_nan(received):
            raise StepError(
                f"Stage {self.stage.index} turned a finite hidden state into NaN. If a plain run doesn't, its blocks or"
                " what follows them use a value besides the hidden state that only an earlier stage has (computed from"
                " its parameters, or one of its blocks' outputs): return it from the blocks as part of the hidden"
                " state, or use pipeline_parallel_size=1."
            )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _has_nan(state: Any) -> bool:
    return any(bool(t.isnan().any()) for t in tree.tensors(state) if t.is_floating_point())
