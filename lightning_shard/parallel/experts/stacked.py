"""Expert parallelism: a mixture's experts dealt to ranks, and tokens brought to them.

For ``E`` experts on ``p`` ranks, rank ``r`` holds experts ``r·E/p`` to ``(r+1)·E/p``: every parameter of the module of
experts is cut along its first dim. Each rank routes its own tokens, by the model's own code; then

* *dispatch*: each pair of a token and an expert goes to the expert's rank, by an all-to-all,
* the module's own code computes there, on what came, as if each row were a token with one expert,
* *combine*: the results go back by a second all-to-all, and are added up for each token

(GShard, arXiv:2006.16668; torchtitan's and transformers' expert parallelism do the same). No token is dropped.

**Gradients.** A loss is a mean over data ranks, and the experts' gradients are averaged over the ranks that hold the
same experts. Those are ``p`` times fewer, and each has the gradients of ``p`` ranks' tokens. So gradients are divided
by ``p`` where they enter an expert, and multiplied where they leave: exactly so for powers of two.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from lightning_shard.errors import PlanError
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.experts.exchange import Exchange
from lightning_shard.parallel.experts.module_lists import ToRunAgain, deal_list, experts_of, is_list, unfit_list
from lightning_shard.parallel.plans import declared_plan, matches, similar
from lightning_shard.parallel.tensor.local_modules import local_parameters, split_parameter

ExpertPlan = Mapping[str, str]

EXPERT_STYLE = "experts"
_DECLARED = "ep_dispatch_experts"
"""The style by which transformers' plans name a module of experts."""
_CONTRACT = (
    "A module of experts is called as experts(hidden, indices, weights), of shapes [tokens, width], [tokens, k] and"
    " [tokens, k], has num_experts, and holds nothing but parameters of shape [num_experts, …]; or it is a list of"
    " modules alike, each called by the module around the list, as experts[i](rows)"
)


def resolve_experts(root: nn.Module, plan: ExpertPlan | None, parts: int) -> list[str]:
    """Names of the modules of experts in the whole model ``root``; nothing is changed.

    Args:
        plan: Patterns of their names to ``"experts"``; ``None``: those that transformers models declare.
        parts: Over how many ranks they are to be dealt; with one, none are.

    Raises:
        PlanError: None, a pattern that matches nothing, or a module that can't be dealt; says why.
    """
    if parts == 1:
        return []
    declared = plan is None
    if plan is None:
        plan = {pattern: EXPERT_STYLE for pattern, style in declared_plan(root, "ep").items() if style == _DECLARED}
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
                    f" {[n for n in range(1, experts + 1) if experts % n == 0]}."
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
    root: nn.Module, mesh: DeviceMesh, names: Iterable[str], data_mesh: DeviceMesh, to_run_again: ToRunAgain
) -> tuple[list[nn.Module], set[nn.Parameter]]:
    """Deal experts of ``root`` to the ranks of ``mesh``, in place: their parameters become DTensors.

    Args:
        root: The model, or this stage of it; its parameters hold the same values on every rank of ``mesh``, or are on
            meta.
        mesh: The one-dimensional expert axis.
        names: As :func:`resolve_experts` gave them, of the modules that are here.
        data_mesh: The axes of all data ranks, which parameters are sharded (and replicated) over.
        to_run_again: As :func:`~lightning_shard.parallel.experts.module_lists.deal_list` takes it.

    Returns:
        The modules of experts whose parameters are cut by rows on ``mesh``, and are to be sharded over the ranks that
        hold the same ones; and the parameters of lists, which need no more sharding.
    """
    stacks = []
    dealt: set[nn.Parameter] = set()
    for name in names:
        if is_list(root.get_submodule(name)):
            dealt |= deal_list(root, name, mesh, data_mesh, to_run_again)
        else:
            stacks.append(deal_stack(root, name, mesh))
    return stacks, dealt


def deal_stack(
    root: nn.Module, name: str, mesh: DeviceMesh, dispatched: Callable[..., Dispatched] | None = None
) -> nn.Module:
    """Deal the experts of one module, whose parameters are stacked, by rows; gives the module.

    Args:
        dispatched: Makes its forward. Default: :class:`Dispatched`.
    """
    module = root.get_submodule(name)
    for key in list(module._parameters):
        split_parameter(module, key, mesh, [Shard(0)])
    # a method, so that a copy of the module has one of its own
    module.forward = MethodType((dispatched or Dispatched)(name, module, mesh), module)
    return module


class Dispatched:
    """The forward of a module of experts: its own, on the tokens that the ranks sent here.

    Args:
        name: The module's, for errors.
        module: Before its experts were dealt.
        mesh: The expert axis.
    """

    def __init__(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        self._name = name
        self._takes = inspect.signature(module.forward)
        self._own_forward: Any = type(module).forward
        self._experts: int = module.num_experts  # type: ignore[assignment]
        self._mesh = mesh

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden, indices, weights = self._arguments(args, kwargs)
        group, ranks = self._mesh.get_group(), self._mesh.size()
        chosen = indices.reshape(-1)
        order = chosen.argsort(stable=True)
        given, taken, experts = self._agree(chosen)
        rows, scales = Exchange.apply(
            group, given, taken, ranks, 1, hidden[order // indices.size(-1)], weights.reshape(-1, 1)[order]
        )
        here = self._experts // ranks
        results = self._compute(module, rows, experts.to(indices.dtype).unsqueeze(-1), scales, here)
        (returned,) = Exchange.apply(group, taken, given, 1 / ranks, 1, results)
        placed = torch.empty_like(returned).index_copy(0, order, returned)
        return placed.view(*indices.shape, -1).sum(1)

    def _agree(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Who sends whom how many rows.

        Args:
            chosen: The expert of each row.

        Returns:
            How many go to each rank and come from each, and of each that comes its expert, of those that are here.

        Raises:
            PlanError: On all ranks, where one has chosen an expert that isn't there.
        """
        ranks, here = self._mesh.size(), self._experts // self._mesh.size()
        is_none = (chosen < 0) | (chosen >= self._experts)
        counts = torch.zeros(self._experts, dtype=torch.long, device=chosen.device)
        counts.scatter_add_(0, chosen.long().masked_fill(is_none, 0), torch.ones_like(chosen, dtype=torch.long))
        # of rows to be sent, by rank and expert there, and how many have none
        told = torch.cat([counts.view(ranks, here), is_none.sum().expand(ranks, 1)], dim=1)
        heard = torch.empty_like(told)
        dist.all_to_all_single(heard, told, group=self._mesh.get_group())
        coming = heard[:, :-1]
        # the few numbers per rank that the host must know, and so waits for
        given, taken, without = torch.stack([told[:, :-1].sum(1), coming.sum(1), heard[:, -1]]).tolist()
        if any(without):
            raise PlanError(
                f"{self._name} was called with {sum(without)} indices that aren't of its {self._experts} experts, 0 to"
                f" {self._experts - 1}, so no rank has what they name: give a token that is dropped a weight of 0 for"
                " any of them, or use expert_parallel_size=1."
            )
        return (
            given,
            taken,
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
        """The module's own code on rows for the experts that are here; ``[len(rows), width]``."""
        count = len(rows)
        if not count:
            # One row of zeros that counts for nothing: every rank's backward must come to the same collectives, and
            # every parameter have a gradient.
            rows, scales = rows.sum(0, keepdim=True), scales.sum(0, keepdim=True)
            experts = experts.new_zeros(1, 1)
        with local_parameters(module), _holding(module, here):
            results: Tensor = self._own_forward(module, rows, experts, scales)
        if not isinstance(results, Tensor) or len(results) != len(rows) or results.ndim != 2:
            shape = tuple(results.shape) if isinstance(results, Tensor) else type(results).__name__
            raise PlanError(
                f"{self._name} returned {shape} for {len(rows)} tokens, and not [tokens, width], so its experts can't"
                " be dealt to ranks: write it so, or use expert_parallel_size=1."
            )
        return results[:count]


@contextmanager
def _holding(module: nn.Module, experts: int) -> Iterator[None]:
    """Inside, a module's ``num_experts`` is how many it computes with."""
    before = module.num_experts
    module.num_experts = experts  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_experts = before
