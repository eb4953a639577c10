"""Styles of tensor parallelism: how one module is split over the tensor axis.

For a layer ``Y = X·W + b`` on ``p`` ranks:

* ``colwise``: ``W = [W_1 … W_p]`` is split by output features; every rank has all of ``X`` and its columns of ``Y``.
* ``rowwise``: ``W`` is split by input features; every rank has its columns of ``X``; ``Y = Σ X_i·W_i`` is all-reduced.

So colwise followed by rowwise costs one all-reduce in the forward and one in the backward (Megatron-LM,
arXiv:1909.08053).

In this package, a tensor is *whole* if every tensor rank has all of its features, and *split* if each has its part. A
gradient is a *summand* if the sum over the tensor ranks is the gradient that one process would have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
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

from lightning_shard import tree
from lightning_shard.errors import PlanError
from lightning_shard.parallel.collectives import shared, summed
from lightning_shard.parallel.tensor.local_modules import as_plain, computing_with, local_parameters, split_parameter
from lightning_shard.sharding import parameter_like

REPLICATED, LAST, _SEQUENCE, _HEADS = Replicate(), Shard(-1), Shard(1), Shard(-2)


class IndivisibleError(PlanError):
    """The size of the tensor axis doesn't divide a parameter's size."""


@dataclass(frozen=True)
class Split(ParallelStyle):
    """Placements of one module's parameters, input and output on the tensor axis.

    Attributes:
        features: The dim of the parameters that is sharded: ``"out"`` or ``"in"`` features of a linear layer,
            ``"rows"`` of an embedding's table, or ``None`` for replicated parameters.
        input_layout: Placement of the input as the module is called with it, a plain tensor on every rank.
        desired_input_layout: Placement of the input as the module computes with it.
        output_layout: Placement of the output as the module returns it, again as a plain tensor.
    """

    features: str | None
    input_layout: Placement
    desired_input_layout: Placement
    output_layout: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, self._split, self._prepare_input, self._prepare_output)  # type: ignore[arg-type]

    def _split(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = self.placement(module, f"{name}.{key}", parameter, mesh.size())
            # every rank holds the same full values, so each keeps its own part without communication
            part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(key, parameter_like(part, parameter))

    def placement(self, module: nn.Module, name: str, parameter: nn.Parameter, parts: int) -> Placement:
        """The placement of one of a module's parameters on the tensor axis.

        Args:
            module: The layer.
            name: Name of the parameter, for the error.
            parameter: The full parameter.
            parts: Size of the tensor axis.

        Raises:
            IndivisibleError: ``parts`` doesn't divide the size of the dim to shard.
        """
        if self.features is None:
            return REPLICATED
        if self.features == "rows":
            dim = 0
        else:
            # transformers' Conv1D (GPT-2) keeps its weight as [in, out], nn.Linear as [out, in]; a bias is [out].
            out_dim = parameter.ndim - 1 if type(module).__name__ == "Conv1D" else 0
            if parameter.ndim == 1:
                if self.features == "in":
                    return REPLICATED
                dim = 0
            else:
                dim = out_dim if self.features == "out" else 1 - out_dim
        if parameter.size(dim) % parts:
            raise IndivisibleError(
                f"{name} of a {type(module).__name__} has {parameter.size(dim)} {self.features} features, which"
                f" tensor_parallel_size ({parts}) must divide: choose another size, or leave it out of the plan."
            )
        return Shard(dim)

    def _prepare_input(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> tuple[Any, ...]:
        if not inputs:
            raise PlanError(
                f"A {type(module).__name__} of the tensor-parallel plan was called without positional input."
            )
        first = inputs[0]
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, mesh, [self._on(self.input_layout, first)], run_check=False)
        return (first.redistribute(mesh, [self._on(self.desired_input_layout, first)]), *inputs[1:])

    def _prepare_output(self, module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        if not isinstance(output, DTensor):
            return output
        return as_plain(output.redistribute(mesh, [self._on(self.output_layout, output)]))

    @staticmethod
    def _on(placement: Placement, tensor: Tensor) -> Placement:
        return Shard(placement.dim % tensor.ndim) if isinstance(placement, Shard) else placement


class ScatterSequence(ParallelStyle):
    """Shard a module's input ``[batch, sequence, …]`` along the sequence: from here on each rank has its part."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def scatter(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            # parts of unequal sizes would be taken for those of a sequence of another length, other ones on each rank
            if not inputs or not isinstance(inputs[0], Tensor) or inputs[0].ndim < 2:
                raise PlanError(
                    f"A {type(module).__name__} has style 'scatter_sequence' in the tensor-parallel plan, and isn't"
                    " called with [batch, sequence, …] first: give the style to a module that is."
                )
            if inputs[0].size(1) % device_mesh.size():
                raise PlanError(
                    f"Sequences of {inputs[0].size(1)} positions can't be split over"
                    f" tensor_parallel_size={device_mesh.size()} ranks, which must divide their length: pad batches to"
                    " a multiple of it, or choose styles that don't split sequences."
                )
            whole = DTensor.from_local(inputs[0], device_mesh, [REPLICATED], run_check=False)
            return (as_plain(whole.redistribute(device_mesh, [_SEQUENCE])), *inputs[1:])

        module.register_forward_pre_hook(scatter)
        return module


class SummedOutput(ParallelStyle):
    """A module that runs its own code on this rank's part of its parameters; its outputs are all-reduced.

    For a mixture's experts, ``[experts, features, features]``: each rank has a part of every expert's inner features.

    Args:
        placements: Placements of all parameters of the module, by name.
    """

    def __init__(self, placements: Mapping[str, Placement]) -> None:
        self._placements = placements

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for key, placement in self._placements.items():
            split_parameter(module, key, device_mesh, [placement])
        own_forward: Any = type(module).forward

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            given = [_to_shares(value, device_mesh) for value in args]
            named = {key: _to_shares(value, device_mesh) for key, value in kwargs.items()}
            with local_parameters(module):
                return summed(own_forward(module, *given, **named), device_mesh.get_group())

        module.forward = MethodType(forward, module)  # a method, so that deepcopy binds it to the copied module
        return module


class SummedGradients(ParallelStyle):
    """A module with replicated parameters that every rank runs on its own features or heads; gradients are all-reduced.

    For a norm over each head, or an activation with a trained slope: each rank's gradient is a summand.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_forward: Any = type(module).forward

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with computing_with([module], partial(_to_shares, mesh=device_mesh)):
                return own_forward(module, *args, **kwargs)

        module.forward = MethodType(forward, module)
        return module


class SharedOutput(ParallelStyle):
    """A module computed identically on all ranks, whose output each rank uses for its own features or heads.

    For a single head's keys and values beside queries that are split, or for a gate. Each rank's gradient of the output
    is a summand, so these gradients are all-reduced.

    Args:
        features: The number of last output features for which this is so. The gradients of the others come from a
            column-wise layer, and are whole. ``None``: all of the output.
    """

    def __init__(self, features: int | None = None) -> None:
        self._features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_: nn.Module, __: Any, output: Any) -> Any:
            if self._features is None:
                return tree.map_leaves(partial(_to_shares, mesh=device_mesh), output)
            rest, shared = output.split([output.size(-1) - self._features, self._features], dim=-1)
            return torch.cat([rest, _to_shares(shared, device_mesh)], dim=-1)

        module.register_forward_hook(share)
        return module


def _to_shares(value: Any, mesh: DeviceMesh) -> Any:
    """A replicated tensor, for use in each rank's part of a computation: its gradients are all-reduced."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return shared(value, mesh.get_group())


#: The styles by name. Names shared with transformers' plans mean the same.
STYLES: dict[str, ParallelStyle] = {
    "colwise": Split("out", REPLICATED, REPLICATED, LAST),
    "colwise_gather_output": Split("out", REPLICATED, REPLICATED, REPLICATED),
    "rowwise": Split("in", LAST, LAST, REPLICATED),
    "rowwise_split_input": Split("in", REPLICATED, LAST, REPLICATED),
    "embedding_rowwise": Split("rows", REPLICATED, REPLICATED, REPLICATED),
    "replicated_with_grad_allreduce": SummedGradients(),
    "shared_output": SharedOutput(),
    # Sequence parallelism (arXiv:2205.05198): between the layers, [batch, sequence, …] is sharded by sequence. It
    # begins with "scatter_sequence" at the first block and ends with "gather_sequence" at the final norm.
    "scatter_sequence": ScatterSequence(),
    "sequence": Split(None, _SEQUENCE, _SEQUENCE, _SEQUENCE),
    "colwise_sequence": Split("out", _SEQUENCE, REPLICATED, LAST),
    "rowwise_sequence": Split("in", LAST, LAST, _SEQUENCE),
    "gather_sequence": Split(None, _SEQUENCE, REPLICATED, REPLICATED),
}
BY_HEADS = Split("out", _HEADS, _HEADS, _HEADS)
"""For a module with parameters ``[heads, head size]`` on inputs ``[…, heads, head size]``: all are sharded by heads."""
EXPERTS, MLA = "moe_tp_experts", "mla_kv_a_proj"
"""Styles of transformers' plans that depend on the module."""
MODULE_STYLE_NAMES = {*STYLES, EXPERTS, MLA}

#: How a parameter of experts, ``[experts, …, …]``, is sharded: the dim, counted from the end, and the number of
#: matrices that are packed in that dim.
CUTS: dict[str, tuple[int, int]] = {
    "colwise": (2, 1),
    "rowwise": (1, 1),
    "packed_colwise": (2, 2),
    "packed_rowwise": (1, 2),
}
STYLE_NAMES = {*MODULE_STYLE_NAMES, *CUTS}
"""All style names of a plan, for modules and for parameters."""


_WITH_LORA = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")


def layers_in_place(name: str, module: nn.Module, style: Any, features: str | None) -> dict[str, nn.Module]:
    """The layers, by name, that are split by the style that a plan gives ``name``: the module itself, or peft's layers.

    Args:
        name: The module's name.
        module: The module.
        style: The style's name in the plan, or a ``ParallelStyle``.
        features: The features that the style shards, as in :class:`~.styles.Split`.

    Raises:
        PlanError: It isn't known how to split the adapter.
    """
    if isinstance(getattr(module, "base_layer", None), nn.Module):
        return _with_lora(name, module, style, features)
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(getattr(module, "original_module", None), nn.Module):
        # peft calls one of these in the module's place
        return {f"{name}.original_module": module.get_submodule("original_module")} | {
            f"{name}.modules_to_save.{key}": copy for key, copy in copies.items()
        }
    return {name: module}


def _with_lora(name: str, module: nn.Module, style: Any, features: str | None) -> dict[str, nn.Module]:
    """The layers of a LoRA layer of peft that are split: the adapted layer, and ``A`` or ``B``.

    ``y = x·W + (x·A)·B``. If ``W`` is split by output features, ``B`` is too, and every rank computes all of ``x·A``.
    If ``W`` is split by input features, ``A`` is too, and every rank computes all of the product with ``B``.
    """
    parameter = getattr(module, "parameter_name", None)
    if isinstance(parameter, str):  # y = x·(W + A·B), which peft makes by a parametrization in each call
        raise PlanError(
            f"tensor_parallel_plan: {name} has style {style!r} and peft adapts its parameter {parameter!r} by"
            " target_parameters, which adds a product of whole matrices to it: adapt the layer by target_modules, or"
            " leave it out of the plan."
        )
    holding = {key for key, child in module.named_children() if any(True for _ in child.parameters())}
    if style not in _WITH_LORA or not holding <= {"base_layer", "lora_A", "lora_B"}:
        what = ", ".join(sorted(holding - {"base_layer"}))
        raise PlanError(
            f"tensor_parallel_plan: {name} has style {style!r} and is adapted by {type(module).__module__}"
            f" ({what}); under tensor parallelism that goes for LoRA's A and B beside the styles {list(_WITH_LORA)}:"
            " adapt other modules, or leave this one out of the plan."
        )
    adapter = "lora_B" if features == "out" else "lora_A"
    layers = module.get_submodule(adapter).named_children() if adapter in holding else ()
    split = {f"{name}.{adapter}.{key}": layer for key, layer in layers}
    return {f"{name}.base_layer": module.get_submodule("base_layer"), **split}
