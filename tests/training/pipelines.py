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
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import BatchError
from lightning_shard.parallel.blocks import find_blocks, names_of_parameters
from lightning_shard.parallel.fsdp.watched_parameters import watch_data
from lightning_shard.pipeline.cost import measure
from lightning_shard.pipeline.dataflow.crossing import StageEnd
from lightning_shard.pipeline.dataflow.messages import Key, Slot
from lightning_shard.pipeline.dataflow.taint import refuse
from lightning_shard.pipeline.placement import place
from lightning_shard.pipeline.runtime.step import PipelinedStep
from lightning_shard.pipeline.schedules.named import build
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.pipeline.stages.compiled_functions import CompiledFunctions
from lightning_shard.pipeline.stages.rank_stages import Stages
from lightning_shard.pipeline.stages.stage import Stage
from lightning_shard.pipeline.stages.tied import find_ties
from lightning_shard.plugin.assembly.placing import Holders, cut_to
from lightning_shard.plugin.steps.checks.rehearsal import rehearse
from lightning_shard.plugin.steps.checks.step_memory import StepMemory
from lightning_shard.plugin.steps.randomness import derive, seed_own
from lightning_shard.plugin.steps.state.after_network import LateState
from lightning_shard.plugin.steps.state.per_stage import StatesApart
from lightning_shard.state.walk import own_generators

watch_data()  # as a run does, for what steps write to parameters

CPU = torch.device("cpu")
WAIT_S = 60.0
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
    rank_of: Mapping[int, int]
    sizes: list[int] = field(default_factory=list)

    @property
    def last_of_ranks(self) -> list[int]:
        """The last stage of each rank."""
        return [stage for _, stage in sorted({rank: stage for stage, rank in sorted(self.rank_of.items())}.items())]

    def _put(self, to: int, kind: str, value: Any) -> None:
        self.queues[self.stage, to, kind].put(value)

    def _get(self, source: int, kind: str) -> Any:
        return self._get_of(source, self.stage, kind)

    def _get_of(self, source: int, to: int, kind: str) -> Any:
        while True:
            try:
                return self.queues[source, to, kind].get(timeout=0.05)
            except queue.Empty:
                if self.failed.is_set():
                    raise RuntimeError("another stage failed") from None

    def is_here(self, stage: int) -> bool:
        return self.rank_of[stage] == self.rank_of[self.stage]

    def gather(self, value: Any) -> list[Any]:
        for other in self.last_of_ranks:
            self._put(other, "meeting", copy.deepcopy(value))
        return [self._get(other, "meeting") for other in self.last_of_ranks]

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

    def flush(self, until: int | None = None) -> None:
        pass


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
    stages_per_rank: int | None = None,
    roots: list[Root] | None = None,
) -> Seen:
    """The same through a pipeline; gradients of the ranks that hold the parameters.

    Args:
        stages: Ranks; how many stages each has follows from the schedule.
        microbatches: Of a batch; all parts are one batch if not said.
        roots: Is given each rank's network.

    Raises:
        Exception: The first that a stage raised.
    """
    built = build(schedule, stages, len(parts), stages_per_rank)
    roots = [] if roots is None else roots
    roots += [Root(make()) for _ in range(stages)]
    cuts = [_cut(root, rank, built, blocks) for rank, root in enumerate(roots)]

    def run_rank(rank: int, channels: list[QueueChannel]) -> list[Tensor]:
        return _run(roots[rank], cuts[rank], channels, step, parts, built, rank, microbatches or len(parts))

    done, channels = _on_threads(run_rank, built)
    gradients: dict[str, Tensor] = {}
    for root in roots:
        for name, gradient in _gradients(root).items():  # of several ranks where one parameter is on these
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return Seen(done[-1], gradients, [channel.sizes[-1] for channel in channels[:-1]])


def evaluated_on_stages(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    stages: int,
    *,
    blocks: str | Sequence[str] | None = None,
    schedule: str = "1F1B",
) -> list[Any]:
    """What an evaluation step returns for each batch on the last stage; each is a single microbatch.

    Raises:
        Exception: The first that a stage raised.
    """
    built = build(schedule, stages)
    roots = [Root(make()).eval() for _ in range(stages)]
    cuts = [_cut(root, rank, built, blocks) for rank, root in enumerate(roots)]

    @torch.no_grad()
    def run_rank(rank: int, channels: list[QueueChannel]) -> list[Any]:
        root, held = roots[rank], cuts[rank]
        apart = StatesApart(root, held)
        pipelined = PipelinedStep(held, channels, partial(_remember, root, held, apart))  # type: ignore[arg-type]
        results = []
        for batch in batches:

            def run(stage: Stage, _: int, batch: Any = batch) -> Any:
                return _run_step(stage, root, step, batch)

            with apart.batch():
                done = pipelined.evaluate(run, [batch], built.first(1).rows[rank], "evaluation")
                apart.settle()
            if done is None:
                of_last = partial(run, held[-1], 0)
                done = [pipelined.calls(apart.call, lambda: lambda: None, lambda _: None).run(of_last)]
            results += done
        return results

    return _on_threads(run_rank, built)[0][-1]


def _on_threads(
    run_rank: Callable[[int, list[QueueChannel]], Result], schedule: Schedule
) -> tuple[list[Result], list[QueueChannel]]:
    """What each rank returns, and each stage's channel."""
    kinds = ("value", "gradient", "meeting", "changes")
    stages, ranks = schedule.stages, len(schedule.rows)
    queues = {(a, b, kind): queue.Queue[Any]() for a in range(stages) for b in range(stages) for kind in kinds}
    failed = threading.Event()
    errors: list[BaseException] = []
    channels = [QueueChannel(stage, stages, queues, failed, schedule.rank_of) for stage in range(stages)]

    def run(rank: int) -> Result:
        try:
            return run_rank(rank, [channels[stage] for stage in schedule.stages_of(rank)])
        except BaseException as error:
            if not failed.is_set():
                errors.append(error)
            failed.set()
            raise

    # torch.compile's stance is the process's: threads that each restore what they met leave another one behind
    with mock.patch.object(CompiledFunctions, "run_as_written"), ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
        done = [future.exception(WAIT_S) for future in futures]
    if any(done):
        raise errors[0]
    return [future.result() for future in futures], channels


def _cut(root: nn.Module, rank: int, schedule: Schedule, path: str | Sequence[str] | None) -> Stages:
    blocks = find_blocks(root, path)
    holders = Holders(blocks, place(measure(zip(blocks.names, blocks.modules(root)), {}), schedule.stages, "even"))
    ties = find_ties(names_of_parameters(root), holders.of)
    stages = cut_to(root, holders, schedule.stages_of(rank), ties, CPU)
    stages.join(root)
    return stages


def _run(
    root: nn.Module,
    stages: Stages,
    channels: Sequence[Any],
    step: Step,
    parts: Sequence[Any],
    schedule: Schedule,
    rank: int,
    microbatches: int,
) -> list[Tensor]:
    apart = StatesApart(root, stages)
    pipelined = PipelinedStep(stages, channels, partial(_remember, root, stages, apart))
    kept = LateState(root, stages, apart)
    losses = []
    for start in range(0, len(parts), microbatches):
        batch = parts[start : start + microbatches]

        def run(stage: Stage, i: int, part: Any, start: int = start) -> Any:
            seed_generators(root, start + i)
            return _run_step(stage, root, step, part, kept)

        with apart.batch():
            losses += pipelined.train(
                run,
                batch,
                schedule.first(len(batch)).rows[rank],
                loss_of=lambda _, loss: loss / len(parts),
                before_backward=lambda *_: None,
            )
            if not start:
                carry = partial(kept.carry, lambda value: pipelined.gather(value)[-1], CPU)
                _rehearse(pipelined, run, batch, partial(_remember, root, stages, apart, kept), carry)
            _agree(kept, channels, rank, len(schedule.rows))
    return losses


def _rehearse(
    step: PipelinedStep, run: Any, parts: Sequence[Any], remember: Callable[[], StepMemory], carry: Callable[[], None]
) -> None:
    try:
        joined = tree.joined(parts[0], parts[1], tree.batch_size(parts[1]))
    except (BatchError, IndexError):
        return
    carry()
    rehearse(step, "train", run, (parts[0], parts[1]), joined, remember(), carry)


def _remember(
    root: nn.Module, stages: Stages, apart: StatesApart, kept: LateState | None = None, *, puts_back: bool = True
) -> StepMemory:
    others = [apart.begin, *([kept.forget] if kept is not None else [])]
    return StepMemory(root, len(stages), others=others, puts_back=puts_back)


def _agree(kept: LateState, channels: Sequence[QueueChannel], rank: int, ranks: int) -> None:
    """The last stage's state, on all ranks."""
    own = channels[-1]
    if own.stage == own.stages - 1:
        changes = kept.changes()
        for other in range(ranks):
            if other != rank:
                own.queues[0, other, "changes"].put(changes)
    else:
        changes = own._get_of(0, rank, "changes")
    kept.take(changes, CPU)


def seed_generators(root: nn.Module, i: int) -> None:
    """Those that a module holds itself; the global ones are the threads' together."""
    for name, generator in own_generators(root).items():
        seed_own(generator, derive(i, name))


def _run_step(
    stage: Stage, root: nn.Module, step: Callable[[nn.Module, Any], Any], batch: Any, kept: LateState | None = None
) -> Any:
    keeping = kept.step(stage, searching=stage.passage.searching) if kept is not None else nullcontext()
    try:
        with stage.running(root), keeping:
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


def assert_evaluates_alike(
    make: Callable[[], nn.Module],
    step: Callable[[nn.Module, Any], Any],
    batches: Sequence[Any],
    stages: int,
    **options: Any,
) -> None:
    """What an evaluation step returns on stages is what it returns for the network alone."""
    root = Root(make()).eval()
    with torch.no_grad():
        expected = [step(root, batch) for batch in batches]
    torch.testing.assert_close(evaluated_on_stages(make, step, batches, stages, **options), expected)
