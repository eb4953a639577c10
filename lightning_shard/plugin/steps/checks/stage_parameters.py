"""Guards iteration over a module's parameters in hooks, where a pipeline stage holds only a part of them.

A hook that sums over all parameters, takes a norm, or zips them with another module's would use this stage's only.

- Before training begins, and in evaluations, ``parameters()`` shows hooks those of other stages too, without values
  (``taint.Hollow``), so that they can be counted and frozen; always of a module that other stages hold as a whole.
- While a model trains a hook is refused that iterates over ``parameters()`` past the first, other than for torch's
  clipping and norms: averages and norms are mostly taken then.
- ``named_parameters()``, mostly used to treat each parameter separately, ``state_dict()``, and an optimizer's groups in
  hooks that receive gradients, warn once for each hook.

Steps have a guard of their own (``pipeline/stages/cut.py``), and so has ``configure_optimizers``
(``assembly/parameters.py``). After a run all code is warned, on data ranks of ``state_dict()``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.plugin.steps.running_hooks import HookCall, RunningHooks

_EACH_BY_ITSELF = ("requires_grad_", "zero_grad", "freeze", "unfreeze")
"""Methods of modules that iterate over ``parameters()``, and are right with this stage's only."""

_OF_STAGES = (
    "With pipeline stages each rank has only its own stage's: what treats each parameter by itself is right, as over"
    " named_parameters(); what is computed over all isn't"
)
_OF_RANKS = (
    "They are DTensors, of which each rank has a part: the module itself can load them again, but no other has all"
)
_WHOLE = (
    " (in hooks, torch.nn.utils.clip_grad_norm_ and Lightning's grad_norm see all, and EMAWeightAveraging averages all;"
    " trainer.save_checkpoint saves all, and strategy.gather_full_parameters() gives all)."
)

Result = TypeVar("Result")


class StageParameters:
    """The guard over the modules of which this rank lacks parameters.

    Args:
        incomplete: The modules, by name.
        hooks: Those that run; ``None`` for a copy of a module, which isn't guarded.
        names: All names of parameters, in the whole module's order.
        has_stages: Whether other stages hold the rest, and not only other data or tensor ranks.
    """

    def __init__(
        self,
        incomplete: Mapping[str, nn.Module],
        hooks: RunningHooks | None = None,
        names: Iterable[str] = (),
        *,
        has_stages: bool = True,
    ) -> None:
        self._incomplete = incomplete
        self._hooks = hooks
        self._place = {name: place for place, name in enumerate(names)}
        self._has_stages = has_stages
        self._shows_all = False
        self._is_after_run = False
        self._told: set[str] = set()
        self._of_stage = {name: _of_stage(name, module) for name, module in incomplete.items()} if has_stages else {}
        self.release()

    def guard(self, *, shows_all: bool = False, is_after_run: bool = False) -> None:
        """Guard the modules until the next call.

        Args:
            shows_all: ``parameters()`` shows other stages' without values, rather than being refused.
            is_after_run: Until the next setup any code may use a stage's parameters in any way, and is warned.
        """
        self.release()
        self._shows_all, self._is_after_run = shows_all, is_after_run
        for name, module in self._incomplete.items():
            # no closures: code that copies a module copies these along with it
            own = vars(module)
            own["state_dict"] = partial(_state_dict, self, name, module, own.get("state_dict"))
            if self._has_stages:
                own["parameters"] = partial(_parameters, self, name, module)
                own["named_parameters"] = partial(_named_parameters, self, name, module)
                own |= {key: partial(_aside, self, module, key) for key in _EACH_BY_ITSELF if hasattr(module, key)}

    def release(self) -> None:
        """Remove the guard, also an earlier Trainer's, but keep a ``state_dict`` that the user has set."""
        for name, module in self._incomplete.items():
            own = vars(module)
            for key in ("parameters", "state_dict", *_EACH_BY_ITSELF):
                guarded: Any = own.get(key)
                if getattr(guarded, "func", None) in (_parameters, _state_dict, _aside):
                    del own[key]
                    if guarded.func is _state_dict and guarded.args[-1] is not None:
                        own[key] = guarded.args[-1]
            if self._has_stages:
                own["named_parameters"] = self._of_stage[name]

    @property
    def is_in_hook(self) -> bool:
        """Whether a hook of the user's runs, and has called nothing else."""
        return self._hooks is not None and self._hooks.current is not None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of code that is right with this stage's parameters only."""
        before, self._is_after_run = self._is_after_run, False
        try:
            with nullcontext() if self._hooks is None else self._hooks.aside():
                yield
        finally:
            self._is_after_run = before

    def walked(self, what: str) -> None:
        """A hook, or code after a run, iterates over something of which this rank has a part."""
        call = self._hooks.current if self._hooks is not None else None
        if self._is_after_run:
            rank_zero_warn(self._said("Code after a run", what))
        elif call is not None and what not in call.noted[-1:]:
            call.noted.append(what)

    def take_whole(self) -> None:
        """What the hook has iterated over last goes to a function that sees all ranks'."""
        if self._hooks is not None and (call := self._hooks.current) is not None and call.noted:
            call.noted.pop()

    def end(self, call: HookCall, error: BaseException | None) -> None:
        """Refuse a hook that has ended, or warn of it, by what it has iterated over; explain its error.

        Raises:
            StepError: It was ``parameters()``.
        """
        for what in call.noted:
            if error is not None:
                error.add_note(self._said(call.name, what))
            elif what.startswith(_PARAMETERS):
                raise StepError(self._said(call.name, what), breaks=10)
            elif call.name not in self._told:
                self._told.add(call.name)
                rank_zero_warn(self._said(call.name, what))

    def _said(self, name: str, what: str) -> str:
        return f"{name} iterates over {what}. {_OF_STAGES if self._has_stages else _OF_RANKS}{_WHOLE}"

    def named(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        if self._incomplete.get(name) is module:
            return self._of_stage[name](*args, **kwargs)  # type: ignore[no-any-return]
        return type(module).named_parameters(module, *args, **kwargs)  # a copy, which no step uses

    def all_of(self, name: str, module: nn.Module, recurse: bool) -> list[nn.Parameter] | None:
        """All parameters, other stages' without values; ``None`` where only this stage's are to be seen."""
        if self._incomplete.get(name) is not module or not self.is_in_hook:
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
        return StageParameters, ({},)

    @contextmanager
    def warning_of_groups(self, optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[None]:
        """Inside, hooks that iterate over the parameters in optimizers' groups are warned."""
        held = [(group, group["params"]) for optimizer in optimizers for group in optimizer.param_groups]
        for group, parameters in held:
            group["params"] = _OfStage(parameters, self)
        try:
            yield
        finally:
            for group, parameters in held:
                if isinstance(group["params"], _OfStage):
                    parameters[:] = group["params"]
                    group["params"] = parameters


_PARAMETERS = "parameters() of "


def _of_stage(name: str, module: nn.Module) -> Any:
    """A module's ``named_parameters`` of this stage, without the guard of an earlier Trainer."""
    own = module.__dict__["named_parameters"]
    return own.args[0]._of_stage[name] if getattr(own, "func", None) is _named_parameters else own


def _parameters(guard: StageParameters, name: str, module: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    every = guard.all_of(name, module, recurse)
    if every is not None:
        yield from every
        return
    place = -1
    for place, (_, parameter) in enumerate(guard.named(name, module, "", recurse)):
        if place == 1 and recurse:
            guard.walked(f"{_PARAMETERS}{name or 'the LightningModule'}")
        yield parameter
    if place == 0 and recurse:  # its only one here, but not the module's
        guard.walked(f"{_PARAMETERS}{name or 'the LightningModule'}")


def _named_parameters(
    guard: StageParameters, name: str, module: nn.Module, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, nn.Parameter]]:
    for place, named in enumerate(guard.named(name, module, *args, **kwargs)):
        if place == 1:
            guard.walked(f"named_parameters() of {name or 'the LightningModule'}")
        yield named


def _state_dict(guard: StageParameters, name: str, module: nn.Module, own: Any, *args: Any, **kwargs: Any) -> Any:
    guard.walked(f"state_dict() of {name or 'the LightningModule'}")
    with guard.aside():
        return type(module).state_dict(module, *args, **kwargs) if own is None else own(*args, **kwargs)


def _aside(guard: StageParameters, module: nn.Module, key: str, *args: Any, **kwargs: Any) -> Any:
    with guard.aside():
        return getattr(type(module), key)(module, *args, **kwargs)


class _OfStage(list[nn.Parameter]):
    """The parameters of an optimizer's group."""

    def __init__(self, parameters: Iterable[nn.Parameter], guard: StageParameters) -> None:
        super().__init__(parameters)
        self._guard = guard

    def __iter__(self) -> Iterator[nn.Parameter]:
        self._guard.walked("an optimizer's groups")
        return super().__iter__()


def guard_of(module: nn.Module) -> StageParameters | None:
    """The guard of a module's parameters, if they are guarded now."""
    guarded: Any = vars(module).get("state_dict")
    return guarded.args[0] if getattr(guarded, "func", None) is _state_dict else None


@contextmanager
def seen_as_parts(module: nn.Module) -> Iterator[None]:
    """Context of code that is right with a part of a module's parameters."""
    guard = guard_of(module)
    with nullcontext() if guard is None else guard.aside():
        yield


def by_parts(method: Callable[..., Result]) -> Callable[..., Result]:
    """A strategy's method that hooks may call, and that is right with a part of its module's parameters."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Result:
        with nullcontext() if self.lightning_module is None else seen_as_parts(self.lightning_module):
            return method(self, *args, **kwargs)

    return run
