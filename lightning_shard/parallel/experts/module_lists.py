"""Expert parallelism for experts that are modules in a list, which the user's code calls one by one.

Which experts a rank calls depends on its tokens, so a collective in each call could hang. Instead, the forward of the
code around such a list (its *owner*) runs twice, with one dispatch between (``docs/decisions/experts.md``). The second
run draws the same random numbers, the experts' own after these, and must make the same calls: rows that depend on
another expert's results were NaN in the first run, and are refused. The first run's output is dropped, but its rows are
the ones that are dispatched, so gradients flow once through each computation: those of routing through the first run,
those of combining through the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from lightning_shard.errors import PlanError, StepError
from lightning_shard.parallel.collectives import Exchange
from lightning_shard.parallel.containers import has_forward, slots_of
from lightning_shard.parallel.experts.check_rows import RowCheck
from lightning_shard.parallel.experts.list_weights import ExpertWeights, Gathered
from lightning_shard.parallel.tensor.local_modules import split_parameter
from lightning_shard.user_hooks import has_hooks_beside_plans

RestoreAndReplay = tuple[Callable[[], None], Callable[[], AbstractContextManager[None]]]
TwoRuns = Callable[[nn.Module], AbstractContextManager[RestoreAndReplay]]
"""Makes a context around two runs of a module's code. Its value is a function that restores the state that the first
run has changed, and a context for the second run: inside, random generators have the state of the beginning, and after
it the state of before it."""

_MOST_DIMS = 4
_REMEDY = "call each as experts[i](rows), with rows of the routing only, or use expert_parallel_size=1"


def is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def experts_of(module: nn.Module) -> list[nn.Module]:
    """The modules of a list that have parameters; others, such as a dropout, aren't experts."""
    return [child for child in module.children() if any(True for _ in child.parameters())]


def unfit_list(root: nn.Module, name: str, tied: set[str]) -> str | None:
    """Why a list of experts can't be distributed; ``None`` if it can."""
    module = root.get_submodule(name)
    experts = experts_of(module)
    if not experts:
        return "has no experts with parameters"
    if len({id(expert) for expert in module._modules.values()}) < len(module._modules):
        return "holds one expert several times"
    owner_name, _ = _owner(root, name)
    owner = root.get_submodule(owner_name)
    if not owner_name or not has_forward(owner):
        return f"is held by a {type(owner).__name__} whose forward doesn't call them"
    if "forward" in vars(owner) or any("forward" in vars(part) for part in module.modules()):
        return "has a forward that was put on an object"
    first = _shapes(experts[0])
    for place, expert in enumerate(experts):
        if type(expert) is not type(experts[0]) or _shapes(expert) != first:
            return f"has experts that aren't alike (0 and {place})"
    if len({dtype for _, dtype, _ in first.values()}) > 1:
        return "has experts with parameters of several dtypes"
    if any(not shape for shape, _, _ in first.values()):
        return "has experts with parameters without dimensions"
    buffers = [key for key, _ in module.named_buffers()]
    if buffers:
        return f"has experts with buffers ({buffers[0]})"
    if tied:
        return f"shares {', '.join(sorted(tied))} with another module"
    return None


def _shapes(expert: nn.Module) -> dict[str, Any]:
    return {key: (p.shape, p.dtype, p.requires_grad) for key, p in expert.named_parameters()}


def _owner(root: nn.Module, name: str) -> tuple[str, str]:
    """Name of the owner, whose forward calls the experts, and the list's name in it.

    A list with a forward is its own owner, with ``""`` as its name in it.
    """
    if has_forward(root.get_submodule(name)):
        return name, ""
    owner, _, key = name.rpartition(".")
    return owner, key


def distribute_list(
    root: nn.Module,
    name: str,
    mesh: DeviceMesh,
    data_mesh: DeviceMesh,
    two_runs: TwoRuns,
) -> set[nn.Parameter]:
    """Distribute a list's experts over the ranks of ``mesh``, in place: parameters become DTensors on ``data_mesh``.

    Args:
        root: The model, or this stage of it.
        name: Name of the list in ``root``; :func:`unfit_list` returned ``None`` for it.
        mesh: The expert axis: adjacent data ranks.
        data_mesh: One axis to shard over, or two: replicate over the first, shard over the second.
        two_runs: Context for the owner's two runs.

    Returns:
        The experts' parameters.

    Raises:
        PlanError: The owner's or an expert's forward is wrapped already, as by activation checkpointing of a block.
    """
    owner_name, key = _owner(root, name)
    owner = root.get_submodule(owner_name)
    experts = experts_of(root.get_submodule(name))
    if any("forward" in vars(module) for module in (owner, *experts)):
        raise PlanError(
            f"{owner_name}, a {type(owner).__name__}, runs the experts of {name}, and it or they are wrapped already:"
            " by activation_checkpointing, which takes them for blocks, or since it holds two such lists. Put one"
            " router and its experts into a module inside of the block, or leave that out."
        )
    parameters = [(expert, *slot) for expert in experts for slot in slots_of(expert)]
    replicate = [Replicate()] * (data_mesh.ndim - 1)
    for _, module, own in parameters:
        shape = module.get_parameter(own).shape
        dim = next((dim for dim, size in enumerate(shape) if size % data_mesh.size(-1) == 0), 0)
        split_parameter(module, own, data_mesh, [*replicate, Shard(dim)])
    for place, expert in enumerate(experts):
        expert.forward = MethodType(_Expert(place), expert)  # type: ignore[assignment]
    # methods, so that deepcopy binds them to the copied modules
    dealt = Owner(name, key, mesh, data_mesh, two_runs)
    owner.forward = MethodType(dealt, owner)  # type: ignore[assignment]
    return {module.get_parameter(own) for _, module, own in parameters}


class _Expert:
    """The forward of a distributed expert: passes the call to the run of its owner's forward."""

    def __init__(self, place: int) -> None:
        self._place = place

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = _RUN.get()
        if run is None or self._place >= len(run.experts) or run.experts[self._place] is not module:
            raise StepError(
                f"A {type(module).__name__} of a list of experts that are dealt to ranks was called outside of the"
                f" module that holds the list: {_REMEDY}, in that module's forward."
            )
        return run.call(self._place, args, kwargs)


class _Run:
    """The calls of experts in an owner's forward: recorded in the first run, answered in the second.

    Args:
        name: Name of the list, for errors.
        experts: All experts of the list.
        device: Type of the device that they compute on.
        shape_of: Returns the shape of one row of an expert's result, and its dtype, for given rows.
    """

    def __init__(
        self,
        name: str,
        experts: Sequence[nn.Module],
        device: str,
        shape_of: Callable[[Tensor], tuple[torch.Size, torch.dtype]],
    ) -> None:
        self.experts = experts
        self.calls: list[tuple[int, Tensor]] = []
        self._name, self._device = name, device
        self._shape_of = shape_of
        self._results: list[Tensor] | None = None
        self._same: list[Tensor] = []
        self._autocast = _autocast(device)

    @contextmanager
    def active(self) -> Iterator[None]:
        token = _RUN.set(self)
        try:
            yield
        finally:
            _RUN.reset(token)

    def call(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not 2 <= args[0].ndim <= _MOST_DIMS:
            given = [tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__ for v in (*args, *kwargs.values())]
            raise StepError(
                f"An expert of {self._name} was called with {given}, and not with rows of one tensor, so they can't be"
                f" dealt to ranks: {_REMEDY}."
            )
        rows: Tensor = args[0]
        if _autocast(self._device) != self._autocast:
            raise StepError(
                f"An expert of {self._name} is called inside of a torch.autocast in the module around the list, which"
                " wouldn't be on where it computes, since experts are dealt to ranks: put it into the experts' forward,"
                " or use expert_parallel_size=1."
            )
        if self._results is None:
            shape, dtype = self._shape_of(rows)
            self.calls.append((place, rows))
            return rows.new_full((len(rows), *shape), torch.nan, dtype=dtype)
        turn = len(self._same)
        if turn == len(self.calls) or self.calls[turn][0] != place or self.calls[turn][1].shape != rows.shape:
            raise self._depends()
        before, now = self.calls[turn][1].detach(), rows.detach()
        self._same.append(((before == now) | now.isnan()).all())
        return self._results[turn]

    def begin_second_run(self, results: list[Tensor]) -> None:
        """Begin the second run, in which the calls return ``results`` in their order."""
        self._results = results

    def check(self) -> None:
        """Check that the second run called the experts with the same rows as the first."""
        if len(self._same) != len(self.calls) or (self._same and not bool(torch.stack(self._same).all())):
            raise self._depends()

    def _depends(self) -> StepError:
        return StepError(
            f"The rows that an expert of {self._name} is called with depend on another expert's results, or aren't the"
            " same when the code around the list runs a second time, so that they can't be dealt to ranks by one"
            f" exchange: {_REMEDY}."
        )


_RUN: ContextVar[_Run | None] = ContextVar("the run of an owner's forward that experts are called in", default=None)


class Owner:
    """The new forward of an owner: its own forward twice, with the dispatch between.

    Args:
        name: Name of the list, for errors.
        key: The list's name in the owner; ``""`` if it is the owner itself.
        mesh: The expert axis.
        data_mesh: As for :func:`distribute_list`.
        two_runs: Context for the two runs.
    """

    def __init__(self, name: str, key: str, mesh: DeviceMesh, data_mesh: DeviceMesh, two_runs: TwoRuns) -> None:
        self._name, self._key = name, key
        self._mesh, self._data_mesh = mesh, data_mesh
        self._two_runs = two_runs
        self._shapes: dict[Any, tuple[torch.Size, torch.dtype]] = {}
        self._check_rows = RowCheck(name)

    def __call__(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        experts = experts_of(owner.get_submodule(self._key))
        self._refuse(owner, (*args, *kwargs.values()))
        called = [False] * len(experts)
        weights = ExpertWeights(experts, self._mesh.size(), self._data_mesh)
        full = Gathered.apply(weights, called, *weights.shards())
        own_forward: Any = type(owner).forward
        tensors = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
        device = self._mesh.device_type
        versions = [tensor._version for tensor in tensors]

        def shape_of(rows: Tensor) -> tuple[torch.Size, torch.dtype]:
            kind = rows.shape[1:], rows.dtype, _autocast(device)
            if kind not in self._shapes:
                with torch.no_grad(), same_draws():
                    result = self._compute(weights, full, 0, rows.new_zeros(1, *rows.shape[1:]))
                self._shapes[kind] = result.shape[1:], result.dtype
            return self._shapes[kind]

        run = _Run(self._name, experts, device, shape_of)
        with self._two_runs(owner) as (restore, same_draws):
            with run.active():
                own_forward(owner, *args, **kwargs)
            restore()
            if versions != [tensor._version for tensor in tensors]:
                raise StepError(
                    f"The module around {self._name} changes its input in place, and has to run twice where experts"
                    " are dealt to ranks: have it make a new tensor, or use expert_parallel_size=1."
                )
            run.begin_second_run(self._dispatch(run.calls, weights, full, called))
            with run.active(), same_draws():
                result = own_forward(owner, *args, **kwargs)
        run.check()
        return result

    def _refuse(self, owner: nn.Module, arguments: tuple[Any, ...]) -> None:
        """Refuse a user's hooks, which would see both runs, and arguments that the first run may change."""
        for name, part in owner.named_modules():
            if name and has_hooks_beside_plans(part):
                raise StepError(
                    f"{name} in the module around {self._name} has hooks, which would run twice where experts are dealt"
                    " to ranks: put them on the module around it, have expert_parallel_plan name only experts, or use"
                    " expert_parallel_size=1."
                )
        for value in _flat(arguments):
            if not isinstance(value, (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))):
                raise StepError(
                    f"The module around {self._name} is given a {type(value).__name__}, which it may change, and has to"
                    " run twice where experts are dealt to ranks: give it tensors and numbers, or use"
                    " expert_parallel_size=1."
                )

    def _dispatch(
        self, calls: Sequence[tuple[int, Tensor]], weights: ExpertWeights, full: Sequence[Tensor], called: list[bool]
    ) -> list[Tensor]:
        """The results of the calls, in their order; sets ``called[i]`` if any rank has called expert ``i``."""
        counts, coming = self._agree(calls, called, full[0].device)
        if not calls:
            return []
        order = sorted(range(len(calls)), key=lambda turn: calls[turn][0])
        group, here = self._mesh.get_group(), weights.here
        send_counts, receive_counts = [sum(row) for row in counts], [sum(row) for row in coming]
        (rows,) = Exchange.apply(
            group, send_counts, receive_counts, 1, 1, torch.cat([calls[turn][1] for turn in order])
        )
        pieces = rows.split([count for row in coming for count in row])
        by_expert = []
        for place in range(here):
            came = torch.cat(pieces[place::here])
            self._check_rows(partial(self._compute, weights, full, place), weights.own[place], came)
            # without rows, compute one row of zeros and drop the result: every rank's backward must run the same
            # collectives, and every parameter must get a gradient
            results = self._compute(weights, full, place, came if len(came) else rows[:0].sum(0, keepdim=True))
            if len(results) != max(1, len(came)):
                raise StepError(
                    f"An expert of {self._name} returned {tuple(results.shape)} for {len(came)} rows, so they can't be"
                    f" dealt to ranks: {_REMEDY}."
                )
            by_expert.append(results[: len(came)].split([row[place] for row in coming]))
        back = torch.cat([results[source] for source in range(len(coming)) for results in by_expert])
        (returned,) = Exchange.apply(group, receive_counts, send_counts, 1, 1, back)
        # an unsafe split: the owner may change each part in place, which autograd refuses for views of a split
        parts = returned.unsafe_split_with_sizes([len(calls[turn][1]) for turn in order])
        return [part for _, part in sorted(zip(order, parts), key=lambda pair: pair[0])]

    def _agree(
        self, calls: Sequence[tuple[int, Tensor]], called: list[bool], device: torch.device
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The numbers of rows to send and to receive, each by rank and expert: ``[ranks][experts per rank]``.

        Also sets ``called``, and checks that rows have one dtype on each rank, and one shape on all ranks.
        """
        ranks, count = self._mesh.size(), len(called)
        here = count // ranks
        given = [0] * count
        kinds = [(*rows.shape[1:], str(rows.dtype)) for _, rows in calls]
        for place, rows in calls:
            given[place] += len(rows)
            called[place] = True
        sizes = [*calls[0][1].shape[1:]] if calls else []
        kind = [len(sizes), *sizes, *[0] * (_MOST_DIMS - len(sizes)), int(len(set(kinds)) > 1)]
        agreed = torch.tensor([*called, *kind, *(-number for number in kind)], device=device)
        for axis in range(self._data_mesh.ndim):
            dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self._data_mesh.get_group(axis))
        sent = torch.tensor(given, device=device)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self._mesh.get_group())
        # the only wait for the device
        answer = torch.cat([agreed, coming]).tolist()
        called[:] = map(bool, answer[:count])
        largest, smallest = answer[count : count + len(kind)], answer[count + len(kind) : -count]
        if largest != [-number for number in smallest] or largest[-1]:
            raise StepError(
                f"Experts of {self._name} are called with rows of different shapes or dtypes, or on some ranks not at"
                f" all (here {sorted(set(map(str, kinds)))}), so they can't be dealt to ranks: give each rank tokens,"
                " of one width, or use expert_parallel_size=1."
            )
        rows_of = [answer[-count:][rank * here : (rank + 1) * here] for rank in range(ranks)]
        return [given[rank * here : (rank + 1) * here] for rank in range(ranks)], rows_of

    def _compute(self, weights: ExpertWeights, full: Sequence[Tensor], place: int, rows: Tensor) -> Tensor:
        """Run one of this rank's experts, by its own code on its gathered parameters."""
        expert = weights.own[place]
        with weights.in_place(place, full):
            result = type(expert).forward(expert, rows)
        if not isinstance(result, Tensor) or not result.ndim:
            raise StepError(
                f"An expert of {self._name} returned a {type(result).__name__}, and not one tensor of rows, so they"
                f" can't be dealt to ranks: {_REMEDY}."
            )
        return result


def _autocast(device: str) -> torch.dtype | None:
    """The dtype of autocast; ``None`` if it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _flat(values: tuple[Any, ...]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value
