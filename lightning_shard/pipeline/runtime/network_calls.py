"""Evaluation steps that call the network several times, such as text generation.

Between two calls, the user's code computes the next call's input from the last call's output, with control flow that
may depend on values. So no stage exits such a step early: all ranks run the whole step. Each call of the network goes
through the stages like a microbatch (``step.py``), with a new search for the values that cross. Then the last stage's
output is broadcast to all ranks, and changes of caches (``caches.py``) and of what modules keep (``kept_in_calls.py``)
are exchanged.

Before each call, and at the end of the step, the ranks compare where they are by an all-gather. So a rank whose code
took another path is detected there, and no rank hangs waiting for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.crossing import StageEnd
from lightning_shard.pipeline.dataflow.messages import Slot
from lightning_shard.pipeline.dataflow.objects import Path, objects, set_entry
from lightning_shard.pipeline.dataflow.side_effects import is_cache
from lightning_shard.pipeline.dataflow.taint import Origin, Unknown, mark, refuse
from lightning_shard.pipeline.runtime.caches import WITHOUT_CACHE, Left, Noted, add, apply, apply_to_made
from lightning_shard.pipeline.runtime.kept_in_calls import KeptInCalls
from lightning_shard.pipeline.runtime.set_by_blocks import Entry, SetByBlocks, Told, refuse_lost, set_by_several

if TYPE_CHECKING:
    from lightning_shard.pipeline.stages.stage import Stage

LARGEST_COMPARED = 2**20
"""The most elements of an integer argument, such as tokens, whose values ranks compare before each call."""


class Meeting(Protocol):
    """Collectives over all ranks of a pipeline."""

    def gather(self, value: Any) -> list[Any]:
        """All-gather of objects, in rank order; the last stage's rank comes last."""

    def share(self, values: Sequence[Tensor] | Sequence[Slot]) -> list[Tensor]:
        """Broadcast the last stage's tensors; the other ranks pass slots."""


@dataclass(frozen=True)
class _Place(tree.Leaf):
    """Stands for an argument object that the network returns, in the description of its output.

    Attributes:
        path: Where the object is.
        entries: Of a list, a dict or the like a copy, with the description of each entry.
    """

    path: Path
    entries: Any = None


@dataclass(frozen=True)
class _Changes:
    """What a rank tells of the objects that its stages' runs of a call have changed.

    Attributes:
        of: By path, the changed entries.
        made: The paths of those that the call itself has made.
        by_blocks: By stage, what its blocks have set.
    """

    of: dict[Path, dict[Any, Any]]
    made: set[Path]
    by_blocks: dict[int, Told]


class Calls:
    """The calls of the network within one step, on one rank.

    Args:
        rank: This rank's number in the pipeline.
        is_last: Whether this rank holds the last stage.
        entrances: The modules that contain all blocks. The outermost one that a step calls makes the call.
        device: The device on which tensors are received.
        meeting: Collectives over the pipeline.
        run: Runs a function on each stage of this rank, inside :meth:`of`, until no stage misses a value.
        note_generators: Notes the states of the random generators; returns a function that restores them.
        after_call: Called after each call with the number of calls so far.
        stages: This rank's.
    """

    def __init__(
        self,
        rank: int,
        is_last: bool,
        entrances: Sequence[nn.Module],
        device: torch.device,
        meeting: Meeting,
        run: Callable[[Callable[[], Any]], Any],
        note_generators: Callable[[], Callable[[], None]],
        after_call: Callable[[int], None],
        stages: Sequence[Stage],
    ) -> None:
        self.count = 0
        self.kept = KeptInCalls(stages, self._kept)
        self._rank = rank
        self._is_last = is_last
        self._entrances = entrances
        self._device = device
        self._meeting = meeting
        self._run = run
        self._note_generators = note_generators
        self._after_call = after_call
        self._inside = False
        self._ended: str | None = None
        self._put_arguments_back: Callable[[], None] = lambda: None
        self._given: dict[Path, Noted] = {}  # arguments of the network
        self._noted: dict[Path, Noted] = {}  # also of the blocks of the current, or last, stage
        self._made: dict[int, Path] = {}  # ids of those that the call has made
        self._there_before: list[Any] = []  # objects of the call before, which live on where this one gets them too
        self._left: dict[int, dict[Path, Left]] = {}
        self._set_by_blocks: dict[int, SetByBlocks] = {}
        self._running: int = 0  # the stage

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context of the user's step: entrances' forwards are replaced, to intercept calls of the network."""
        with ExitStack() as stack:
            for module in self._entrances:
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = wraps(module.forward)(partial(self._call, module.forward))
                stack.callback(_put_forward, module, own)
            yield

    def end(self) -> None:
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
            raise StepError(sentence)
        self._ended = sentence
        raise StageEnd

    def met(self, block: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A block is called: note objects in its arguments that weren't in the network's arguments."""
        known = {id(each) for each in self._there_before}
        for path, noted in self._note(("block", block), args, kwargs, self._noted):
            is_of_cache = is_cache(noted.value) or any(is_cache(each.value) for each in self._above(path))
            if id(noted.value) not in known and not is_of_cache:
                self._made[id(noted.value)] = path
        self._set_by_blocks[self._running].block_begins(self._noted)

    def returned(self) -> None:
        """A block of the current stage returns."""
        self._set_by_blocks[self._running].block_ends(self._noted)

    def has_made(self, value: Any) -> bool:
        """Whether the current call has made an object among a block's arguments, as far as these are noted."""
        return id(value) in self._made

    def _above(self, path: Path) -> Iterator[Noted]:
        return (self._noted[path[:length]] for length in range(len(path)) if path[:length] in self._noted)

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Context in which a stage runs its part of a call, with generators and arguments as they were at the call."""
        for path, noted in self._noted.items():
            noted.put_back(f"{type(noted.value).__name__} ({'.'.join(map(str, path))})", stage, self._placed)
        self._noted = dict(self._given)
        self._made.clear()
        self._put_arguments_back()
        self._running, self._set_by_blocks[stage] = stage, SetByBlocks()
        yield
        self._left[stage] = {path: noted.left(stage) for path, noted in self._noted.items()}

    def noted(self) -> set[int]:
        """The ids of the argument objects noted so far in this call, and of the tensors in them."""
        tensors = (each for n in self._noted.values() for each in n.entries.values() if isinstance(each, Tensor))
        return {id(each) for each in chain(tensors, (n.value for n in self._noted.values()))}

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
        self._note((), args, kwargs, self._given)
        self._inside = True
        self.kept.call_begins()
        try:
            output = self._run(partial(forward, *args, **kwargs))
            result = self._share(output)
        finally:
            self._inside = False
            self._there_before = [noted.value for noted in self._noted.values()]
            self._given.clear()
            self._noted.clear()
            self._left.clear()
            self._set_by_blocks.clear()
        self.count += 1
        self._after_call(self.count)
        return result

    def _note(
        self, prefix: Path, args: Sequence[Any], kwargs: Mapping[str, Any], into: dict[Path, Noted]
    ) -> list[tuple[Path, Noted]]:
        """Note objects among arguments; returns those that weren't noted before."""
        seen, new = {id(noted.value) for noted in into.values()}, []
        for key, argument in [*enumerate(args), *kwargs.items()]:
            for path, value in objects(argument, (*prefix, key), seen):
                into[path] = noted = Noted.of(value)
                new.append((path, noted))
        return new

    def _share(self, output: Any) -> Any:
        """Broadcast the network's output, and all-gather changes of argument objects and apply them."""
        changes = self._put_together()
        returned: list[Tensor] = []
        described = None
        if self._is_last:
            paths = {id(noted.value): path for path, noted in self._noted.items()}
            described = _described(output, paths, returned)
        said = self._meeting.gather((described, changes, self.kept.told()))
        stages = sorted((stage, rank) for rank, (_, theirs, _) in enumerate(said) for stage in theirs.by_blocks)
        by_blocks = [(rank, said[rank][1].by_blocks[stage]) for stage, rank in stages]
        newest = self._newest(by_blocks, {path for _, theirs, _ in said for path in theirs.made})
        for rank, (_, theirs, kept) in enumerate(said):
            self.kept.take(kept)
            if rank != self._rank:
                self._apply(rank, theirs, changes, newest, is_complete=rank == len(said) - 1)
        for path, noted in self._given.items():
            noted.put_in_order(key for _, told in by_blocks for each, key, *_ in told if each == path)
        described = said[-1][0]
        tensors = iter(self._meeting.share(returned if self._is_last else [*_slots(described)]))
        return output if self._is_last else tree.map_leaves(partial(self._heard, tensors), described)

    def _put_together(self) -> _Changes:
        """Merge the changes of all stages of this rank into the objects; returns what other ranks are told."""
        *siblings, last = (self._left[stage] for stage in sorted(self._left))
        made = {*self._made.values()}
        by_blocks = {stage: each.told() for stage, each in self._set_by_blocks.items()}
        self._refuse_lost(set_by_several(by_blocks.values()), made)
        for each in siblings:
            for path, left in each.items():
                if left.told and (path in self._noted or path not in made):
                    add(self._of_all(path).value, left, last[path], is_made=path in made)
        return _Changes({path: left.told for path, left in last.items() if left.told}, made, by_blocks)

    def _refuse_lost(self, entries: Mapping[Entry, bool], made: Collection[Path]) -> None:
        for (path, key), may_differ in entries.items():
            if may_differ and path not in made:
                refuse_lost(key, type(self._of_all(path).value).__name__)

    def _newest(self, by_blocks: Sequence[tuple[int, Told]], made: Collection[Path]) -> dict[Entry, int]:
        """Of entries that blocks of several stages set, the rank of the last of these.

        Args:
            by_blocks: For each stage, in order, its rank and what its blocks set.
            made: The objects that the call has made.

        Raises:
            StepError: They are of another object.
        """
        several = set_by_several(told for _, told in by_blocks)
        self._refuse_lost(several, made)
        return {(path, key): rank for rank, told in by_blocks for path, key, *_ in told if (path, key) in several}

    def _of_all(self, path: Path) -> Noted:
        """The object at a path, as this rank's last stage noted it.

        Raises:
            StepError: That stage has no object at this path.
        """
        if path not in self._noted:
            raise StepError(
                f"A pipeline stage changes or returns an object ({'.'.join(map(str, path))}) that another one didn't"
                f" get to. {WITHOUT_CACHE}"
            )
        return self._noted[path]

    def _apply(
        self, rank: int, theirs: _Changes, own: _Changes, newest: Mapping[Entry, int], *, is_complete: bool
    ) -> None:
        for path, changed in theirs.of.items():
            mine = own.of.get(path, {})
            if path not in theirs.made:
                apply(self._of_all(path).value, changed, mine, self._placed)
            elif path in self._noted:  # else this rank's stages don't come to it
                newer = {key for key in changed if newest.get((path, key)) == rank}
                current = {
                    key: told for key, told in changed.items() if is_complete or newest.get((path, key), rank) == rank
                }
                apply_to_made(
                    self._noted[path].value, current, mine, self._placed, is_complete=is_complete, newer=newer
                )

    def _placed(self, value: Any) -> Tensor:
        return self._kept(value, "what a cache holds of another stage's blocks")

    def _kept(self, value: Any, words: str) -> Tensor:
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
            return self._of_all(leaf.path).value
        entries = tree.map_leaves(partial(self._heard, tensors), leaf.entries)
        if leaf.path not in self._noted:
            return entries
        for key, entry in tree.children(entries):
            set_entry(self._noted[leaf.path].value, key, entry)
        return self._noted[leaf.path].value

    def _refuse_parting(self, said: Sequence[tuple[str, Any]]) -> NoReturn:
        ended = next((why for what, why in said if what == "returns" and why is not None), None)
        if ended is not None:
            raise StepError(
                f"{ended} Here it is needed between two calls of the network within one step: of what they compute, all"
                " ranks get what the forward of the LightningModule, or of the network, returns; so have forward"
                " compute it, and call self(…)."
            )
        raise StepError(
            "Between two calls of the network within one step, ranks of the pipeline went different ways"
            f" ({_told(said)}): what a step does there may depend on the batch, on what the network returns and on"
            " torch's, numpy's and Python's own generators, not on anything that differs between processes. Or use"
            " pipeline_parallel_size=1."
        )


def _put_forward(module: nn.Module, own: Any) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = own


def _kind(leaf: Any) -> Any:
    """What must be equal on all ranks: a tensor's shape and dtype, for integers also a checksum of its values."""
    if isinstance(leaf, Tensor):
        is_exact = not leaf.is_floating_point() and not leaf.is_complex() and leaf.numel() <= LARGEST_COMPARED
        return tuple(leaf.shape), str(leaf.dtype), crc32(leaf.cpu().contiguous().numpy().tobytes()) if is_exact else 0
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def _told(said: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"rank {rank} {what} {_shapes(of)}".strip() for rank, (what, of) in enumerate(said))


def _shapes(of: Any) -> str:
    return ", ".join(str(kind) for _, kind in of) if of is not None else ""


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
            " tensors, in any nesting of dicts, lists, tuples and dataclasses. Or use pipeline_parallel_size=1."
        )
    return value


def _slots(described: Any) -> Iterator[Slot]:
    for leaf in tree.leaves(described):
        if isinstance(leaf, Slot):
            yield leaf
        elif isinstance(leaf, _Place):
            yield from _slots(leaf.entries)


def _refuse_use(_values: Sequence[Unknown], sentence: str) -> NoReturn:
    raise StepError(sentence)
