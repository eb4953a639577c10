"""Guards iteration over a module's parameters between steps, where a pipeline stage holds only a part of them.

User code that sums over all parameters, takes a norm, or zips them with another module's would use this stage's only.

- Before training begins, and in evaluations, ``parameters()`` shows those of other stages too, without values
  (``taint.Hollow``), so that they can be counted and frozen; always of a module that other stages hold as a whole.
- While a model trains it raises when it is iterated past the first: averages and norms are mostly taken then.
- ``named_parameters()``, mostly used to treat each parameter separately, warns once for each function that calls it; so
  do an optimizer's groups in hooks that receive gradients, and ``state_dict()``.

Steps have a guard of their own (``pipeline/stages/cut.py``), and so has ``configure_optimizers``
(``assembly/all_parameters.py``). After a run both iterators warn.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, TracebackType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.errors import StepError, in_one_line
from lightning_shard.pipeline.dataflow.taint import Hollow

_TAKE_PARTS = ("lightning", "lightning_shard", "torch.distributed", "torch.nn.modules", "torch.optim")
"""Modules and packages whose code iterates over parameters and is right with this stage's only."""
_NORMS = "torch.nn.utils.clip_grad"
"""Right while ``gradient_norms.py`` makes its norms cover all stages."""
_PARAMETERS = nn.Module.parameters.__code__
"""Iterates over ``named_parameters`` on behalf of its caller."""
_AVERAGES = "torch.optim.swa_utils"
"""Zips a copy's parameters with a module's: right with parts only if the copy is ours."""
_MISMATCH = ("size", "shape", "dimension", "broadcast", "zip()", "foreach", "Missing key")
"""Words in messages of torch and Python about tensors and lists that don't match in size."""

OF_STAGE = "With several pipeline stages it has its stage's part only"
OF_RANK = "Its parameters are DTensors, of which each rank has a part"


class Walks:
    """The guard over the modules of which this rank lacks parameters.

    Args:
        incomplete: The modules, by name.
        names: All names of parameters, in the whole module's order.
        is_in_step: Whether a user's step runs.
    """

    norms_are_whole = False

    def __init__(
        self,
        incomplete: Mapping[str, nn.Module],
        names: Iterable[str] = (),
        is_in_step: Callable[[], bool] = lambda: False,
    ) -> None:
        self._incomplete = incomplete
        self._place = {name: place for place, name in enumerate(names)}
        self._is_in_step = is_in_step
        self._shows_all = False
        self._of_stage = {name: _of_stage(name, module) for name, module in incomplete.items()}
        self._told: set[_Function] = set()
        self._known_walks: _KnownWalks = {}
        self._states = PartialStates(incomplete, OF_STAGE, self._known_walks)
        self.release()

    def guard(self, *, shows_all: bool = False) -> None:
        """Guard the modules until the next call.

        Args:
            shows_all: ``parameters()`` shows other stages' without values, rather than raising.
        """
        self._shows_all = shows_all
        for name, module in self._incomplete.items():
            # no closures: code that copies a module copies these along with it
            module.__dict__["parameters"] = partial(_parameters, self, name, module)
            module.__dict__["named_parameters"] = partial(_named_parameters, self, name, module)
        self._states.guard()

    def release(self) -> None:
        for name, module in self._incomplete.items():
            module.__dict__.pop("parameters", None)
            module.__dict__["named_parameters"] = self._of_stage[name]
        self._states.release()

    def warn(self) -> None:
        """Only warn: after a run, until the next setup, code may use a stage's parameters in any way."""
        for name, module in self._incomplete.items():
            module.__dict__.pop("parameters", None)
            module.__dict__["named_parameters"] = partial(_named_parameters, self, name, module)
        self._states.guard()

    def refusal(self, error: Exception) -> StepError | None:
        """Explain an error of code that combined a stage's part with something whole, as a teacher's parameters."""
        if type(error) not in (RuntimeError, ValueError) or not any(word in str(error) for word in _MISMATCH):
            return None
        of_lists = "aten._foreach_" in str(error)  # which code has collected before
        for at in _entries(error.__traceback__):
            for (code, what), walk in self._known_walks.items():
                if code is at.tb_frame.f_code and (of_lists or walk.ended in (None, at.tb_lasti)):
                    said = in_one_line(error)
                    return StepError(
                        f"{_code(at.tb_frame, at.tb_lineno)} iterates over {what}. With pipeline stages each rank has"
                        f" only its own stage's part, which doesn't match what is whole ({said}): for averages of"
                        " weights use Lightning's EMAWeightAveraging, or pipeline_parallel_size=1."
                    )
        return None

    def begin_walk(self, frame: Any, what: str) -> _Walk:
        return self._known_walks.setdefault((frame.f_code, what), _Walk(frame.f_code)).begin()

    def named(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if self._incomplete.get(name) is module:
            return self._of_stage[name](*args, **kwargs)  # type: ignore[no-any-return]
        return type(module).named_parameters(module, *args, **kwargs)  # a copy, which no step uses

    def all_of(self, name: str, module: nn.Module, recurse: bool) -> list[nn.Parameter] | None:
        """All parameters, other stages' without values; ``None`` where only this stage's are to be seen."""
        if self._incomplete.get(name) is not module or self._is_in_step():
            return None
        start = f"{name}." if name else ""
        named: dict[str, Any] = {f"{start}{key}": p for key, p in self._of_stage[name]("", recurse)}
        if named and not self._shows_all:
            return None
        for path, part in module.named_modules() if recurse else [("", module)]:
            inner = f"{start}{path}." if path else start
            named |= {f"{inner}{key}": p.as_parameter() for key, p in vars(part).items() if isinstance(p, Hollow)}
        first = {
            p.fqn if isinstance(p, Hollow) else key: p
            for key, p in sorted(named.items(), key=lambda item: self._place[item[0]])
        }
        return [*first.values()]

    def __reduce__(self) -> Any:
        return Walks, ({},)

    @contextmanager
    def warning_of_groups(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Inside, code that iterates over the parameters in optimizers' groups is warned."""
        held = [(group, group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        for group, parameters in held:
            group["params"] = _OfStage(parameters, self.warn_of)
        try:
            yield
        finally:
            for group, parameters in held:
                if isinstance(group["params"], _OfStage):
                    parameters[:] = group["params"]
                    group["params"] = parameters

    def warn_of(self, frame: Any, what: str) -> None:
        if (function := _function(frame.f_code)) not in self._told and not takes_parts(frame.f_globals):
            self._told.add(function)
            rank_zero_warn(
                f"{_code(frame)} iterates over {what}. With pipeline stages each rank has only its own stage's:"
                " per-parameter operations are correct, reductions over all aren't (in hooks,"
                " torch.nn.utils.clip_grad_norm_ and Lightning's grad_norm see all, and"
                " strategy.gather_full_parameters() gives all)."
            )


class _Walk:
    """One iteration of user code over something of which this rank holds only a part.

    ``ended`` is the instruction of that code at which the iterator was exhausted or dropped; None before. If code fails
    in a loop, its iterator is dropped at the instruction that failed.
    """

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._lasts: Any = None
        self.ended: int | None = None

    def begin(self) -> _Walk:
        self._lasts = self.ended = None
        return self

    def last_as(self, state: OrderedDict[str, Any]) -> None:
        """End the iteration when ``state``, which was returned to the code, is dropped."""
        self._lasts = weakref.ref(state, lambda _: self.end(sys._getframe()))

    def end(self, frame: Any) -> None:
        while frame is not None and frame.f_code is not self._code:
            frame = frame.f_back
        self.ended = -1 if frame is None else frame.f_lasti


_KnownWalks = dict[tuple[CodeType, str], _Walk]
"""By the code, and a description of what it iterates over."""

_Function = tuple[str, str]
"""A function's file and name."""


def _function(code: CodeType) -> _Function:
    """The function that has this code, also in a comprehension."""
    return code.co_filename, code.co_qualname.partition(".<locals>.<")[0]


def _of_stage(name: str, module: nn.Module) -> Any:
    """A module's ``named_parameters`` of this stage, without the guard of an earlier Trainer."""
    own = module.__dict__["named_parameters"]
    return own.args[0]._of_stage[name] if getattr(own, "func", None) is _named_parameters else own


def _parameters(walks: Walks, name: str, module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    what = _parameters_of(name)
    walk = None
    everyone = _is_right_with_parts(sys._getframe(1)) or walks.all_of(name, module, recurse)
    if isinstance(everyone, list):
        yield from everyone
        return
    try:
        place = -1
        for place, parameter in enumerate(type(module).parameters(module, recurse)):
            if place < 2 and recurse and not _is_right_with_parts(frame := sys._getframe(1)):
                walk = walks.begin_walk(frame, what)
                if place == 1:
                    raise _refused_walk(frame, what)
            yield parameter
        if place == 0 and walk is not None:  # its only one here, but not the module's
            raise _refused_walk(sys._getframe(1), what)
    finally:
        if walk is not None:
            walk.end(sys._getframe())


def _refused_walk(frame: Any, what: str) -> StepError:
    return StepError(
        f"{_code(frame)} iterates over {what}. With pipeline stages each rank has only its own stage's, so what is"
        " computed over all would be wrong: for gradient norms and clipping use torch.nn.utils.clip_grad_norm_ or"
        " Lightning's grad_norm, which see all; for averages, Lightning's EMAWeightAveraging; for work on each"
        " parameter by itself, named_parameters()."
    )


def _named_parameters(
    walks: Walks, name: str, module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    what = _parameters_of(name)
    walk = None
    try:
        for place, named in enumerate(walks.named(name, module, *args, **kwargs)):
            if place < 2:
                frame: Any = sys._getframe(1)
                frame = frame.f_back if frame.f_code is _PARAMETERS else frame
                if not _is_right_with_parts(frame):
                    walk = walks.begin_walk(frame, what)
                    if place == 1:
                        walks.warn_of(frame, what)
            yield named
    finally:
        if walk is not None:
            walk.end(sys._getframe())


def _parameters_of(name: str) -> str:
    return f"the parameters of {name or 'the LightningModule'}"


class _OfStage(list[nn.Parameter]):
    """The parameters of an optimizer's group.

    Args:
        warn: Called with the frame that iterates over them, and a description.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], warn: Callable[[Any, str], None]) -> None:
        super().__init__(parameters)
        self._warn = warn

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._warn(sys._getframe(1), "the parameters of an optimizer's groups")
        return super().__iter__()


class PartialStates:
    """Warns of calls of ``state_dict()`` on modules of which this rank holds only a part.

    Args:
        modules: By name.
        part: A sentence for the warning that says which part.
        known_walks: Collects the code that calls it.
    """

    def __init__(self, modules: Mapping[str, nn.Module], part: str, known_walks: _KnownWalks) -> None:
        self._modules = modules
        self._part = part
        self._known_walks = known_walks
        self._told: set[_Function] = set()

    def guard(self) -> None:
        self.release()
        for name, module in self._modules.items():
            # no closure: code that copies a module copies this along with it
            module.__dict__["state_dict"] = partial(
                _warning_state_dict, self, name, module, module.__dict__.get("state_dict")
            )

    def release(self) -> None:
        """Remove the guard, but keep a ``state_dict`` that the user has set."""
        for module in self._modules.values():
            guarded: Any = module.__dict__.get("state_dict")
            if getattr(guarded, "func", None) is _warning_state_dict:
                del module.__dict__["state_dict"]
                if (own := guarded.args[-1]) is not None:
                    module.__dict__["state_dict"] = own

    def begin_walk(self, frame: Any, name: str) -> _Walk | None:
        if takes_parts(frame.f_globals):
            return None
        what = f"the state_dict of {name or 'the LightningModule'}"
        if (function := _function(frame.f_code)) not in self._told:
            self._told.add(function)
            rank_zero_warn(
                f"{_code(frame)} takes {what}. {self._part}: load_state_dict loads it into the same module again, but"
                " another module, such as a target network, a file of it, or what is computed from all of it, lacks the"
                " rest. trainer.save_checkpoint saves all, and trainer.strategy.gather_full_parameters() gives all."
            )
        return self._known_walks.setdefault((frame.f_code, what), _Walk(frame.f_code)).begin()

    def __reduce__(self) -> Any:
        return PartialStates, ({}, self._part, {})


def _warning_state_dict(
    states: PartialStates, name: str, module: nn.Module, own: Any, *args: Any, **kwargs: Any
) -> Any:
    walk = states.begin_walk(sys._getframe(1), name)
    state = type(module).state_dict(module, *args, **kwargs) if own is None else own(*args, **kwargs)
    if walk is not None and isinstance(state, OrderedDict):
        walk.last_as(state)
    return state


def missing_parameter(error: Exception, module: nn.Module) -> StepError | None:
    """An explanation for code that looks up another stage's parameter by its name; ``None`` for other errors."""
    note = _missing(error, module)
    # a name without a dot may be any dictionary's key
    return (
        None if note is None or "." not in error.args[0] else StepError(f"There is no parameter {error} here. {note}")
    )


def note_missing_parameter(exception: BaseException, module: nn.Module) -> None:
    """Add the explanation to an exception that is raised unchanged; here also for a name without a dot."""
    note = _missing(exception, module)
    if note is not None and note not in getattr(exception, "__notes__", ()):
        exception.add_note(note)


def _missing(exception: BaseException, module: nn.Module) -> str | None:
    key = exception.args[0] if type(exception) is KeyError and exception.args else None
    names = (held.fqn for part in module.modules() for held in vars(part).values() if isinstance(held, Hollow))
    if not isinstance(key, str) or not any(f".{name}".endswith(f".{key}") for name in names):
        return None
    return (
        f"With several pipeline stages another one holds {key}: named_parameters() and state_dict() have this stage's"
        " parameters only. For averages of weights there is Lightning's EMAWeightAveraging; or use"
        " pipeline_parallel_size=1."
    )


def takes_parts(names: Mapping[str, Any]) -> bool:
    """Whether code with these globals is known to be right with this stage's parameters only."""
    module = str(names.get("__name__", ""))
    if module == _NORMS:
        return Walks.norms_are_whole
    return any(module == known or module.startswith(f"{known}.") for known in _TAKE_PARTS)


def _is_right_with_parts(frame: Any) -> bool:
    if frame.f_globals.get("__name__") == _AVERAGES:
        return getattr(frame.f_locals.get("self"), "averages_parts", False)
    return takes_parts(frame.f_globals)


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _code(frame: Any, line: int | None = None) -> str:
    return f"{frame.f_code.co_name} ({frame.f_globals.get('__name__')}:{line or frame.f_lineno})"
