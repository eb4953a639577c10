"""A step of an evaluation that calls the network several times, as generating text does.

Between two calls the user's code makes the input of the next from the output of the last, and which code that is may
depend on values. So no stage leaves such a step early: all run the whole of it. Each call of the network goes through
the stages as a microbatch does (``step.py``), what crosses is found anew for each, and then the last stage's output is
sent to all. What a call leaves in a cache is told to all too (``carried.py``).

Before each call, and at the end of the step, the stages say to each other where they are: one that has no part in a
call because its code went another way is found there, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NoReturn, Protocol
from zlib import crc32

import torch
from torch import Tensor, nn

from lightning_shard import tree
from lightning_shard.errors import StepError
from lightning_shard.pipeline.carried import WITHOUT_CACHE, Noted, Path, apply, objects
from lightning_shard.pipeline.crossing import Slot, StageEnd
from lightning_shard.pipeline.taint import Origin, Unknown, mark, refuse

LARGEST_COMPARED = 2**20
"""Elements of integer arguments, such as tokens, that are compared over the stages before each call."""

Remember = Callable[[], Callable[[], None]]


class Meeting(Protocol):
    """All stages of a pipeline, at one place of the step."""

    def gather(self, value: Any) -> list[Any]:
        """Every stage's value, in their order."""

    def share(self, values: Sequence[Tensor] | Sequence[Slot]) -> list[Tensor]:
        """The last stage's tensors; the others give their slots."""


@dataclass(frozen=True)
class _Place(tree.Leaf):
    """An object among the arguments, where the network returns it."""

    path: Path


class Calls:
    """The calls of the network within one step, on one stage.

    Args:
        stage: Its number.
        is_last: Whether it is the last one.
        entrances: The modules around all blocks: the outermost one that a step calls makes the call.
        meeting: Where the stages meet.
        run: Runs a function through the stages, as often as it takes until nothing is missing on any; is given what
            notes, before each, what the function changes beside modules.
        after_call: Told after each call how many there were.
    """

    def __init__(
        self,
        stage: int,
        is_last: bool,
        entrances: Sequence[nn.Module],
        device: torch.device,
        meeting: Meeting,
        run: Callable[[Callable[[], Any], Remember], Any],
        after_call: Callable[[int], None],
    ) -> None:
        self.count = 0
        self._stage = stage
        self._is_last = is_last
        self._entrances = entrances
        self._device = device
        self._meeting = meeting
        self._run = run
        self._after_call = after_call
        self._inside = False
        self._ended: str | None = None
        self._noted: dict[Path, Noted] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """The user's step runs inside."""
        with ExitStack() as stack:
            for module in self._entrances:
                own = module.__dict__.get("forward")
                module.__dict__["forward"] = wraps(module.forward)(partial(self._call, module.forward))
                stack.callback(_put_forward, module, own)
            yield

    def end(self) -> None:
        """The step has returned, or its part on this stage has."""
        said = self._meeting.gather(("returns", self._ended))
        if any(what != "returns" for what, _ in said):
            self._refuse_parting(said)

    def on_missing(self, sentence: str) -> NoReturn:
        """A value is needed between two calls, and isn't known here: this stage's part of the step ends."""
        if self._is_last:
            raise StepError(sentence)
        self._ended = sentence
        raise StageEnd

    def met(self, block: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A block is called, with arguments that may hold objects that no argument of the network did."""
        self._note(("block", block), args, kwargs)

    def _call(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        refuse((args, kwargs), "The network")
        said = self._meeting.gather(("calls", [(path, _kind(leaf)) for path, leaf in tree.walk((args, kwargs))]))
        if any(each != said[0] for each in said):
            self._refuse_parting(said)
        arguments = tree.tensors((args, kwargs))
        copies = [(tensor, tensor._version, tensor.clone()) for tensor in arguments]

        def remember() -> Callable[[], None]:
            self._note((), args, kwargs)

            def put_back() -> None:
                for path, noted in self._noted.items():
                    noted.put_back(f"{type(noted.value).__name__} ({'.'.join(map(str, path))})")
                self._noted.clear()
                for tensor, version, copy in copies:
                    if tensor._version != version:
                        tensor.copy_(copy)

            return put_back

        self._inside = True
        try:
            output = self._run(partial(forward, *args, **kwargs), remember)
            result = self._share(output)
        finally:
            self._inside = False
            self._noted.clear()
        self.count += 1
        self._after_call(self.count)
        return result

    def _note(self, prefix: Path, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        seen = {id(noted.value) for noted in self._noted.values()}
        for key, argument in [*enumerate(args), *kwargs.items()]:
            for path, value in objects(argument, (*prefix, key), seen):
                self._noted[path] = Noted.of(value)

    def _share(self, output: Any) -> Any:
        """What the network returned, and what it left in objects, on all stages."""
        changes = {path: changed for path, noted in self._noted.items() if (changed := noted.changes())}
        described = None
        if self._is_last:
            paths = {id(noted.value): path for path, noted in self._noted.items()}
            described = tree.map_leaves(partial(_described, paths), output)
        said = self._meeting.gather((described, changes))
        for index, (_, theirs) in enumerate(said):
            if index != self._stage:
                self._apply(theirs, changes)
        described = said[-1][0]
        slots = [leaf for _, leaf in tree.walk(described) if isinstance(leaf, Slot)]
        tensors = iter(self._meeting.share(tree.tensors(output) if self._is_last else slots))
        if self._is_last:
            return output
        return tree.map_leaves(lambda leaf: next(tensors) if isinstance(leaf, Slot) else self._found(leaf), described)

    def _apply(self, changes: Mapping[Path, Mapping[Any, Any]], own: Mapping[Path, Mapping[Any, Any]]) -> None:
        for path, changed in changes.items():
            if path not in self._noted:
                raise StepError(
                    f"A later pipeline stage changes an object ({'.'.join(map(str, path))}) that stage {self._stage}"
                    f" didn't get to. {WITHOUT_CACHE}"
                )
            apply(self._noted[path].value, changed, own.get(path, {}), self._placed)

    def _placed(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.to(self._device)
        one = torch.full((), torch.nan if value.dtype.is_floating_point else 0, dtype=value.dtype, device=self._device)
        return mark(one.expand(value.shape), Origin("what a cache holds of another stage's blocks", _refuse_use))

    def _found(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        if leaf.path in self._noted:
            return self._noted[leaf.path].value
        raise StepError(
            f"The network returns an object ({'.'.join(map(str, leaf.path))}) that stage {self._stage} didn't get to."
            f" {WITHOUT_CACHE}"
        )

    def _refuse_parting(self, said: Sequence[tuple[str, Any]]) -> NoReturn:
        ended = next((why for what, why in said if what == "returns" and why is not None), None)
        if ended is not None:
            raise StepError(
                f"{ended} Here it is needed between two calls of the network within one step: of what they compute, all"
                " stages get what the forward of the LightningModule, or of the network, returns; so have forward"
                " compute it, and call self(…)."
            )
        raise StepError(
            f"Between two calls of the network within one step, the stages went different ways ({_told(said)}): what a"
            " step does there may depend on the batch, on what the network returns and on torch's, numpy's and Python's"
            " own generators, not on anything that differs between processes. Or use pipeline_parallel_size=1."
        )


def _put_forward(module: nn.Module, own: Any) -> None:
    if own is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = own


def _kind(leaf: Any) -> Any:
    """What must be alike on all stages: of tensors the shape, and of integers the values too."""
    if isinstance(leaf, Tensor):
        is_exact = not leaf.is_floating_point() and not leaf.is_complex() and leaf.numel() <= LARGEST_COMPARED
        return tuple(leaf.shape), str(leaf.dtype), crc32(leaf.cpu().contiguous().numpy().tobytes()) if is_exact else 0
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__name__


def _told(said: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"stage {stage} {what} {_shapes(of)}".strip() for stage, (what, of) in enumerate(said))


def _shapes(of: Any) -> str:
    return ", ".join(str(kind) for _, kind in of) if of is not None else ""


def _described(paths: Mapping[int, Path], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return Slot.of(leaf)
    if id(leaf) in paths:
        return _Place(paths[id(leaf)])
    if hasattr(leaf, "__dict__") and not isinstance(leaf, (type, torch.dtype)):
        raise StepError(
            f"The network returns a {type(leaf).__name__}, which the other pipeline stages can't be given: return"
            " tensors, in any nesting of dicts, lists, tuples and dataclasses. Or use pipeline_parallel_size=1."
        )
    return leaf


def _refuse_use(_values: Sequence[Unknown], sentence: str) -> NoReturn:
    raise StepError(sentence)
