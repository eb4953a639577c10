"""Guards iteration over a module's parameters in hooks, where a pipeline stage holds only a part of them.

A hook that sums over all parameters, takes a norm, or zips them with another module's would use this stage's only.

- Before training begins, and in evaluations, ``parameters()`` shows hooks those of other stages too, without values
  (``taint.Hollow``), so that they can be counted and frozen; always of a module that other stages hold as a whole.
- While a model trains a hook is refused that iterates over ``parameters()`` past the first, other than for torch's
  clipping and norms: averages and norms are mostly taken then.
- ``named_parameters()``, mostly used to treat each parameter separately, and ``state_dict()`` warn once for each hook.

Steps have a guard of their own (``pipeline/stages/cut.py``), and so has ``configure_optimizers``
(``assembly/parameters.py``). After a run all code is warned, on data ranks of ``state_dict()``.

Private in Lightning 2.6, used here: each hook runs inside of ``profiler.profile("[Callback]<its key>.<hook>")``, or of
``[LightningModule]<its class>.<hook>``. ``profile`` is replaced on a run's own profiler. What a hook calls of
Lightning's, such as a step or a save, has actions of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_shard.errors import StepError
from lightning_shard.pipeline.dataflow.taint import Hollow
from lightning_shard.plugin.steps.loop import is_overridden, is_users
from lightning_shard.torch_private import replaced

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
        incomplete: The modules, by name; none for a copy of a module, which isn't guarded.
        names: All names of parameters, in the whole module's order.
        has_stages: Whether other stages hold the rest, and not only other data or tensor ranks.
    """

    def __init__(
        self,
        incomplete: Mapping[str, nn.Module],
        names: Iterable[str] = (),
        *,
        has_stages: bool = True,
    ) -> None:
        self._incomplete = incomplete
        self._place = {name: place for place, name in enumerate(names)}
        self._has_stages = has_stages
        self._shows_all = False
        self._is_after_run = False
        self._told: set[str] = set()
        self._calls: list[list[str] | None] = []
        """Of hooks that run, what each has iterated over of which this rank has a part; None: what these call of
        Lightning's."""
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

    @contextmanager
    def watching(self, trainer: pl.Trainer) -> Iterator[None]:
        """Context of a run, whose hooks are guarded."""
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        profile = profiler.profile
        of_users: dict[str, bool] = {}

        def watched(action: str) -> AbstractContextManager[Any]:
            if action not in of_users:
                of_users[action] = _is_users(trainer, action)
            if of_users[action]:
                return self.hook(action.partition("]")[2], profile(action))
            is_in_hook = self._calls and self._calls[-1] is not None
            return self._beside(profile(action)) if is_in_hook else profile(action)

        with replaced((profiler, "profile", watched)):
            yield

    @contextmanager
    def hook(self, name: str, profiled: AbstractContextManager[Any]) -> Iterator[Any]:
        """Context of a call of a user's hook; at its end it is refused, or warned, by what it has iterated over."""
        walked: list[str] = []
        self._calls.append(walked)
        try:
            with profiled as action:
                yield action
        except BaseException as error:
            for what in walked:
                error.add_note(self._said(name, what))
            raise
        finally:
            self._calls.pop()
        for what in walked:
            if what.startswith(_PARAMETERS):
                raise StepError(self._said(name, what), breaks=10)
            if name not in self._told:
                self._told.add(name)
                rank_zero_warn(self._said(name, what))

    @contextmanager
    def _beside(self, profiled: AbstractContextManager[Any]) -> Iterator[Any]:
        with self.aside(), profiled as action:
            yield action

    @property
    def is_in_hook(self) -> bool:
        """Whether a hook of the user's runs, and has called nothing else."""
        return self._call is not None

    @property
    def _call(self) -> list[str] | None:
        return self._calls[-1] if self._calls else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of code that is right with this stage's parameters only."""
        before, self._is_after_run = self._is_after_run, False
        self._calls.append(None)
        try:
            yield
        finally:
            self._calls.pop()
            self._is_after_run = before

    def walked(self, what: str) -> None:
        """A hook, or code after a run, iterates over something of which this rank has a part."""
        if self._is_after_run:
            rank_zero_warn(self._said("Code after a run", what))
        elif self._call is not None and what not in self._call[-1:]:
            self._call.append(what)

    def take_whole(self) -> None:
        """What the hook has iterated over last goes to a function that sees all ranks'."""
        if self._call:
            self._call.pop()

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


def _is_users(trainer: pl.Trainer, action: str) -> bool:
    """Whether an action of the profiler is a hook that is user code."""
    holder, _, name = action.rpartition(".")
    kind, _, key = holder.partition("]")
    if kind == "[LightningModule":
        return is_overridden(trainer.lightning_module, name, pl.LightningModule)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return kind == "[Callback" and any(is_users(each, name) for each in callbacks if each.state_key == key)


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
