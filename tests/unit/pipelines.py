"""All stages of a pipeline in one process, a thread each: what a network computes there, next to the network alone."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.errors import StepError
from lightning_shard.parallel.blocks import find_blocks
from lightning_shard.pipeline.cost import measure
from lightning_shard.pipeline.crossing import Key, Slot, StageEnd
from lightning_shard.pipeline.cut import cut
from lightning_shard.pipeline.orders import build
from lightning_shard.pipeline.placement import place
from lightning_shard.pipeline.schedule import Schedule
from lightning_shard.pipeline.stage import Stage
from lightning_shard.pipeline.step import PipelinedStep
from lightning_shard.pipeline.taint import refuse
from lightning_shard.plugin.assemble import Holders
from lightning_shard.plugin.steps.kept import KeptState
from lightning_shard.plugin.steps.memory import Memory
from lightning_shard.plugin.steps.python_state import own_generators
from lightning_shard.plugin.steps.randomness import derive, seed_own

CPU = torch.device("cpu")
WAIT_S = 20.0


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

    def send(self, values: Mapping[Key, Tensor], slots: Mapping[Key, Slot]) -> None:
        assert {key: Slot.of(values[key]) for key in slots} == slots
        self.sizes.append(len(slots))
        for key in slots:
            self._put(self.stage + 1, "value", values[key].detach().clone())

    def receive(self, slots: Mapping[Key, Slot]) -> dict[Key, Tensor]:
        return {k: self._get(self.stage - 1, "value").requires_grad_(s.requires_grad) for k, s in slots.items()}

    def send_gradients(self, received: Iterable[Tensor]) -> None:
        for tensor in received:
            self._put(self.stage - 1, "gradient", torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)

    def receive_gradients(self, sent: Iterable[Tensor]) -> list[Tensor]:
        return [self._get(self.stage + 1, "gradient") for _ in sent]

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
        changes = kept.changes() if (self.stage, self.stage + 1, "message") not in self.queues else None
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
    queues = {
        (a, b, kind): queue.Queue[Any]()
        for a in range(stages)
        for b in (a - 1, a + 1)
        if b < stages
        for kind in ("message", "value", "gradient")
    }
    failed = threading.Event()
    errors: list[BaseException] = []
    channels = [QueueChannel(stage, queues, failed) for stage in range(stages)]
    built = build(schedule, stages, len(parts))
    roots = [Root(make()) for _ in range(stages)]
    cuts = [_cut(root, index, stages, blocks) for index, root in enumerate(roots)]

    def run_stage(index: int) -> list[Tensor]:
        try:
            return _run(roots[index], cuts[index], channels[index], step, parts, built, microbatches or len(parts))
        except BaseException as error:
            if not failed.is_set():
                errors.append(error)
            failed.set()
            raise

    with ThreadPoolExecutor(stages) as pool:
        futures = [pool.submit(run_stage, index) for index in range(stages)]
        done = [future.exception(WAIT_S) for future in futures]
    if any(done):
        raise errors[0]
    gradients: dict[str, Tensor] = {}
    for root in roots:
        gradients |= _gradients(root)
    return Seen(futures[-1].result(), gradients, [channel.sizes[-1] for channel in channels[:-1]])


def _cut(root: nn.Module, index: int, stages: int, path: str | Sequence[str] | None) -> Stage:
    blocks = find_blocks(root, path)
    modules = dict(zip(blocks.names, blocks.modules(root)))
    holders = Holders(blocks, place(measure(modules, {}), stages, "even"))
    owned = holders.placement.stages[index].blocks
    stage = cut(
        root,
        blocks.names,
        owned,
        network=blocks.network,
        index=index,
        count=stages,
        parts=holders.of_part,
        holder_of=holders.of_block,
        kept=(),
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
            try:
                with kept.step(searching=stage.passage.searching), stage.running(root):
                    result = step(root, parts[start + i])
                    if stage.is_last:
                        refuse(result, "What the step returns")
                    return result
            except StageEnd:
                return None

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
