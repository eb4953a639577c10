"""Expert parallelism: distribute a mixture's experts over ranks, and dispatch tokens to them.

This module handles experts whose parameters are stacked in one module; for lists of experts see ``module_lists.py``.
For ``E`` experts on ``p`` ranks, rank ``r`` holds the experts from ``r·E/p`` up to, not including, ``(r+1)·E/p``: every
parameter of the module of experts is sharded along its first dim. Each rank routes its own tokens by the model's own
code. Dispatch, combination (GShard, arXiv:2006.16668), and the factors of gradients: ``docs/decisions/experts.md``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lightning_shard.errors import PlanError
from lightning_shard.layout import divisors
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.collectives import Exchange
from lightning_shard.parallel.experts.check_rows import RowCheck
from lightning_shard.parallel.experts.module_lists import TwoRuns, distribute_list, experts_of, is_list, unfit_list
from lightning_shard.parallel.plans import declared_plan, matches, similar
from lightning_shard.parallel.tensor.local_modules import local_parameters, split_parameter
from lightning_shard.torch_private import replaced

ExpertPlan = Mapping[str, str]

EXPERT_STYLE = "experts"
_DECLARED = ("ep_dispatch_experts", "moe_tp_experts")
"""The styles that transformers' plans for experts give to a module of experts: since 5.18, and before."""
_CONTRACT = (
    "A module of experts is called as experts(hidden, indices, weights), of shapes [tokens, width], [tokens, k] and"
    " [tokens, k], has num_experts, and holds nothing but parameters of shape [num_experts, …]; or it is a list of"
    " modules alike, each called by the module around the list, as experts[i](rows)"
)


def resolve_experts(root: nn.Module, plan: ExpertPlan | None, parts: int) -> list[str]:
    """Names of the modules of experts in the whole model ``root``; changes nothing.

    Args:
        root: The whole model.
        plan: Patterns of module names to ``"experts"``; ``None``: the modules that transformers models declare.
        parts: Size of the expert axis. With 1, no experts are distributed, and the result is empty.

    Raises:
        PlanError: There are no experts, a pattern matches nothing, or a module can't be distributed; says why.
    """
    if parts == 1:
        return []
    declared = plan is None
    if plan is None:
        plan = {pattern: EXPERT_STYLE for pattern, style in declared_plan(root, "ep").items() if style in _DECLARED}
    modules = dict(root.named_modules())
    tied = {name for group in tied_parameters(root) for name in group}
    found: dict[str, None] = {}
    for pattern, style in plan.items():
        if style != EXPERT_STYLE:
            raise PlanError(f'expert_parallel_plan: {pattern!r} has style {style!r}; the only one is "{EXPERT_STYLE}".')
        names = [name for name in modules if matches(name, pattern)]
        if not names and not declared:  # a declared plan serves all models of a kind
            raise PlanError(
                f"expert_parallel_plan: {pattern!r} matches no module{similar(modules, pattern)}. Correct it or leave"
                " it out."
            )
        for name in names:
            own_tied = {key for key in tied if key.startswith(f"{name}.")}
            reason = unfit_list(root, name, own_tied) if is_list(modules[name]) else _unfit(modules[name], own_tied)
            if reason is not None:
                raise PlanError(
                    f"{name}, a {type(modules[name]).__name__}, {reason}, so its experts can't be dealt to ranks."
                    f" {_CONTRACT}: write it so, or use expert_parallel_size=1."
                )
            experts = count_experts(modules[name])
            if experts % parts:
                raise PlanError(
                    f"{name} has {experts} experts, which expert_parallel_size ({parts}) must divide: use one of"
                    f" {divisors(experts)}."
                )
            found[name] = None
    if not found:
        none_are = f"{type(root).__name__} has no transformers model that declares some"
        raise PlanError(
            f"expert_parallel_size={parts} needs experts, and {none_are if declared else 'the plan is empty'}: pass"
            ' expert_parallel_plan, such as {"layers.*.moe.experts": "experts"}.'
            f" {_CONTRACT}."
        )
    return list(found)


def _unfit(module: nn.Module, tied: set[str]) -> str | None:
    """Why a module of stacked experts can't be distributed; ``None`` if it can."""
    if isinstance(module, nn.Sequential):
        return "calls its modules one after the other"
    count = getattr(module, "num_experts", None)
    if type(count) is not int:
        return "has no num_experts"
    parameters = dict(module.named_parameters())
    if not parameters:
        return "has no parameters"
    for key, parameter in parameters.items():
        if "." in key:
            return f"holds {key} in a module of its own"
        if not parameter.ndim or parameter.size(0) != count:
            return f"has num_experts={count} and {key} of shape {tuple(parameter.shape)}"
    beside = [key for key, _ in module.named_buffers()]
    beside += [key for key, value in vars(module).items() if isinstance(value, Tensor)]
    if beside:
        return f"has {', '.join(beside)} beside its parameters"
    if tied:
        return f"shares {', '.join(sorted(tied))} with another module"
    if "forward" in vars(module):
        return "has a forward that was put on the object"
    takes = inspect.signature(module.forward).parameters.values()
    positional = [p for p in takes if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if len(positional) < 3 or len(needed) > 3:
        return f"is called with ({', '.join(p.name for p in takes)})"
    return None


def count_experts(module: nn.Module) -> int:
    return len(experts_of(module)) if is_list(module) else int(module.num_experts)  # type: ignore[arg-type]


def apply_expert_parallel(
    root: nn.Module, mesh: DeviceMesh, names: Iterable[str], data_mesh: DeviceMesh, two_runs: TwoRuns
) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """Distribute experts of ``root`` over the ranks of ``mesh``, in place: their parameters become DTensors.

    Args:
        root: The model, or this stage of it. Its parameters have the same values on every rank of ``mesh``, or are on
            meta.
        mesh: The one-dimensional expert axis.
        names: The result of :func:`resolve_experts`, for the modules of ``root``.
        data_mesh: The axes of all data ranks, which parameters are sharded (and replicated) over.
        two_runs: As for :func:`~lightning_shard.parallel.experts.module_lists.distribute_list`.

    Returns:
        The modules of stacked experts, whose parameters are sharded over ``mesh``, and are yet to be sharded over the
        ranks that hold the same experts; and the parameters of lists of experts, which need no more sharding.
    """
    stacks = []
    dealt: set[nn.Parameter] = set()
    for name in names:
        if is_list(root.get_submodule(name)):
            dealt |= distribute_list(root, name, mesh, data_mesh, two_runs)
        else:
            stacks.append(distribute_stack(root, name, mesh))
    return stacks, dealt


def distribute_stack(
    root: nn.Module, name: str, mesh: DeviceMesh, dispatched: Callable[..., Dispatched] | None = None
) -> nn.Module:
    """Distribute the experts of one module with stacked parameters, in place; returns the module.

    Args:
        root: The model, or this stage of it.
        name: The module's name in ``root``.
        mesh: The expert axis.
        dispatched: Makes the module's new forward. Default: :class:`Dispatched`.
    """
    module = root.get_submodule(name)
    for key in list(module._parameters):
        split_parameter(module, key, mesh, [Shard(0)])
    # a method, so that deepcopy binds it to the copied module
    module.forward = MethodType((dispatched or Dispatched)(name, module, mesh), module)
    return module


class Dispatched:
    """The forward of a distributed module of experts: dispatch, the module's own forward on received rows, combine.

    Args:
        name: The module's name, for errors.
        module: The module; its ``num_experts`` counts the experts of all ranks.
        mesh: The expert axis.
    """

    def __init__(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        self._name = name
        self._takes = inspect.signature(module.forward)
        self._own_forward: Any = type(module).forward
        self._experts: int = module.num_experts  # type: ignore[assignment]
        self._mesh = mesh
        self._check_rows = RowCheck(name)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden, indices, weights = self._arguments(args, kwargs)
        group, ranks = self._mesh.get_group(), self._mesh.size()
        chosen = indices.reshape(-1)
        order = chosen.argsort(stable=True)
        send_counts, receive_counts, experts = self._agree(chosen)
        rows, scales = Exchange.apply(
            group,
            send_counts,
            receive_counts,
            ranks,
            1,
            hidden[order // indices.size(-1)],
            weights.reshape(-1, 1)[order],
        )
        here = self._experts // ranks
        to_one = experts.new_zeros(1, 1).to(indices.dtype)  # a capacity is exceeded sooner if all rows are one expert's

        def compute(rows: Tensor, scales: Tensor) -> Tensor:
            return self._compute(module, rows, to_one.expand(len(rows), 1), scales, here)

        self._check_rows(compute, module, rows, scales)
        results = self._compute(module, rows, experts.to(indices.dtype).unsqueeze(-1), scales, here)
        (returned,) = Exchange.apply(group, receive_counts, send_counts, 1 / ranks, 1, results)
        placed = torch.empty_like(returned).index_copy(0, order, returned)
        return placed.unflatten(0, indices.shape).sum(1)  # a rank may have no tokens

    def _agree(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Exchange the numbers of rows that ranks send each other.

        Args:
            chosen: The expert of each row to be sent, ``[tokens × k]``.

        Returns:
            The number of rows to send to each rank; the number to receive from each rank; and the expert of each row
            to be received, as an index among this rank's experts.

        Raises:
            PlanError: On all ranks, if one of them has chosen an expert that doesn't exist.
        """
        ranks, here = self._mesh.size(), self._experts // self._mesh.size()
        is_none = (chosen < 0) | (chosen >= self._experts)
        counts = torch.zeros(self._experts, dtype=torch.long, device=chosen.device)
        counts.scatter_add_(0, chosen.long().masked_fill(is_none, 0), torch.ones_like(chosen, dtype=torch.long))
        # [ranks, here + 1]: rows to be sent, by rank and its expert; last, this rank's rows with an invalid expert
        sent = torch.cat([counts.view(ranks, here), is_none.sum().expand(ranks, 1)], dim=1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._mesh.get_group())
        coming = received[:, :-1]
        # three numbers per rank that the host needs: the only wait for the device
        send_counts, receive_counts, without = torch.stack(
            [sent[:, :-1].sum(1), coming.sum(1), received[:, -1]]
        ).tolist()
        if any(without):
            raise PlanError(
                f"{self._name} was called with {sum(without)} indices that aren't of its {self._experts} experts, 0 to"
                f" {self._experts - 1}, so no rank has what they name: give a token that is dropped a weight of 0 for"
                " any of them, or use expert_parallel_size=1."
            )
        return (
            send_counts,
            receive_counts,
            torch.arange(here, device=chosen.device).repeat(ranks).repeat_interleave(coming.reshape(-1)),
        )

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        given = list(self._takes.bind(*args, **kwargs).arguments.values())
        fits = len(given) == 3 and all(isinstance(value, Tensor) for value in given)
        if fits:
            hidden, indices, weights = given
            fits = hidden.ndim == indices.ndim == 2 and weights.shape == indices.shape
            fits = fits and len(hidden) == len(indices) and not indices.is_floating_point()
        if not fits:
            shapes = [tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__ for value in given]
            raise PlanError(
                f"{self._name} was called with {shapes}, so its experts can't be dealt to ranks. {_CONTRACT}: call it"
                " so, or use expert_parallel_size=1."
            )
        return given

    def _compute(self, module: nn.Module, rows: Tensor, experts: Tensor, scales: Tensor, here: int) -> Tensor:
        """Run the module's own code on rows for this rank's experts; returns ``[len(rows), width]``."""
        count = len(rows)
        if not count:
            # compute one row of zeros, and drop the result: every rank's backward must run the same collectives, and
            # every parameter must get a gradient
            rows, scales = rows.sum(0, keepdim=True), scales.sum(0, keepdim=True)
            experts = experts.new_zeros(1, 1)
        with local_parameters(module), replaced((module, "num_experts", here)):
            results: Tensor = self._own_forward(module, rows, experts, scales)
        if not isinstance(results, Tensor) or len(results) != len(rows) or results.ndim != 2:
            shape = tuple(results.shape) if isinstance(results, Tensor) else type(results).__name__
            raise PlanError(
                f"{self._name} returned {shape} for {len(rows)} tokens, and not [tokens, width], so its experts can't"
                " be dealt to ranks: write it so, or use expert_parallel_size=1."
            )
        return results[:count]
