"""Tensor parallelism: a plan of names to how each module is split over the tensor axis.

For a layer ``Y = X·W + b`` on ``p`` ranks:

* ``colwise``: ``W = [W_1 … W_p]`` by output features; every rank has all of ``X`` and its columns of ``Y``.
* ``rowwise``: ``W`` by input features; every rank has its columns of ``X``, and ``Y = Σ X_i·W_i`` is all-reduced.

so colwise followed by rowwise costs one all-reduce forward and one backward (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.errors import PlanError
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.plans import declared_plan, matches, similar

Plan = Mapping[str, str | ParallelStyle]

_REPLICATED, _LAST, _SEQUENCE = Replicate(), Shard(-1), Shard(1)


@dataclass(frozen=True)
class Split(ParallelStyle):
    """How one module's parameters, input and output lie on the tensor axis.

    Attributes:
        features: ``"out"``, ``"in"`` (of a linear layer), ``"rows"`` (of an embedding's table), or ``None`` for
            replicated parameters.
        given: How the input is handed to the module, a plain tensor on every rank.
        wanted: How the module computes with it.
        produced: How the output is handed on, again as a plain tensor.
    """

    features: str | None
    given: Placement
    wanted: Placement
    produced: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split, self._take, self._hand_on)  # type: ignore[arg-type]

    def _split(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = self.placement(module, f"{name}.{key}", parameter, mesh.size())
            # Every rank holds the same full values here, so each takes its own part and nothing is sent.
            part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(key, nn.Parameter(part, requires_grad=parameter.requires_grad))

    def placement(self, module: nn.Module, name: str, parameter: nn.Parameter, parts: int) -> Placement:
        """Where one of a module's parameters goes.

        Raises:
            PlanError: Its size doesn't divide.
        """
        if self.features is None:
            return _REPLICATED
        if self.features == "rows":
            dim = 0
        else:
            # transformers' Conv1D (GPT-2) keeps its weight as [in, out], nn.Linear as [out, in]; a bias is [out].
            out_dim = parameter.ndim - 1 if type(module).__name__ == "Conv1D" else 0
            if parameter.ndim == 1:
                if self.features == "in":
                    return _REPLICATED
                dim = 0
            else:
                dim = out_dim if self.features == "out" else 1 - out_dim
        if parameter.size(dim) % parts:
            raise PlanError(
                f"{name} of a {type(module).__name__} has {parameter.size(dim)} {self.features} features, which"
                f" tensor_parallel_size ({parts}) must divide: choose another size, or leave it out of the plan."
            )
        return Shard(dim)

    def _take(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if not inputs:
            raise PlanError(
                f"A {type(module).__name__} of the tensor-parallel plan was called without positional input."
            )
        first = inputs[0]
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self._on(self.given, first)], run_check=False)
        return (first.redistribute(mesh, [self._on(self.wanted, first)]), *inputs[1:])

    def _hand_on(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(output, DTensor):
            return output
        return output.redistribute(mesh, [self._on(self.produced, output)]).to_local()

    @staticmethod
    def _on(placement: Placement, tensor: Tensor) -> Placement:
        return Shard(placement.dim % tensor.ndim) if isinstance(placement, Shard) else placement


class ScatterSequence(ParallelStyle):
    """Cut a module's input ``[batch, sequence, …]`` by sequence: from here on each rank has its own part of it."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def scatter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            whole = DTensor.from_local(inputs[0], device_mesh, [_REPLICATED], run_check=False)
            return (whole.redistribute(device_mesh, [_SEQUENCE]).to_local(), *inputs[1:])

        module.register_forward_pre_hook(scatter)
        return module


#: The styles by name. Names shared with transformers' plans mean the same.
STYLES: dict[str, ParallelStyle] = {
    "colwise": Split("out", _REPLICATED, _REPLICATED, _LAST),
    "colwise_gather_output": Split("out", _REPLICATED, _REPLICATED, _REPLICATED),
    "rowwise": Split("in", _LAST, _LAST, _REPLICATED),
    "rowwise_split_input": Split("in", _REPLICATED, _LAST, _REPLICATED),
    "embedding_rowwise": Split("rows", _REPLICATED, _REPLICATED, _REPLICATED),
    # A norm over each head of [batch, sequence, heads, head_size]: heads are local, the weight is everyone's.
    "replicated_with_grad_allreduce": Split(None, Shard(2), Shard(2), Shard(2)),
    # Sequence parallelism (arXiv:2205.05198): between the layers, [batch, sequence, …] is split by sequence. It begins
    # with "scatter_sequence" at the first block and ends with "gather_sequence" at the final norm.
    "scatter_sequence": ScatterSequence(),
    "sequence": Split(None, _SEQUENCE, _SEQUENCE, _SEQUENCE),
    "colwise_sequence": Split("out", _SEQUENCE, _REPLICATED, _LAST),
    "rowwise_sequence": Split("in", _LAST, _LAST, _SEQUENCE),
    "gather_sequence": Split(None, _SEQUENCE, _REPLICATED, _REPLICATED),
}


def resolve_plan(root: nn.Module, plan: Plan | None, parts: int) -> dict[str, ParallelStyle]:
    """Every module that a plan splits, by its name in the whole model ``root``; nothing is changed.

    Args:
        plan: Patterns of module names, ``*`` for any one part of a name (``"layers.*.attn.q"``), to a style's name or a
            ``ParallelStyle``; a pattern may leave out leading parts of the name. ``None``: the model's own.
        parts: Over how many ranks they are to be split.

    Raises:
        PlanError: A pattern that matches nothing, an unknown style, sizes that don't divide, or no plan at all.
    """
    if plan is None:
        plan = declared_plan(root, "tp")
        if not plan:
            raise PlanError(
                f"tensor_parallel_size={parts} needs a plan and {type(root).__name__} brings none: pass"
                ' tensor_parallel_plan, such as {"layers.*.attn.q": "colwise", "layers.*.attn.o": "rowwise"}.'
            )
    modules = dict(root.named_modules())
    resolved: dict[str, ParallelStyle] = {}
    for pattern, chosen in plan.items():
        style = _style(pattern, chosen)
        names = [name for name in modules if matches(name, pattern)]
        if not names:
            raise PlanError(
                f"tensor_parallel_plan: {pattern!r} matches no module{similar(modules, pattern)}. Correct it or leave it"
                " out."
            )
        for name in names:
            if isinstance(style, Split):
                for key, parameter in modules[name].named_parameters(recurse=False):
                    style.placement(modules[name], f"{name}.{key}", parameter, parts)
            resolved[name] = style
    return resolved


def apply_tensor_parallel(root: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Split modules of ``root`` over ``mesh``, in place.

    Args:
        root: The model, or this stage of it; its parameters hold the same values on every rank of ``mesh``, or are on
        meta. mesh: The one-dimensional tensor axis.
        styles: As :func:`resolve_plan` gave them, for the modules that are here.

    Raises:
        PlanError: Only some of several tied parameters are split.
    """
    tied = tied_parameters(root)
    for name, style in styles.items():
        style._apply(root.get_submodule(name), mesh)
    _check_still_tied(root, tied)


def _style(pattern: str, style: str | ParallelStyle) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise PlanError(
            f"tensor_parallel_plan: {pattern!r} has style {style!r}; known are {sorted(STYLES)}, or pass a"
            " torch.distributed.tensor.parallel.ParallelStyle."
        )
    return STYLES[style]


def _check_still_tied(root: nn.Module, tied: list[tuple[str, ...]]) -> None:
    for group in tied:
        owners = {id(root.get_parameter(name)) for name in group}
        if len(owners) > 1:
            raise PlanError(
                f"tensor_parallel_plan splits only some of the tied parameters {list(group)}: leave their modules out"
                " of the plan, or untie them."
            )
