"""Steps an optimizer like a given one on a small parameter or two, to find out how it would step the real ones.

A group's settings may choose other code (``use_muon=True``), so groups of each kind are tried.

torch's DTensors don't suffice for some, such as Adafactor and Prodigy. Their code runs as it is, operation by
operation. One that DTensors don't support is computed from whole tensors, which each rank gathers for it
(``as_tensors.all_operations``). A plain tensor counts as one that all ranks hold whole, which is so of state that is
made by a parameter's shape and computed from whole tensors (Adafactor's means over rows and columns), and not of what a
rank makes of its own part; and what is written to a view of a gathered tensor is lost. So an optimizer has to step
sharded parameters as it steps plain ones.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

from lightning_shard.checkpoint.optimizers.named import NAMES_OF_NOTHING_ELSE
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.fsdp.as_tensors import all_operations
from lightning_shard.torch_private import calls_replaced

T = TypeVar("T")
Make = Callable[[list[nn.Parameter]], Any]
"""Makes an optimizer like a given one that steps these parameters as one of its groups."""
_STEPS = 3
SMALL = (5, 4)
_OF_RATES = {"lr", "initial_lr"}
"""Settings of groups that choose no other code."""


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def kinds_of_groups(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The indices of groups, by kind; those of a kind have the same settings, but for their learning rates."""
    kinds: dict[str, list[int]] = {}
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: group[key] for key in sorted(group) if key not in NAMES_OF_NOTHING_ELSE | _OF_RATES}
        kinds.setdefault(repr(settings), []).append(index)
    return [*kinds.values()]


def tried(optimizer: torch.optim.Optimizer, group: int, trial: Callable[[Make], T]) -> T | None:
    """What a trial returns that is given a function to make optimizers like this one, of the group of this index.

    An optimizer that can't be created again from its settings, such as one around another optimizer, is copied. If that
    fails too, or if random numbers are drawn, nothing is known, and the result is ``None``.
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    for make in (_anew, _as_a_copy):
        with torch.random.fork_rng(devices), torch.enable_grad():
            before = _generators(devices)
            try:
                result = trial(partial(make, optimizer, group))
            except Exception:
                continue
            return result if all(map(torch.equal, before, _generators(devices))) else None
    return None


def _generators(devices: Sequence[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]


def initial(shape: Sequence[int] = SMALL) -> Tensor:
    """The first of the small parameters before it is stepped."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def stepped(
    make: Make,
    scales: Sequence[float] = (1.0,),
    place: Callable[[Tensor], Tensor] = Tensor.clone,
    shape: Sequence[int] = SMALL,
) -> Tensor:
    """The first of some small parameters after a few steps, with gradients of these scales.

    Args:
        place: What is made of each parameter's values and gradient before they are used, such as a DTensor.
    """
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(place(torch.randn(shape, generator=generator))) for _ in scales]
    made = make(parameters)
    generator.manual_seed(1)
    for whole in torch.randn(_STEPS, *shape, generator=generator):
        gradient = place(whole)

        def closure(gradient: Tensor = gradient) -> Tensor:
            # gradients depend on the parameters' values, which reveals optimizers that perturb them by a common norm
            for parameter, scale in zip(parameters, scales):
                parameter.grad = (gradient + parameter.detach().square()) * scale
            return torch.zeros(())

        closure()
        made.step(*([closure] if "closure" in inspect.signature(made.step).parameters else []))
    return parameters[0].detach()


def _anew(optimizer: torch.optim.Optimizer, group: int, parameters: list[nn.Parameter]) -> Any:
    known = inspect.signature(type(optimizer)).parameters
    settings = {name: copy.deepcopy(value) for name, value in optimizer.defaults.items() if name in known}
    held = optimizer.param_groups[group].items()
    own = {name: copy.deepcopy(value) for name, value in held if name not in NAMES_OF_NOTHING_ELSE | _OF_RATES}
    return type(optimizer)([{**own, "params": parameters, "lr": 0.1}], **settings)


def _as_a_copy(optimizer: torch.optim.Optimizer, group: int, parameters: list[nn.Parameter]) -> Any:
    """A copy of an optimizer and of those inside it; their groups of this index get these parameters, others none.

    Raises:
        TypeError: It holds other tensors.
    """
    inside = [value for value in vars(optimizer).values() if isinstance(value, torch.optim.Optimizer)]
    memo: dict[int, Any] = {}
    for each in (optimizer, *inside):
        memo[id(each)] = type(each).__new__(type(each))
        memo[id(each.state)] = defaultdict(dict)
        memo.update((id(held["params"]), parameters if i == group else []) for i, held in enumerate(each.param_groups))
    for each in (optimizer, *inside):
        # a scheduler replaces `step` by a function that steps the original optimizer
        held = {name: value for name, value in vars(each).items() if not inspect.isroutine(value)}
        with _WithoutTensors():
            memo[id(each)].__dict__.update(copy.deepcopy(held, memo))
        for made in memo[id(each)].param_groups:
            made["lr"] = 0.1
    return memo[id(optimizer)]


class _WithoutTensors(TorchFunctionMode):
    """Refuses copies of tensors inside: they may be as large as the model."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, Tensor.clone):
            raise TypeError("a copy of a tensor")
        return func(*args, **(kwargs or {}))


_SCALES = (1.0, 1000.0)
_OF_RANKS = "torch.distributed.optim."
"""Whose ``ZeroRedundancyOptimizer`` can't be tried, since it holds all parameters in attributes, too."""


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a parameter's updates depend on other parameters, tested on two small ones.

    torch's own optimizers don't. Where nothing is known (``trials.tried``) the answer is ``False``.
    """
    if is_of_torch(optimizer):
        return False

    def differs(make: Make) -> bool:
        beside_another, alone = (stepped(make, scales) for scales in (_SCALES, _SCALES[:1]))
        return not torch.allclose(beside_another, alone, rtol=1e-4, atol=1e-7, equal_nan=True)

    return any(tried(optimizer, group, differs) for group, *_ in kinds_of_groups(optimizer))


def collective_of(optimizer: torch.optim.Optimizer) -> str | None:
    """The first collective that its step calls, if it calls one: as where ranks take turns in computing updates."""
    if is_of_torch(optimizer):
        return None
    if type(optimizer).__module__.startswith(_OF_RANKS):
        return "broadcast"
    called: list[str] = []

    def ends_trial(name: str, _: Callable[..., Any]) -> Callable[..., NoReturn]:
        def end(*_: Any, **__: Any) -> NoReturn:
            called.append(name)
            raise _Called

        return end

    with calls_replaced(by=ends_trial):
        for group, *_ in kinds_of_groups(optimizer):
            tried(optimizer, group, stepped)
    return called[0] if called else None


class _Called(Exception):
    """Ends a trial before a collective: ranks need not make it together."""


_TOLERANCE = 0.05
"""Of a whole update: an optimizer may multiply in 16 bits. What is computed from one rank's part differs by more."""
_SIZES = (131, 130, 2, 2, 2)
"""The first sizes of a tried parameter. Ranks share it unevenly, and optimizers factor matrices of sizes above 128."""
_TRIED_OF_TORCH = (torch.optim.Adafactor, torch.optim.Rprop)

_running = ExitStack()


def allow(optimizer: torch.optim.Optimizer) -> None:
    """Compute from whole tensors what an optimizer needs so; collective over a stage's ranks.

    Raises:
        ConfigurationError: It steps sharded parameters otherwise than whole ones.
    """
    if is_of_torch(optimizer) and not isinstance(optimizer, _TRIED_OF_TORCH):
        return
    trials = [*_trials(optimizer)]
    alike = [is_alike() for is_alike in trials]
    if all(alike):
        return
    with all_operations():
        then_alike = [is_alike() for is_alike in trials]
    if all(then_alike):
        optimizer.register_step_pre_hook(_begin)
        optimizer.register_step_post_hook(lambda *_: end())
    elif False in (*alike, *then_alike):
        raise ConfigurationError(
            f"{type(optimizer).__name__} steps a parameter of which each rank has a part otherwise than a whole"
            " one: it computes something from this rank's part that needs all of it, as by to_local(). Compute"
            " with parameters and gradients as they are given, or use one process, or another strategy.",
            breaks=11,
        )


def end() -> None:
    """A step has ended, or failed."""
    _running.close()


def _begin(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook: of the step's arguments, the closure is the user's code."""

    def outside(closure: Callable[[], Any]) -> Any:
        end()
        result = closure()
        _running.enter_context(all_operations())
        return result

    _running.enter_context(all_operations())
    given = (partial(outside, each) if callable(each) else each for each in args)
    named = {key: partial(outside, each) if callable(each) else each for key, each in kwargs.items()}
    return tuple(given), named


def _trials(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], bool | None]]:
    """One for each kind of group, number of dims, and way in which ranks share a parameter.

    Each returns whether the optimizer steps a parameter that ranks share as a whole one; ``None`` if it fails. Those of
    which nothing is known are left out.
    """
    for groups in kinds_of_groups(optimizer):
        parameters = chain.from_iterable(optimizer.param_groups[group]["params"] for group in groups)
        shared = (p for p in parameters if isinstance(p, DTensor) and p.ndim)
        for like in {(p.ndim, p.device_mesh, p.placements): p for p in shared}.values():
            end = _end(optimizer, groups[0], partial(Tensor.to, device=like.device), like.ndim)
            if end is not None and end.isfinite().all():
                yield partial(_is_stepped_alike, optimizer, groups[0], like, end)


def _is_stepped_alike(optimizer: torch.optim.Optimizer, group: int, like: DTensor, end: Tensor) -> bool | None:
    shared = _end(optimizer, group, partial(_placed, like=like), like.ndim)
    if shared is None:
        return None
    update = (end - initial(end.shape).to(end)).abs().max()
    return bool((shared - end).abs().max() <= _TOLERANCE * update)


def _end(optimizer: torch.optim.Optimizer, group: int, place: Callable[[Tensor], Tensor], dims: int) -> Tensor | None:
    end = tried(optimizer, group, lambda make: stepped(make, place=place, shape=_SIZES[:dims]))
    return end.full_tensor() if isinstance(end, DTensor) else end


def _placed(whole: Tensor, like: DTensor) -> Tensor:
    """A parameter, of which each rank takes its part as it has one of ``like``."""
    dims = (getattr(each, "dim", None) for each in like.placements)
    placements = [Replicate() if dim is None else Shard(min(dim, whole.ndim - 1)) for dim in dims]
    return distribute_tensor(whole.to(like.device), like.device_mesh, placements, src_data_rank=None)
