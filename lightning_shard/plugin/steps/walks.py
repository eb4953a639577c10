"""Code of the user's, between steps, that goes over all parameters of a module of which a stage holds a part.

A sum over them, a norm, or a zip with another module's would be of this stage only. So ``parameters()`` raises where it
would go on past the first; ``named_parameters()``, with which most work is on each by itself, says so once, as do an
optimizer's groups in the hooks that are given gradients. Steps have a guard of their own (``pipeline/stage.py``), and
``configure_optimizers`` runs before. After a run both are told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.taint import Hollow

_TAKE_PARTS = (
    *("lightning", "lightning_shard", "torch.distributed", "torch.nn.modules", "torch.optim"),
    "torch.nn.utils.clip_grad",  # whole by norms.py
)
"""Modules and packages whose code goes over parameters and is right with this stage's."""
_PARAMETERS = nn.Module.parameters.__code__
"""What goes over the named ones for the code that called it."""
_AVERAGES = "torch.optim.swa_utils"
"""Goes over a copy's parameters beside a module's: right with parts only where the copy is ours."""
_MISMATCH = ("size", "shape", "dimension", "broadcast", "zip()", "foreach")
"""What torch and Python say of tensors and lists that don't fit each other."""


OF_STAGE = "With several pipeline stages it has its stage's part only"
OF_RANK = "Its parameters are DTensors, of which each rank has a part"


class Walks:
    """A guard over modules by name, each of which lies on several stages."""

    def __init__(self, incomplete: Mapping[str, nn.Module]) -> None:
        self._incomplete = incomplete
        own = {name: module.__dict__["named_parameters"] for name, module in incomplete.items()}
        # an earlier Trainer's warns
        self._of_stage = {name: getattr(function, "of_stage", function) for name, function in own.items()}
        self._has_warned = False
        self._gone_over: dict[CodeType, str] = {}
        """The user's code that has begun to go over what only a part is here of, and what that is."""
        self._states = PartialStates(incomplete, OF_STAGE, self._gone_over)
        self.release()

    def guard(self) -> None:
        for name, module in self._incomplete.items():
            module.__dict__["parameters"] = self._refusing(name, module)
            module.__dict__["named_parameters"] = self._warning(name, module)
        self._states.tell()

    def release(self) -> None:
        for name, module in self._incomplete.items():
            module.__dict__.pop("parameters", None)
            module.__dict__["named_parameters"] = self._of_stage[name]
        self._states.release()

    def warn(self) -> None:
        """After a run, where code may have any use for a stage's parameters, until the next one is set up."""
        for name, module in self._incomplete.items():
            module.__dict__.pop("parameters", None)
            module.__dict__["named_parameters"] = self._warning(name, module)
        self._states.tell()

    def refusal(self, error: Exception) -> StepError | None:
        """What code failed for that went over a stage's part beside something whole, as a teacher's parameters."""
        if type(error) not in (RuntimeError, ValueError) or not any(word in str(error) for word in _MISMATCH):
            return None
        for frame, line in walk_tb(error.__traceback__):
            if (what := self._gone_over.get(frame.f_code)) is not None:
                said = " ".join(str(error).split())
                return StepError(
                    f"{_code(frame, line)} goes over {what}. With several pipeline stages that is its stage's part"
                    f" only, which doesn't fit what is whole ({said}): for averages of weights use Lightning's"
                    " EMAWeightAveraging, or pipeline_parallel_size=1."
                )
        return None

    def _refusing(self, name: str, module: nn.Module) -> Any:
        def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
            what = f"the parameters of {name or 'the LightningModule'}"
            for place, parameter in enumerate(type(module).parameters(module, recurse)):
                if place < 2 and recurse and not _is_right_with_parts(frame := sys._getframe(1)):
                    self._gone_over[frame.f_code] = what
                    if place == 1:
                        raise StepError(
                            f"{_code(frame)} goes over {what}, and with several pipeline stages these are only its"
                            " stage's: for gradient norms and clipping use torch.nn.utils.clip_grad_norm_ or"
                            " Lightning's grad_norm, which see all; for averages, Lightning's EMAWeightAveraging; for"
                            " work on each parameter by itself, named_parameters()."
                        )
                yield parameter

        return parameters

    def _warning(self, name: str, module: nn.Module) -> Any:
        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            what = f"the parameters of {name or 'the LightningModule'}"
            for place, named in enumerate(self._of_stage[name](*args, **kwargs)):
                if place < 2:
                    frame: Any = sys._getframe(1)
                    frame = frame.f_back if frame.f_code is _PARAMETERS else frame
                    if not _is_right_with_parts(frame):
                        self._gone_over[frame.f_code] = what
                        if place == 1:
                            self._tell(frame, what)
                yield named

        named_parameters.of_stage = self._of_stage[name]  # type: ignore[attr-defined]
        return named_parameters

    @contextmanager
    def showing_gradients(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """A hook that is given gradients runs inside; of other stages' parameters they aren't known, and not None."""
        with self._telling_of_groups(optimizers), Hollow.given_gradients(lambda names: not _takes_parts(names)):
            yield

    @contextmanager
    def _telling_of_groups(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Inside, code that goes over the parameters of their groups is told what these are."""
        held = [(group, group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        for group, parameters in held:
            group["params"] = _OfStage(parameters, self._tell)
        try:
            yield
        finally:
            for group, parameters in held:
                if isinstance(group["params"], _OfStage):
                    parameters[:] = group["params"]
                    group["params"] = parameters

    def _tell(self, frame: Any, what: str) -> None:
        if not self._has_warned and not _takes_parts(frame.f_globals):
            self._has_warned = True
            rank_zero_warn(
                f"{_code(frame)} goes over {what}. With several pipeline stages these are its stage's: work on each by"
                " itself is right, what is taken over all isn't (torch.nn.utils.clip_grad_norm_ and Lightning's"
                " grad_norm see all, and strategy.gather_full_parameters() gives all)."
            )


class _OfStage(list[nn.Parameter]):
    """Parameters of an optimizer's group.

    Args:
        tell: Told who goes over them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], tell: Callable[[Any, str], None]) -> None:
        super().__init__(parameters)
        self._tell = tell

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._tell(sys._getframe(1), "the parameters of an optimizer's groups")
        return super().__iter__()


class PartialStates:
    """What is said of ``state_dict()`` of modules of which a rank holds a part.

    Args:
        modules: By name.
        part: Whose part, as the sentence says it.
        gone_over: Is told of the code that asks.
    """

    def __init__(self, modules: Mapping[str, nn.Module], part: str, gone_over: dict[CodeType, str]) -> None:
        self._modules = modules
        self._part = part
        self._gone_over = gone_over
        self._has_warned = False

    def tell(self) -> None:
        for name, module in self._modules.items():
            # no closure: what copies a module copies this with it
            module.__dict__["state_dict"] = partial(_told_of, self, name, module)

    def release(self) -> None:
        for module in self._modules.values():
            module.__dict__.pop("state_dict", None)

    def asked(self, frame: Any, name: str) -> None:
        if _takes_parts(frame.f_globals):
            return
        what = f"the state_dict of {name or 'the LightningModule'}"
        self._gone_over[frame.f_code] = what
        if not self._has_warned:
            self._has_warned = True
            rank_zero_warn(
                f"{_code(frame)} takes {what}. {self._part}: load_state_dict takes that back on this layout, but a file"
                " of it, or what is computed of all of it, lacks the rest. trainer.save_checkpoint saves all, and"
                " trainer.strategy.gather_full_parameters() gives all."
            )

    def __reduce__(self) -> Any:
        return PartialStates, ({}, self._part, {})


def _told_of(states: PartialStates, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    states.asked(sys._getframe(1), name)
    return type(module).state_dict(module, *args, **kwargs)


def missing_parameter(error: Exception, module: nn.Module) -> StepError | None:
    """Of code that looks another stage's parameter up by its name, where it is."""
    note = _missing(error, module)
    return None if note is None else StepError(f"There is no parameter {error} here. {note}")


def note_missing_parameter(exception: BaseException, module: nn.Module) -> None:
    """The same, where the exception goes on as it is."""
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


def _takes_parts(names: Mapping[str, Any]) -> bool:
    """Whether the code that runs among these global names does."""
    module = str(names.get("__name__", ""))
    return any(module == known or module.startswith(f"{known}.") for known in _TAKE_PARTS)


def _is_right_with_parts(frame: Any) -> bool:
    if frame.f_globals.get("__name__") == _AVERAGES:
        return getattr(frame.f_locals.get("self"), "averages_parts", False)
    return _takes_parts(frame.f_globals)


def _code(frame: Any, line: int | None = None) -> str:
    return f"{frame.f_code.co_name} ({frame.f_globals.get('__name__')}:{line or frame.f_lineno})"
