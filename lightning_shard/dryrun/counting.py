"""A module's step on fake tensors, watched part by part.

Blocks that are alike (of one class, with equal settings and parameters' shapes) and called on tensors alike are run
twice; where both runs cost the same, those after stand for themselves by tensors of the right shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_shard.dryrun.counts import (
    AROUND,
    EXPERT,
    LOSS,
    TENSOR,
    Cost,
    Counts,
    ParameterCount,
    PartCount,
    Work,
)
from lightning_shard.dryrun.experts import DealtEvenly, ListDealtEvenly
from lightning_shard.dryrun.fake import fake_ranks, fake_tensors, make_fake
from lightning_shard.dryrun.kernels import AsOnDevices
from lightning_shard.dryrun.ledger import Ledger
from lightning_shard.dryrun.ledger import Work as Entered
from lightning_shard.dryrun.likes import Likes
from lightning_shard.dryrun.model import Model, fake_trainer
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.cast import cast_units, not_cast
from lightning_shard.parallel.containers import with_forward
from lightning_shard.parallel.expert import deal_stack, resolve_experts
from lightning_shard.parallel.expert_lists import RunsAgain, deal_list, is_list
from lightning_shard.parallel.recompute import leave_out_caches, recompute
from lightning_shard.parallel.tensor import apply_tensor_parallel, resolve_plan
from lightning_shard.pipeline import tree
from lightning_shard.pipeline.packed import nothing_packed
from lightning_shard.plugin.example import part_of

Way = Literal["plain", "recomputed", "selective"]
WAYS: tuple[Way, ...] = ("plain", "recomputed", "selective")
Key = tuple[str, str | int]
"""``"forward"`` or ``"backward"``, and a block's place or a part's name."""

_RING: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather_into_tensor": lambda p: p - 1,
    "reduce_scatter_tensor": lambda p: (p - 1) / p,
    "all_to_all_single": lambda p: (p - 1) / p,
}
"""What a tensor-parallel rank of ``p`` sends, in units of what it gives to a collective of DTensor's."""
_EXCHANGE = "alltoall_base_"
"""What experts' ranks send each other by."""


def count(model: Model, *, tensor_parallel_size: int = 1, expert_parallel_size: int = 1, samples: int = 1) -> Counts:
    """Count one microbatch.

    Args:
        model: The module and its batch.
        samples: Of the microbatch: so many of the batch's are taken.

    Raises:
        ConfigurationError: The module can't be cut so.
    """
    batch = _first(model.batch, samples)
    with fake_ranks(max(tensor_parallel_size, expert_parallel_size)):
        module = model.copy()
        experts = resolve_experts(module, model.settings.expert_parallel_plan, expert_parallel_size)
        parameters = _lay_out(module, model, tensor_parallel_size, expert_parallel_size, experts)
        blocks = model.blocks.names if model.blocks else ()
        outcomes, reason = _outcomes(module, model, batch, WAYS if blocks else WAYS[:1], experts)
    around = [name for name, _ in model.blocks.parts] if model.blocks else []

    def part(name: str, place: int | None = None) -> PartCount:
        key = name if place is None else place
        costs = {
            way: outcome.cost(key, tensor_parallel_size, expert_parallel_size) for way, outcome in outcomes.items()
        }
        plain = costs.get("plain", Cost(*_estimated(model, name)))
        output = outcomes["plain"].outputs.get(key, 0) if "plain" in outcomes else 0
        others = (costs.get(way, plain) for way in WAYS[1:])
        return PartCount(name, parameters.get(name, ()), output, plain, *others)

    integers = [t.numel() for t in tree.tensors(batch) if not t.is_floating_point() and t.ndim > 1]
    return Counts(
        blocks=tuple(part(name, place) for place, name in enumerate(blocks)),
        parts=tuple((place, part(name)) for name, place in (model.blocks.parts if model.blocks else ())),
        everywhere=(part(AROUND), *(part(name) for name in parameters if name not in {*blocks, *around, AROUND, LOSS})),
        loss=part(LOSS),
        samples=samples,
        tokens=max(integers, default=samples),
        batch_bytes=sum(t.numel() * t.element_size() for t in tree.tensors(batch)),
        tensor_parallel_size=tensor_parallel_size,
        expert_parallel_size=expert_parallel_size,
        counted=not reason,
        reason=reason,
        assumed=_assumptions(model, [module.get_submodule(name) for name in experts], outcomes.values()),
    )


def _first(batch: Any, samples: int) -> Any:
    size = tree.batch_size(batch)
    if size % samples:
        raise ConfigurationError(
            f"A batch of {size} samples has no microbatches of {samples}: use a batch size that is a multiple of the"
            " microbatches."
        )
    return tree.split(batch, size // samples)[0]


def _assumptions(model: Model, dealt: Sequence[nn.Module], outcomes: Iterable[_Outcome]) -> tuple[str, ...]:
    found = []
    if dealt:
        each = ", and on each over its experts" if any(map(is_list, dealt)) else ""
        found.append(f"tokens are spread evenly over the expert-parallel ranks{each}")
    if model.device_type != "cpu":
        found.append("attention and dropout are fused kernels, as torch has on GPUs")
    if any(outcome.takes_unpacked for outcome in outcomes):
        found.append("a row that comes without a mask and positions is one sequence, so attention needs no mask")
    return tuple(found)


# -- parameters, as a layout cuts them


def _lay_out(
    module: pl.LightningModule, model: Model, tensor: int, expert: int, experts: Sequence[str]
) -> dict[str, tuple[ParameterCount, ...]]:
    """Cut the module's tensors over the tensor- and expert-parallel axes, in place; says who holds which parameters.

    Args:
        experts: Modules to be dealt.
    """
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    styles = resolve_plan(module, model.settings.tensor_parallel_plan, tensor, without=experts) if tensor > 1 else {}
    blocks = list(dict.fromkeys(model.blocks.names)) if model.blocks else []
    gathered: dict[int, torch.dtype] = {}
    if model.settings.gathered_dtype is not None:
        for unit in cast_units(module, [u for name in blocks for u in with_forward(module.get_submodule(name))]):
            left = not_cast(unit)
            of_unit = (p for p in unit.parameters() if p.is_floating_point() and p not in left)
            gathered.update((id(p), model.settings.gathered_dtype) for p in of_unit)
    names = {id(p): name for name, p in module.named_parameters()}
    dealt = tuple(f"{name}." for name in experts)  # these stay as they are
    in_half = {names[key]: dtype for key, dtype in gathered.items() if not names[key].startswith(dealt)}
    lists = {name for name in experts if is_list(module.get_submodule(name))}
    if tensor > 1:
        apply_tensor_parallel(module, init_device_mesh("cpu", (tensor,), mesh_dim_names=(TENSOR,)), styles)
    if expert > 1:
        mesh = init_device_mesh("cpu", (expert,), mesh_dim_names=(EXPERT,))
        for name in experts:
            if name in lists:
                deal_list(module, name, mesh, mesh, _runs_again, ListDealtEvenly)
            else:
                deal_stack(module, name, mesh, DealtEvenly)

    def counted(name: str, parameter: Tensor) -> ParameterCount:
        is_listed = name.startswith(tuple(f"{each}." for each in lists))
        local = parameter.to_local() if isinstance(parameter, DTensor) and not is_listed else parameter
        is_expert = name.startswith(dealt) and not is_listed
        return ParameterCount(
            name,
            shapes[name],
            tuple(local.shape),
            parameter.dtype,
            parameter.requires_grad,
            is_expert,
            in_half.get(name),
            is_listed,
        )

    first_names = {id(p): name for name, p in module.named_parameters()}
    holders = [*blocks, *(name for name, _ in model.blocks.parts)] if model.blocks else []
    found: dict[str, dict[str, ParameterCount]] = {holder: {} for holder in holders}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holder = next((h for h in holders if name == h or name.startswith(f"{h}.")), None)
        if holder is None:
            holder = name.partition(".")[0] if model.blocks and not name.startswith(model.blocks.network) else AROUND
        first = first_names[id(parameter)]
        found.setdefault(holder, {})[first] = counted(first, parameter)
    for name, dtype in in_half.items():
        owner, _, key = name.rpartition(".")
        whole = module.get_parameter(name)
        module.get_submodule(owner)._parameters[key] = nn.Parameter(whole.detach().to(dtype), whole.requires_grad)
    return {holder: tuple(held.values()) for holder, held in found.items()}


def _runs_again(_owner: nn.Module) -> AbstractContextManager[RunsAgain]:
    """What a second run changes is of no use to a count."""
    return nullcontext((lambda: None, nullcontext))


def _estimated(model: Model, name: str) -> tuple[Work, Work]:
    """Operations of a part that wasn't counted, from its parameters."""
    flops = model.estimated_flops.get(name, 0)
    return Work(flops), Work(2 * flops)


# -- a run


@dataclass
class _Outcome:
    """What one run's ledger says."""

    work: Mapping[Hashable, Entered]
    kept: Mapping[Hashable, int]
    growth: Mapping[Hashable, int]
    adding: Mapping[Hashable, int]
    left: Mapping[Hashable, int]
    outputs: dict[str | int, int]
    stands_for: dict[int, int]
    carried: Mapping[Hashable, int]
    of_gradients: Mapping[Hashable, int]
    experts_done: Mapping[Hashable, int]
    takes_unpacked: bool

    def cost(self, key: str | int, tensor: int, expert: int) -> Cost:
        if isinstance(key, int):
            key = self.stands_for.get(key, key)
        forward, backward = ("forward", key), ("backward", key)
        kept = self.kept.get(forward, 0)
        return Cost(
            _work(self.work.get(forward), tensor, expert),
            _work(self.work.get(backward), tensor, expert),
            kept,
            self.growth.get(forward, 0),
            self.growth.get(backward, 0),
            self.adding.get(backward, 0),
            max(0, kept - self.left.get(forward, kept)),
            self.carried.get(forward, 0),
            self.of_gradients.get(backward, 0),
            self.experts_done.get(backward, 0),
        )


def _work(entered: Entered | None, tensor: int, expert: int) -> Work:
    if entered is None:
        return Work()
    along = {
        TENSOR: sum(_RING[name](tensor) * nbytes for name, nbytes in entered.sent.items() if name in _RING),
        EXPERT: (expert - 1) / expert * entered.sent.get(_EXCHANGE, 0),
    }
    calls = {
        TENSOR: sum(number for name, number in entered.calls.items() if name in _RING),
        EXPERT: entered.calls.get(_EXCHANGE, 0),
    }
    return Work(
        entered.flops,
        entered.moved,
        entered.beside,
        {axis: round(nbytes) for axis, nbytes in along.items() if nbytes},
        {axis: number for axis, number in calls.items() if along[axis]},
    )


def _outcomes(
    module: pl.LightningModule, model: Model, batch: Any, ways: Sequence[Way], experts: Sequence[str]
) -> tuple[dict[Way, _Outcome], str]:
    """A run each, and why there is none.

    Args:
        experts: Modules that are dealt to ranks.
    """
    outcomes: dict[Way, _Outcome] = {}
    with fake_tensors():
        make_fake(module)
        has_dtensors = any(isinstance(parameter, DTensor) for parameter in module.parameters())
        for way in ways:
            try:
                if has_dtensors:
                    _get_to_know(module, model, batch, way, adds=not outcomes)
                outcomes[way] = _outcome(module, model, batch, way, experts)
            except Exception as error:  # of the user's code, and of torch's in it
                return {}, f"{type(error).__name__}: {error}".partition("\n")[0]
    return outcomes, ""


def _get_to_know(module: pl.LightningModule, model: Model, batch: Any, way: Way, *, adds: bool) -> None:
    """Run on DTensors without counting: an operation's first call finds out its result's shape by another operation.

    Args:
        adds: Whether to run twice, so that gradients are added to the first run's: alike in all ways.
    """
    for _ in range(1 + adds):
        _Watched(module, model).run(batch, way)


def _outcome(module: pl.LightningModule, model: Model, batch: Any, way: Way, experts: Sequence[str]) -> _Outcome:
    for parameter in module.parameters():
        parameter.grad = None
    watched = _Watched(module, model, experts)
    outcome = watched.run(batch, way)
    stands_in = not watched.differ(outcome)
    if not stands_in:
        outcome = _Watched(module, model, experts, stands_in=False).run(batch, way)
    again = _Watched(module, model, experts, stands_in=stands_in).run(batch, way)
    return replace(outcome, adding=again.growth)


class _Watched:
    """The module with hooks around its blocks and parts, for one run.

    Args:
        experts: Modules in it that are dealt to ranks.
        stands_in: Whether blocks alike are run twice and no more.
    """

    def __init__(
        self, module: pl.LightningModule, model: Model, experts: Sequence[str] = (), *, stands_in: bool = True
    ) -> None:
        self.module = module
        self.model = model
        self.experts = experts
        self.ledger = Ledger()
        self.places: dict[str, list[int]] = {}
        for place, name in enumerate(model.blocks.names if model.blocks else ()):
            self.places.setdefault(name, []).append(place)
        self._calls: dict[str, int] = {}
        self._running: list[str | int] = []
        self._begun = 0
        self._likes = Likes() if stands_in else None
        self._outputs: dict[str | int, int] = {}
        self._left: dict[Hashable, int] = {}
        self._alive: dict[Hashable, dict[Hashable, int]] = {}
        self._experts_done: dict[Hashable, int] = {}

    def run(self, batch: Any, way: Way) -> _Outcome:
        """A forward and a backward of the user's step."""
        module, ledger = self.module, self.ledger
        module.train()
        with ExitStack() as stack:
            stack.enter_context(fake_trainer(module))
            for name in self.places:
                for called in with_forward(module.get_submodule(name)):
                    self._watch(stack, name, called, way)
            for name, _ in self.model.blocks.parts if self.model.blocks else ():
                part = part_of(module, name)
                if isinstance(part, nn.Module):
                    stack.callback(part.register_forward_pre_hook(partial(self._begin_part, name)).remove)
                    stack.callback(part.register_forward_hook(partial(self._end, name), always_call=True).remove)
            for name in self.experts:
                experts = module.get_submodule(name)
                if is_list(experts):  # gathered with nothing but themselves
                    continue
                stack.callback(experts.register_forward_pre_hook(self._begin_experts, with_kwargs=True).remove)
            for parameter in module.parameters():
                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._mark_gradient).remove)
            given = tree.map_leaves(_without_data, batch)
            asked = stack.enter_context(nothing_packed(given))
            if self.model.device_type != "cpu":
                stack.enter_context(AsOnDevices())
            stack.enter_context(ledger)
            ledger.around = ("forward", AROUND)
            self._begin_forward(AROUND if self.places else LOSS)
            with self.model.autocast():
                loss = self.model.loss_of(module, given)
            kept = dict(ledger.by_label())
            ledger.begin(("backward", LOSS))
            loss.backward()
        stands_for = self._likes.stands_for if self._likes else {}
        carried = {
            key: sum(max(0, nbytes - kept.get(label, 0)) for label, nbytes in alive.items() if label != key)
            for key, alive in self._alive.items()
        }
        return _Outcome(
            dict(ledger.work),
            kept,
            dict(ledger.growth),
            {},
            self._left,
            self._outputs,
            stands_for,
            carried,
            dict(ledger.of_gradients),
            self._experts_done,
            asked.is_asked,
        )

    def differ(self, outcome: _Outcome) -> bool:
        """Whether of two blocks that were taken to be alike one costs more."""
        pairs = self._likes.pairs() if self._likes else []
        return any(_of(outcome, first) != _of(outcome, second) for first, second in pairs)

    def _watch(self, stack: ExitStack, name: str, called: nn.Module, way: Way) -> None:
        before = dict(vars(called))

        def put_back() -> None:
            vars(called).pop("forward", None)
            if "forward" in before:
                vars(called)["forward"] = before["forward"]

        stack.callback(put_back)
        if way != "plain":
            recompute(called, lambda: lambda: None, selective=way == "selective")
            leave_out_caches(called)
        if self._likes is not None:
            vars(called)["forward"] = self._likes.of(called, called.forward, lambda: self._running[-1])
        stack.callback(called.register_forward_pre_hook(partial(self._begin_block, name), prepend=True).remove)
        stack.callback(called.register_forward_hook(partial(self._end_block), always_call=True).remove)

    def _begin_block(self, name: str, *_: Any) -> None:
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        place = self.places[name][min(number, len(self.places[name]) - 1)]
        self._begun += 1
        self._begin(place)

    def _begin_part(self, name: str, *_: Any) -> None:
        self._begin(name)

    def _begin(self, key: str | int) -> None:
        self._running.append(key)
        self._begin_forward(key)

    def _begin_forward(self, key: str | int) -> None:
        if key != AROUND:  # which goes on after each block
            self._alive["forward", key] = self.ledger.by_label()
        self.ledger.begin(("forward", key))

    def _end_block(self, block: nn.Module, args: Any, output: Any) -> None:
        self._end(self._running[-1], block, args, output)

    def _end(self, key: str | int, _part: nn.Module, _args: Any, output: Any) -> None:
        self._running.pop()
        tensors = tree.tensors(output)
        seen = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors if type(t) is not DTensor}
        self._outputs[key] = sum(seen.values())
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, key))
        if self._running:
            self.ledger.begin(("forward", self._running[-1]))
        else:
            done = self._begun >= sum(map(len, self.places.values()))
            self._begin_forward(LOSS if done else AROUND)

    def _begin_backward(self, key: str | int, _gradient: Tensor) -> None:
        self.ledger.begin(("backward", key))
        self._left["forward", key] = self.ledger.by_label()["forward", key]

    def _mark_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.ledger.mark(gradient.to_local() if isinstance(gradient, DTensor) else gradient)

    def _begin_experts(self, _experts: nn.Module, args: Any, kwargs: Any) -> Any:
        """Have it noticed when the gradient of what goes in is there; not in a block's second forward."""
        if not self._running:
            return None
        key = "backward", self._running[-1]

        def done(_gradient: Tensor) -> None:
            self._experts_done[key] = self.ledger.grown()

        def noticed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            own = leaf.view_as(leaf)
            own.register_hook(done)
            return own

        return tree.map_leaves(noticed, args), tree.map_leaves(noticed, kwargs)


def _without_data(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


def _of(outcome: _Outcome, place: int) -> tuple[int, ...]:
    """What must be alike; not bytes moved in a backward, where the first block's has what runs before it, too."""
    forward, backward = (outcome.work.get((way, place), Entered()) for way in ("forward", "backward"))
    kept = outcome.kept.get(("forward", place), 0)
    return forward.flops, forward.moved, backward.flops, sum(forward.sent.values()), sum(backward.sent.values()), kept
