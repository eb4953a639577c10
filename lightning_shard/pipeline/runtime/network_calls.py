"""Evaluation steps that call the network several times, such as text generation.

Between two calls, the user's code computes the next call's input from the last call's output, with control flow that
may depend on values. So no stage exits such a step early: all ranks run the whole step. Each call of the network goes
through the stages like a microbatch (``step.py``), with a new search for the values that cross. Then the last stage's
output is broadcast to all ranks, and its changes of caches and lists (``given_objects.py``); and they exchange what
modules keep (``kept_in_calls.py``).

Before each call, and at the end of the step, the ranks compare where they are by an all-gather. So a rank whose code
took another path is detected there, and no rank hangs waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn
from zlib import crc32

import torch
from torch import Tensor

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import StageEnd
from lightning_shard.pipeline.dataflow.messages import Slot
from lightning_shard.pipeline.dataflow.objects import Path, set_entry
from lightning_shard.pipeline.dataflow.search import OfAny, Post, Search, find_crossing
from lightning_shard.pipeline.dataflow.taint import Origin, Unknown, mark, refuse
from lightning_shard.pipeline.runtime.channel import Channel
from lightning_shard.pipeline.runtime.given_objects import GivenObjects
from lightning_shard.pipeline.runtime.kept_in_calls import KeptInCalls
from lightning_shard.pipeline.stages.rank_stages import View
from lightning_shard.pipeline.stages.stage import Stage

LARGEST_COMPARED = 2**20
"""The most elements of an integer argument, such as tokens, whose values ranks compare before each call."""


@dataclass(frozen=True)
class _Place(tree.Leaf):
    """Stands for an argument object that the network returns, in the description of its output.

    Attributes:
        path: Where the object is.
        entries: Of a list, a dict or the like a copy, with the description of each entry.
    """

    path: Path
    entries: Any = None


class Calls:
    """The calls of the network within one step, on one rank.

    It has many attributes: what a step has around it, and what its calls leave to the next.

    Args:
        ends: This rank's stages, in order, each with its channel.
        in_call: Context of each call of the network, in which all stages of this rank run in turn; gives what ends
            the stages' own versions of the module's state.
        note_generators: Notes the states of the random generators; returns a function that restores them.
        after_call: Called after each call of the network with the number of calls so far.
        of_any: As for :class:`~lightning_shard.pipeline.runtime.step.PipelinedStep`, for calls of the network.
    """

    def __init__(
        self,
        ends: Sequence[tuple[Stage, Channel]],
        in_call: Callable[[], AbstractContextManager[Callable[[], None]]],
        note_generators: Callable[[], Callable[[], None]],
        after_call: Callable[[int], None],
        of_any: OfAny = bool,
    ) -> None:
        stages = [stage for stage, _ in ends]
        self.count = 0
        self.objects = GivenObjects(partial(self._placed, words="what a cache holds of another stage's blocks"))
        self.kept = KeptInCalls(stages, self._placed)
        self._is_last = stages[-1].is_last
        self._entrances = stages[-1].entrances
        self._device = stages[-1].device
        self._ends = ends
        self._meeting = ends[-1][1]
        self._in_call = in_call
        self._of_any = of_any
        self._note_generators = note_generators
        self._after_call = after_call
        self._inside = False
        self._ended: str | None = None
        self._put_arguments_back: Callable[[], None] = lambda: None

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step on its whole batch; returns what it returns, meaningful on the rank of the last stage.

        Raises:
            StepError: Data ranks that have to run alike call the network a different number of times.
        """
        with ExitStack() as inside:
            for stage, _ in self._ends:
                inside.enter_context(stage.calling(self))
            inside.enter_context(self._intercepting())
            result = step()
            self._end()
            if self._of_any(False):
                raise StepError(
                    "Data ranks call the network a different number of times within one step, as generating texts of"
                    " different lengths does. Where experts are dealt over data ranks, each call needs all of them:"
                    " call it equally often (generate to a fixed length), or use expert_parallel_size=1."
                )
        return result

    @contextmanager
    def _intercepting(self) -> Iterator[None]:
        """Context of the user's step: the forwards of modules that contain all blocks intercept calls of the network.

        The outermost one that a step calls makes the call.
        """
        view = View()
        for module in self._entrances:
            view.add(module.__dict__, "forward", wraps(module.forward)(partial(self._call, module.forward)))
        view.put()
        try:
            yield
        finally:
            view.take_out()

    def _end(self) -> None:
        """The step has returned, or ended early on this rank (:meth:`on_missing`).

        Raises:
            StepError: Another rank calls the network again.
        """
        said = self._meeting.gather(("returns", self._ended))
        if any(what != "returns" for what, _ in said):
            self._refuse_parting(said)

    def on_missing(self, sentence: str) -> NoReturn:
        """A value that is unknown here is needed between two calls: end this rank's part of the step."""
        if self._is_last:
            raise StepError(sentence, breaks=1)
        self._ended = sentence
        raise StageEnd

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        refuse((args, kwargs), "The network")
        said = self._meeting.gather(("calls", [(path, _kind(leaf)) for path, leaf in tree.walk((args, kwargs))]))
        if any(each != said[0] for each in said):
            self._refuse_parting(said)
        tensors = [(tensor, tensor._version, tensor.clone()) for tensor in tree.tensors((args, kwargs))]
        put_generators_back = self._note_generators()

        def put_arguments_back() -> None:
            put_generators_back()
            for tensor, version, copy in tensors:
                if tensor._version != version:
                    tensor.copy_(copy)

        self._put_arguments_back = put_arguments_back
        self.objects.call_begins(args, kwargs)
        self._inside = True
        try:
            output = self._through_stages(partial(forward, *args, **kwargs))
            result = self._share(output)
        finally:
            self._inside = False
            self.objects.call_ends()
        self.count += 1
        self._after_call(self.count)
        return result

    def _through_stages(self, call: Callable[[], Any]) -> Any:
        """Run one call of the network; returns its output on the rank of the last stage."""

        def run(stage: Stage, _: int) -> Any:
            ledger, output = stage.passage.ledger, None
            assert ledger is not None
            self.objects.stage_begins()  # with generators and arguments as they were at the call
            self._put_arguments_back()
            with suppress(StageEnd), stage.running(stage.entrances[0]):
                output = call()
                if stage.is_last:
                    refuse(output, "What the network returns")
                    self.objects.fetch(ledger)
            self.objects.stage_ends(ledger, is_last=stage.is_last)
            return output

        self._of_any(True)  # a rank whose step has ended raises
        with self._in_call() as settle:
            self.kept.stages_begin()
            post = Post(self._meeting)
            searches = [Search(stage, channel, post) for stage, channel in self._ends]
            find_crossing(searches, run, 0)
            settle()
            self.kept.stages_end()
        for _, channel in self._ends:
            channel.flush()
        return searches[-1].result

    def _share(self, output: Any) -> Any:
        """Broadcast the network's output, and what the call has changed in objects and modules."""
        returned: list[Tensor] = []
        described = _described(output, self.objects.paths(), returned) if self._is_last else None
        said = self._meeting.gather((described, self.objects.told, self.kept.told))
        for _, _, kept in said:
            self.kept.take(kept)
        described, told, _ = said[-1]
        self.objects.take(told)
        tensors = iter(self._meeting.share(returned if self._is_last else [*_slots(described)]))
        return output if self._is_last else tree.map_leaves(partial(self._heard, tensors), described)

    def _placed(self, value: Any, words: str) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device)
        one = torch.full((), torch.nan if value.dtype.is_floating_point else 0, dtype=value.dtype, device=self._device)
        return mark(one.expand(value.shape), Origin(words, _refuse_use))

    def _heard(self, tensors: Iterator[Tensor], leaf: Any) -> Any:
        """What stands in a description for a tensor or an object, here."""
        if isinstance(leaf, Slot):
            return next(tensors)
        if not isinstance(leaf, _Place):
            return leaf
        if leaf.entries is None:
            return self.objects.at(leaf.path)
        entries = tree.map_leaves(partial(self._heard, tensors), leaf.entries)
        if leaf.path not in self.objects:
            return entries
        held = self.objects.at(leaf.path)
        for key, entry in tree.children(entries):
            set_entry(held, key, entry)
        return held

    def _refuse_parting(self, said: Sequence[tuple[str, Any]]) -> NoReturn:
        ended = next((why for what, why in said if what == "returns" and why is not None), None)
        if ended is not None:
            raise StepError(
                f"{ended} Here it is needed between two calls of the network within one step: of what they compute, all"
                " ranks get what the forward of the LightningModule, or of the network, returns; so have forward"
                " compute it, and call self(…).",
                breaks=2,
            )
        raise StepError(
            "Between two calls of the network within one step, ranks of the pipeline went different ways"
            f" ({_told(said)}): what a step does there may depend on the batch, on what the network returns and on"
            " torch's, numpy's and Python's own generators, not on anything that differs between processes. Or use"
            " pipeline_parallel_size=1.",
            breaks=1,
        )


def _kind(leaf: Any) -> Any:
    """What must be equal on all ranks: a tensor's shape and dtype, for integers also a checksum of its values."""
    if isinstance(leaf, Tensor):
        is_exact = not leaf.is_floating_point() and not leaf.is_complex() and leaf.numel() <= LARGEST_COMPARED
        return tuple(leaf.shape), str(leaf.dtype), crc32(leaf.cpu().contiguous().numpy().tobytes()) if is_exact else 0
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def _told(said: Sequence[tuple[str, Any]]) -> str:
    shapes = (", ".join(str(kind) for _, kind in of or ()) for _, of in said)
    return ", ".join(f"rank {rank} {what} {of}".strip() for rank, ((what, _), of) in enumerate(zip(said, shapes)))


def _described(value: Any, paths: Mapping[int, Path], tensors: list[Tensor]) -> Any:
    """A description of what the network returns; its tensors are added to ``tensors``, in order."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return Slot.of(value)
    if tree.is_node(value):
        entries = tree.rebuild(value, [_described(child, paths, tensors) for _, child in tree.children(value)])
        return _Place(paths[id(value)], entries) if id(value) in paths else entries
    if id(value) in paths:
        return _Place(paths[id(value)])
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.dtype)):
        raise StepError(
            f"The network returns a {type(value).__name__}, which the other pipeline stages can't be given: return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses. Or use pipeline_parallel_size=1.",
            breaks=3,
        )
    return value


def _slots(described: Any) -> Iterator[Slot]:
    for leaf in tree.leaves(described):
        if isinstance(leaf, Slot):
            yield leaf
        elif isinstance(leaf, _Place):
            yield from _slots(leaf.entries)


def _refuse_use(_values: Sequence[Unknown], sentence: str) -> NoReturn:
    raise StepError(sentence, breaks=1)
