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


class Walks:
    """A guard over modules by name, each of which lies on several stages."""

    def __init__(self, incomplete: Mapping[str, nn.Module]) -> None:
        self._incomplete = incomplete
        own = {name: module.__dict__["named_parameters"] for name, module in incomplete.items()}
        # an earlier Trainer's warns
        self._of_stage = {name: getattr(function, "of_stage", function) for name, function in own.items()}
        self._has_warned = False
        self.release()

    def guard(self) -> None:
        for name, module in self._incomplete.items():
            module.__dict__["parameters"] = self._refusing(name, module)
            module.__dict__["named_parameters"] = self._warning(name, module)

    def release(self) -> None:
        for name, module in self._incomplete.items():
            module.__dict__.pop("parameters", None)
            module.__dict__["named_parameters"] = self._of_stage[name]

    def warn(self) -> None:
        """After a run, where code may have any use for a stage's parameters, until the next one is set up."""
        for name, module in self._incomplete.items():
            module.__dict__.pop("parameters", None)
            module.__dict__["named_parameters"] = self._warning(name, module)

    def _refusing(self, name: str, module: nn.Module) -> Any:
        def parameters(recurse: bool = True) -> Iterator[nn.Parameter]:
            for place, parameter in enumerate(type(module).parameters(module, recurse)):
                if place == 1 and recurse and not _takes_parts(sys._getframe(1).f_globals):
                    raise StepError(
                        f"{_code(sys._getframe(1))} goes over the parameters of {name or 'the LightningModule'}, and"
                        " with several pipeline stages these are only its stage's: for gradient norms and clipping use"
                        " torch.nn.utils.clip_grad_norm_ or Lightning's grad_norm, which see all; for averages,"
                        " Lightning's EMAWeightAveraging; for work on each parameter by itself, named_parameters()."
                    )
                yield parameter

        return parameters

    def _warning(self, name: str, module: nn.Module) -> Any:
        def named_parameters(*args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            for place, named in enumerate(self._of_stage[name](*args, **kwargs)):
                if place == 1:
                    frame: Any = sys._getframe(1)
                    frame = frame.f_back if frame.f_code is _PARAMETERS else frame
                    self._tell(frame, f"the parameters of {name or 'the LightningModule'}")
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


def note_missing_parameter(exception: BaseException, module: nn.Module) -> None:
    """Tell code that looks another stage's parameter up by its name where it is."""
    key = exception.args[0] if type(exception) is KeyError and exception.args else None
    names = (held.fqn for part in module.modules() for held in vars(part).values() if isinstance(held, Hollow))
    note = (
        f"With several pipeline stages another one holds {key}: named_parameters() and state_dict() have this stage's"
        " parameters only. For averages of weights there is Lightning's EMAWeightAveraging; or use"
        " pipeline_parallel_size=1."
    )
    is_foreign = isinstance(key, str) and any(f".{name}".endswith(f".{key}") for name in names)
    if is_foreign and note not in getattr(exception, "__notes__", ()):
        exception.add_note(note)


def _takes_parts(names: Mapping[str, Any]) -> bool:
    """Whether the code that runs among these global names does."""
    module = str(names.get("__name__", ""))
    return any(module == known or module.startswith(f"{known}.") for known in _TAKE_PARTS)


def _code(frame: Any) -> str:
    return f"{frame.f_code.co_name} ({frame.f_globals.get('__name__')}:{frame.f_lineno})"
