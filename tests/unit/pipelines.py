"""All stages of a pipeline in one process, a thread each: what a network computes there, next to the network alone."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.blocks import find_blocks, names_of_parameters
from lightning_shard.pipeline.cost import measure
from lightning_shard.pipeline.crossing import Key, Slot, StageEnd
from lightning_shard.pipeline.cut import cut
from lightning_shard.pipeline.orders import build
from lightning_shard.pipeline.placement import place
from lightning_shard.pipeline.schedule import Schedule
from lightning_shard.pipeline.stage import Stage
from lightning_shard.pipeline.step import PipelinedStep
from lightning_shard.pipeline.taint import refuse
from lightning_shard.pipeline.ties import find_ties
from lightning_shard.plugin.assemble import Holders
from lightning_shard.plugin.steps.kept import KeptState
from lightning_shard.plugin.steps.memory import Memory
from lightning_shard.plugin.steps.python_state import own_generators
from lightning_shard.plugin.steps.randomness import derive, seed_own

CPU = torch.device("cpu")
WAIT_S = 20.0
Result = TypeVar("Result")


class Root(nn.Module):
    """Stands for the LightningModule."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@dataclass
class QueueChannel:
    """A :class:`Channel` between threads."""

    stage: int
    stages: int
    queues: Mapping[tuple[int, int, str], queue.Queue[Any]]
    failed: threading.Event
    sizes: list[int] = field(default_factory=list)

    def _put(self, to: int, kind: str, value: Any) -> None:
        self.queues[self.stage, to, kind].put(value)

    def _get(self, source: int, kind: str) -> Any:
        while True:
            try:
                return self.queues[source, self.stage, kind].get(timeout=0.05)
            except queue.Empty:
                if self.failed.is_set():
                    raise RuntimeError("another stage failed") from None

    def announce(self, delivery: Any) -> None:
        self._put(self.stage + 1, "message", copy.copy(delivery))

    def hear(self) -> Any:
        return self._get(self.stage - 1, "message")

    def request(self, request: Any) -> None:
        self._put(self.stage - 1, "message", request)

    def requested(self) -> Any:
        return self._get(self.stage + 1, "message")

    def gather(self, value: Any) -> list[Any]:
        for other in range(self.stages):
            self._put(other, "meeting", value)
        return [self._get(other, "meeting") for other in range(self.stages)]

    def share(self, values: Sequence[Any]) -> list[Tensor]:
        shared = self.gather([value.clone() if isinstance(value, Tensor) else value for value in values])[-1]
        assert list(map(Slot.of, shared)) == list(map(Slot.of, values))
        return [tensor.clone() for tensor in shared]

    def send(self, values: Mapping[Key, Tensor], slots: Mapping[Key, Slot]) -> None:
        assert {key: Slot.of(values[key]) for key in slots} == slots
        self.sizes.append(len(slots))
        for key in slots:
            self._put(self.stage + 1, "value", values[key].detach().clone())

    def receive(self, slots: Mapping[Key, Slot]) -> dict[Key, Tensor]:
        return {k: self._get(self.stage - 1, "value").requires_grad_(s.requires_grad) for k, s in slots.items()}

    def expect(self, slots: Mapping[Key, Slot]) -> Callable[[], dict[Key, Tensor]]:
        return partial(self.receive, slots)

    def send_gradients(self, received: Iterable[Tensor]) -> None:
        for tensor in received:
            self._put(self.stage - 1, "gradient", torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def expect_gradients(self, sent: Iterable[Slot]) -> Callable[[], list[Tensor]]:
        return lambda: [self._get(self.stage + 1, "gradient") for _ in sent]

    def send_needed(self, needed: Sequence[bool]) -> None:
        self._put(self.stage - 1, "gradient", needed)

    def receive_needed(self, count: int) -> list[bool]:
        needed = self._get(self.stage + 1, "gradient")
        assert len(needed) == count
        return needed

    def flush(self) -> None:
        pass

    def agree(self, kept: KeptState, microbatches: int) -> None:
        """The last stage's state, on all."""
        changes = kept.changes() if self.stage == self.stages - 1 else None
        if changes is None:
            changes = self._get(self.stage + 1, "message")
            kept.take(changes, microbatches, CPU)
        if self.stage:
            self._put(self.stage - 1, "message", changes)


@dataclass
class Seen:
    """What a network computed: the loss of each microbatch, gradients by name, and how many values crossed each cut."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    crossed: list[int] = field(default_factory=list)


Step = Callable[[nn.Module, Any], Tensor]


def alone(make: Callable[[], nn.Module], step: Step, parts: Sequence[Any]) -> Seen:
    root = Root(make())
    losses = []
    for i, part in enumerate(parts):
        seed_generators(root, i)
        losses.append(step(root, part))
    torch.stack(losses).mean().backward()
    return Seen([loss.detach() for loss in losses], _gradients(root))


def on_stages(
    make: Callable[[], nn.Module],
    step: Step,
    parts: Sequence[Any],
    stages: int,
    *,
    blocks: str | Sequence[str] | None = None,
    schedule: str = "1F1B",
    microbatches: int | None = None,
) -> Seen:
    """The same through a pipeline; gradients of the stages that hold the parameters.

    Args:
        microbatches: Of a batch; all parts are one batch if not said.

    Raises:
        Exception: The first that a stage raised.
    """
    built = build(schedule, stages, len(parts))
    roots = [Root(make()) for _ in range(stages)]
    cuts = [_cut(root, index, stages, blocks) for index, root in enumerate(roots)]

    def run_stage(index: int, channel: QueueChannel) -> tuple[list[Tensor], list[int]]:
        return _run(roots[index], cuts[index], channel, step, parts, built, microbatches or len(parts)), channel.sizes

    done = _on_threads(run_stage, stages)
    gradients: dict[str, Tensor] = {}
    for root in roots:
        for name, gradient in _gradients(root).items():  # of several stages where one parameter is on these
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Seen(done[-1][0], gradients, [sizes[-1] for _, sizes in done[:-1]])


def evaluated_on_stages(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    stages: int,
    *,
    blocks: str | Sequence[str] | None = None,
) -> list[Any]:
    """What an evaluation step returns for each batch on the last stage; each is a single microbatch.

    Raises:
        Exception: The first that a stage raised.
    """
    roots = [Root(make()).eval() for _ in range(stages)]
    cuts = [_cut(root, index, stages, blocks) for index, root in enumerate(roots)]

    @torch.no_grad()
    def run_stage(index: int, channel: QueueChannel) -> list[Any]:
        stage, root = cuts[index], roots[index]
        pipelined = PipelinedStep(stage, channel, lambda: Memory(root))  # type: ignore[arg-type]
        results = []
        for batch in batches:
            run = partial(_run_step, stage, root, step, batch)
            done = pipelined.evaluate(lambda _: run(), [batch], "evaluation")  # noqa: B023
            if done is None:
                done = [pipelined.call_by_call(run, lambda _: None)]
            results += done
        return results

    return _on_threads(run_stage, stages)[-1]


def _on_threads(run_stage: Callable[[int, QueueChannel], Result], stages: int) -> list[Result]:
    kinds = ("message", "value", "gradient", "meeting")
    pairs = [(a, b) for a in range(stages) for b in range(stages)]
    queues = {(a, b, kind): queue.Queue[Any]() for a, b in pairs for kind in kinds}
    failed = threading.Event()
    errors: list[BaseException] = []

    def run(index: int) -> Result:
        try:
            return run_stage(index, QueueChannel(index, stages, queues, failed))
        except BaseException as error:
            if not failed.is_set():
                errors.append(error)
            failed.set()
            raise

    with ThreadPoolExecutor(stages) as pool:
        futures = [pool.submit(run, index) for index in range(stages)]
        done = [future.exception(WAIT_S) for future in futures]
    if any(done):
        raise errors[0]
    return [future.result() for future in futures]


def _cut(root: nn.Module, index: int, stages: int, path: str | Sequence[str] | None) -> Stage:
    blocks = find_blocks(root, path)
    holders = Holders(blocks, place(measure(zip(blocks.names, blocks.modules(root)), {}), stages, "even"))
    owned = holders.placement.stages[index].blocks
    ties = find_ties(names_of_parameters(root), holders.of)
    stage = cut(
        root,
        blocks.names,
        owned,
        network=blocks.network,
        index=index,
        count=stages,
        parts=holders.of_part,
        holder_of=holders.of_block,
        kept={name for tie in ties if index in tie.stages for name in tie.names},
        device=CPU,
    )
    stage.join(root)
    return stage


def _run(
    root: nn.Module,
    stage: Stage,
    channel: Any,
    step: Step,
    parts: Sequence[Any],
    schedule: Schedule,
    microbatches: int,
) -> list[Tensor]:
    pipelined = PipelinedStep(stage, channel, lambda: Memory(root))
    kept = KeptState(root, stage.blocks, stage.parts, is_last=stage.is_last, elsewhere=stage.elsewhere)
    losses = []
    for start in range(0, len(parts), microbatches):
        batch = parts[start : start + microbatches]

        def run(i: int, start: int = start) -> Any:
            seed_generators(root, start + i)
            return _run_step(stage, root, step, parts[start + i], kept)

        losses += pipelined.train(
            run,
            batch,
            schedule.first(len(batch)).rows[stage.index],
            loss_of=lambda loss: loss / len(parts),
            before_backward=lambda *_: None,
            backward=lambda loss: loss.backward(),
        )
        channel.agree(kept, len(batch))
    return losses


def seed_generators(root: nn.Module, i: int) -> None:
    """Those that a module holds itself; the global ones are the threads' together."""
    for name, generator in own_generators(root).items():
        seed_own(generator, derive(i, name))


def _run_step(
    stage: Stage, root: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any, kept: KeptState | None = None
) -> Any:
    keeping = kept.step(searching=stage.passage.searching) if kept is not None else nullcontext()
    try:
        with keeping, stage.running(root):
            result = step(root, batch)
            if stage.is_last:
                refuse(result, "What the step returns")
            return result
    except StageEnd:
        return None


def _gradients(root: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in root.named_parameters() if p.grad is not None}


def assert_alike(make: Callable[[], nn.Module], step: Step, parts: Sequence[Any], stages: int, **options: Any) -> Seen:
    """Losses and gradients on stages are those of the network alone."""
    expected, seen = alone(make, step, parts), on_stages(make, step, parts, stages, **options)
    torch.testing.assert_close(seen.losses, expected.losses, rtol=1e-5, atol=1e-6)
    assert seen.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        assert torch.allclose(seen.gradients[name], gradient, rtol=1e-4, atol=1e-6), name
    return seen


__all__ = ["StepError", "alone", "assert_alike", "on_stages"]
