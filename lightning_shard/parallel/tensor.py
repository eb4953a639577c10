"""Tensor parallelism: a plan of names to how each module is split over the tensor axis.

For a layer ``Y = X·W + b`` on ``p`` ranks:

* ``colwise``: ``W = [W_1 … W_p]`` by output features; every rank has all of ``X`` and its columns of ``Y``.
* ``rowwise``: ``W`` by input features; every rank has its columns of ``X``, and ``Y = Σ X_i·W_i`` is all-reduced.

so colwise followed by rowwise costs one all-reduce forward and one backward (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
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
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_shard import tree
from lightning_shard.errors import PlanError
from lightning_shard.parallel.adapters import layers_in_place
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.local import computing_with, local_parameters, shared, split_parameter, summed
from lightning_shard.parallel.plans import check_heads, declared_plan, matches, similar, weight_computed_by

Plan = Mapping[str, str | ParallelStyle]

_REPLICATED, _LAST, _SEQUENCE = Replicate(), Shard(-1), Shard(1)


class IndivisibleError(PlanError):
    """A parameter's size isn't a multiple of the tensor axis."""


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
            IndivisibleError: Its size doesn't divide.
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
            raise IndivisibleError(
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


class OwnShare(ParallelStyle):
    """A module that runs by its own code on this rank's part of its parameters, and returns a summand of its output.

    So a mixture's experts, ``[experts, features, features]``: each rank has a part of every expert's inner features.

    Args:
        placements: Of all its parameters, by name.
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

        module.forward = MethodType(forward, module)  # a method, so that a copy of the module has one of its own
        return module


class SummedGradients(ParallelStyle):
    """A module that every rank runs on features or heads of its own, with parameters that all ranks hold alike.

    So a norm over each head, or an activation with a trained slope: a rank's gradients are summands.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own_forward: Any = type(module).forward

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with computing_with(module, partial(_to_shares, mesh=device_mesh)):
                return own_forward(module, *args, **kwargs)

        module.forward = MethodType(forward, module)
        return module


class SharedOutput(ParallelStyle):
    """A module computed alike on all ranks, of whose output each has use for features or heads of its own.

    So a single head's keys and values beside queries that are split, or a gate: gradients are summands there.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_: nn.Module, __: Any, output: Any) -> Any:
            return tree.map_leaves(partial(_to_shares, mesh=device_mesh), output)

        module.register_forward_hook(share)
        return module


class SharedByHeads(ParallelStyle):
    """A module computed alike on all ranks, of whose output the last features go to each rank's own heads.

    Their gradients are summands; those of the others come from a column-wise layer, whole.

    Args:
        features: How many.
    """

    def __init__(self, features: int) -> None:
        self._features = features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def share(_: nn.Module, __: Any, output: Tensor) -> Tensor:
            rest, shared = output.split([output.size(-1) - self._features, self._features], dim=-1)
            return torch.cat([rest, _to_shares(shared, device_mesh)], dim=-1)

        module.register_forward_hook(share)
        return module


def _to_shares(value: Any, mesh: DeviceMesh) -> Any:
    """A tensor that all ranks hold alike, and each uses for its part of a computation: gradients are added up."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return shared(value, mesh.get_group())


#: The styles by name. Names shared with transformers' plans mean the same.
STYLES: dict[str, ParallelStyle] = {
    "colwise": Split("out", _REPLICATED, _REPLICATED, _LAST),
    "colwise_gather_output": Split("out", _REPLICATED, _REPLICATED, _REPLICATED),
    "rowwise": Split("in", _LAST, _LAST, _REPLICATED),
    "rowwise_split_input": Split("in", _REPLICATED, _LAST, _REPLICATED),
    "embedding_rowwise": Split("rows", _REPLICATED, _REPLICATED, _REPLICATED),
    "replicated_with_grad_allreduce": SummedGradients(),
    "shared_output": SharedOutput(),
    # Sequence parallelism (arXiv:2205.05198): between the layers, [batch, sequence, …] is split by sequence. It begins
    # with "scatter_sequence" at the first block and ends with "gather_sequence" at the final norm.
    "scatter_sequence": ScatterSequence(),
    "sequence": Split(None, _SEQUENCE, _SEQUENCE, _SEQUENCE),
    "colwise_sequence": Split("out", _SEQUENCE, _REPLICATED, _LAST),
    "rowwise_sequence": Split("in", _LAST, _LAST, _SEQUENCE),
    "gather_sequence": Split(None, _SEQUENCE, _REPLICATED, _REPLICATED),
}
_EXPERTS, _MLA = "moe_tp_experts", "mla_kv_a_proj"
"""Styles of transformers' plans that depend on the module."""
_NAMES = {*STYLES, _EXPERTS, _MLA}

#: How a parameter of experts, ``[experts, …, …]``, is cut: the dim from its end, and of how many matrices it is packed.
_CUTS: dict[str, tuple[int, int]] = {
    "colwise": (2, 1),
    "rowwise": (1, 1),
    "packed_colwise": (2, 2),
    "packed_rowwise": (1, 2),
}
STYLE_NAMES = {*_NAMES, *_CUTS}
"""All that a plan may name, of modules and of parameters."""


def resolve_plan(
    root: nn.Module, plan: Plan | None, parts: int, without: Collection[str] = ()
) -> dict[str, ParallelStyle]:
    """Every module that a plan splits, by its name in the whole model ``root``; nothing is changed.

    Args:
        plan: Patterns of module names, ``*`` for any one part of a name (``"layers.*.attn.q"``), to a style's name or a
            ``ParallelStyle``; a pattern may leave out leading parts of the name. Patterns of the names of parameters
            say how those of a module of ``"moe_tp_experts"`` are cut. ``None``: the model's own.
        parts: Over how many ranks they are to be split.
        without: Modules that are left out, with what is in them.

    Raises:
        PlanError: A pattern that matches nothing, an unknown style, sizes that don't divide, or no plan at all.
    """
    declared = plan is None
    if plan is None:
        plan = declared_plan(root, "tp")
        if not plan:
            raise PlanError(
                f"tensor_parallel_size={parts} needs a plan and {type(root).__name__} brings none: pass"
                ' tensor_parallel_plan, such as {"layers.*.attn.q": "colwise", "layers.*.attn.o": "rowwise"}.'
            )
    modules = dict(root.named_modules())
    parameters = dict(root.named_parameters())
    resolved: dict[str, ParallelStyle] = {}
    experts: list[str] = []
    cuts: dict[str, str] = {}
    for pattern, chosen in plan.items():
        names = [name for name in modules if matches(name, pattern)]
        own = [name for name in parameters if matches(name, pattern)] if not names else []
        if not names and not own:
            if declared:  # it serves all models of a kind, with dense layers or without
                continue
            raise PlanError(
                f"tensor_parallel_plan: {pattern!r} matches no module{similar(modules, pattern)}. Correct it or leave"
                " it out."
            )
        if own and chosen not in _CUTS:
            raise PlanError(
                f"tensor_parallel_plan: {pattern!r} names a parameter and has style {chosen!r}; those of parameters are"
                f' {sorted(_CUTS)}, of a module of style "{_EXPERTS}".'
            )
        cuts.update((name, str(chosen)) for name in own if not _is_in(name, without))
        for name in names:
            if _is_in(name, without):
                continue
            if chosen == _EXPERTS:
                experts.append(name)
            else:
                if declared and chosen == "colwise":
                    check_heads(modules, name, parts)
                if not (declared and _stays_whole(modules, name, chosen, parts)):
                    resolved.update(_styles(modules, name, pattern, chosen, parts))
    for name in experts:
        of_module = {key.rpartition(".")[2]: cuts.pop(key) for key in list(cuts) if key.rpartition(".")[0] == name}
        resolved[name] = _experts_style(name, modules[name], of_module, parts)
    if cuts:
        raise PlanError(
            f'tensor_parallel_plan: {", ".join(cuts)} are parameters of no module of style "{_EXPERTS}": name the'
            " module too, or name modules only."
        )
    if declared:
        _complete_sums(modules, resolved, parts)
    _complete_ties(root, modules, resolved, parts, declared=declared)
    return resolved


def _is_in(name: str, outer: Collection[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in outer)


def _stays_whole(modules: Mapping[str, nn.Module], name: str, chosen: Any, parts: int) -> bool:
    """Whether a declared plan's layer can't be split, and needn't be, since it is given and hands on what is whole.

    So a head and an embedding, of a vocabulary to which a token was added. Told of: they take memory on each rank.
    """
    style = STYLES.get(chosen)
    if not isinstance(style, Split) or (style.given, style.produced) != (_REPLICATED, _REPLICATED):
        return False
    try:
        [*_styles(modules, name, name, chosen, parts)]
    except IndivisibleError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:
            warnings.warn(f"{name} stays whole on every tensor rank. {error}", stacklevel=2)
        return True
    return False


def _styles(
    modules: Mapping[str, nn.Module], name: str, pattern: str, chosen: str | ParallelStyle, parts: int
) -> Iterator[tuple[str, ParallelStyle]]:
    """What a module's style means for it, and for what peft has put into its place."""
    module = modules[name]
    if chosen == _MLA:
        features = getattr(modules[name.rpartition(".")[0]], "qk_rope_head_dim", None)
        if type(features) is not int:
            raise PlanError(
                f"tensor_parallel_plan: {name} has style {_MLA!r}, and the module around it no qk_rope_head_dim: leave"
                " this attention out of the plan."
            )
        yield name, SharedByHeads(features)
        return
    style = _style(pattern, chosen)
    if isinstance(style, SummedGradients) and not module._parameters:
        raise PlanError(
            f"tensor_parallel_plan: {name}, a {type(module).__name__} of style {chosen!r}, has no parameters of its own"
            f" (matched by {pattern!r}): name the module that holds them, or leave it out."
        )
    if not isinstance(style, Split):
        yield name, style
        return
    if style.features is not None and (computing := weight_computed_by(module)):
        raise PlanError(
            f"tensor_parallel_plan: {name}, a {type(module).__name__} of style {chosen!r}, has its weight computed anew"
            f" by {computing}, which can't be done in parts: leave it, and layers that it works with, out of the plan."
        )
    split = layers_in_place(name, module, chosen, style.features)
    if name in split and style.features is not None and not module._parameters:
        raise PlanError(
            f"tensor_parallel_plan: {name}, a {type(module).__name__} of style {chosen!r}, has no parameters of its own"
            f" (matched by {pattern!r}): name a linear layer or an embedding, or leave it out."
        )
    for part, layer in split.items():
        if isinstance(layer, nn.Embedding) and (setting := _of_whole_tables(layer)):
            raise PlanError(
                f"tensor_parallel_plan: {part}, an Embedding of style {chosen!r}, has {setting}, which torch can't do"
                " on a part of a table: build it without, or leave it out of the plan."
            )
        if isinstance(layer, nn.Embedding) and style.given == _LAST:
            raise PlanError(
                f"tensor_parallel_plan: {part}, an Embedding of style {chosen!r}, is given indices, and not a part of"
                ' features: choose "embedding_rowwise" (by rows of the table) or "colwise_gather_output".'
            )
        if isinstance(layer, _OF_OTHER_INPUTS) and style.features is not None:
            raise PlanError(
                f"tensor_parallel_plan: {part}, a {type(layer).__name__} of style {chosen!r}: linear layers and"
                " embeddings can be split: leave it, and layers that it works with, out of the plan."
            )
        for key, parameter in layer.named_parameters(recurse=False):
            style.placement(layer, f"{part}.{key}", parameter, parts)
        yield part, style


_OF_OTHER_INPUTS = (nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.Bilinear, nn.RNNBase)
"""Layers of torch that have features elsewhere than in the last dim of one input, or compute more than a product."""


def _of_whole_tables(embedding: nn.Embedding) -> str:
    """The setting that takes a whole table, where there is one."""
    if embedding.max_norm is not None:
        return f"max_norm={embedding.max_norm}"
    return "sparse=True" if embedding.sparse else ""


def _experts_style(name: str, module: nn.Module, cuts: Mapping[str, str], parts: int) -> OwnShare:
    def refusal(reason: str) -> PlanError:
        return PlanError(
            f"tensor_parallel_plan: {name}, a {type(module).__name__} of style {_EXPERTS!r}, {reason}: leave it out of"
            " the plan, which computes it alike on all tensor ranks."
        )

    left = [key for key, _ in module.named_parameters() if key not in cuts]
    if left or not cuts:
        raise refusal(f"has parameters that the plan doesn't cut ({', '.join(left)})")
    if getattr(module, "is_concatenated", True) is False:
        raise refusal("has gate and up in turn, and not one after the other")
    if "forward" in vars(module):
        raise refusal("has a forward that was put on the object")
    placements: dict[str, Placement] = {}
    for key, cut in cuts.items():
        parameter = module.get_parameter(key)
        from_end, packed = _CUTS[cut]
        if parameter.ndim != 3:
            raise refusal(f"has {key} of shape {tuple(parameter.shape)}, and not [experts, …, …]")
        dim = parameter.ndim - from_end
        if parameter.size(dim) % (packed * parts):
            raise refusal(
                f"has {parameter.size(dim)} features in dim {dim} of {key}, which {packed * parts} must divide"
                f" ({packed} × tensor_parallel_size)"
            )
        placements[key] = Shard(dim) if packed == 1 else _StridedShard(dim, split_factor=packed)
    return OwnShare(placements)


def _complete_sums(modules: Mapping[str, nn.Module], resolved: dict[str, ParallelStyle], parts: int) -> None:
    """Parameters that plans of transformers forget, between layers that they split by features.

    Each rank's gradient of them would be of its own features alone: norms over each head (of Qwen3-VL-MoE, say), and
    activations with trained numbers (of Apertus).
    """
    for name, module in modules.items():
        own = [*module.parameters(recurse=False)]
        parent, _, key = name.rpartition(".")
        layer = {"q_norm": "q_proj", "k_norm": "k_proj", "act_fn": "up_proj"}.get(key)
        before = resolved.get(f"{parent}.{layer}")
        if name in resolved or not own or not isinstance(before, Split) or before.produced != _LAST:
            continue
        features = getattr(modules[f"{parent}.{layer}"], "out_features", 0)
        if all(parameter.numel() * parts <= features for parameter in own):
            resolved[name] = STYLES["replicated_with_grad_allreduce"]


def _complete_ties(
    root: nn.Module,
    modules: Mapping[str, nn.Module],
    resolved: dict[str, ParallelStyle],
    parts: int,
    *,
    declared: bool,
) -> None:
    """Split an embedding as the linear layer that shares its weight, and the other way round, by rows of both.

    Where that can't be, a model's own plan leaves both whole, and a user's is refused when it is applied.
    """
    for group in tied_parameters(root):
        owners = [name.rpartition(".")[0] for name in group]
        chosen = [resolved.get(owner) for owner in owners]
        by_rows = [isinstance(style, Split) and style.features in ("out", "rows") for style in chosen]
        for owner, style in zip(owners, chosen):
            if style is None and any(by_rows):
                name = _style_by_rows(modules[owner])
                if name is not None:
                    resolved.update(_styles(modules, owner, owner, name, parts))
                elif declared:
                    for split in owners:
                        resolved.pop(split, None)
                    break


def _style_by_rows(module: nn.Module) -> str | None:
    """An embedding or a linear layer with nothing beside what torch's have: a class of its own may scale, say."""
    if isinstance(module, nn.Embedding) and module._parameters.keys() == {"weight"} and not _of_whole_tables(module):
        return "embedding_rowwise"
    return "colwise_gather_output" if type(module) is nn.Linear else None


def apply_tensor_parallel(root: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Split modules of ``root`` over ``mesh``, in place.

    Args:
        root: The model, or this stage of it; its parameters hold the same values on every rank of ``mesh``, or are on
            meta.
        mesh: The one-dimensional tensor axis.
        styles: As :func:`resolve_plan` gave them, for the modules that are here.

    Raises:
        PlanError: Tied parameters are split in different ways, or only some.
    """
    tied = tied_parameters(root)
    for name, style in styles.items():
        style._apply(root.get_submodule(name), mesh)
    _keep_tied(root, tied)


def _style(pattern: str, style: str | ParallelStyle) -> ParallelStyle:
    if isinstance(style, ParallelStyle):
        return style
    if style not in STYLES:
        raise PlanError(
            f"tensor_parallel_plan: {pattern!r} has style {style!r}; known are {sorted(_NAMES)}, or pass a"
            " torch.distributed.tensor.parallel.ParallelStyle. (Of a model's own plan, leave out all layers that this"
            " one works with, such as the whole attention.)"
        )
    return STYLES[style]


def _keep_tied(root: nn.Module, tied: list[tuple[str, ...]]) -> None:
    """Have tied parameters that were split alike be one again."""
    for group in tied:
        copies: list[Any] = [root.get_parameter(name) for name in group]
        first = copies[0]
        if all(copy is first for copy in copies):
            continue
        if not all(isinstance(copy, DTensor) and copy.placements == first.placements for copy in copies):
            raise PlanError(
                f"tensor_parallel_plan splits the tied parameters {list(group)} in different ways, or only some: leave"
                " their modules out of the plan, split an embedding by embedding_rowwise and a linear layer by colwise"
                " styles, or untie them."
            )
        for name in group[1:]:
            owner, _, key = name.rpartition(".")
            root.get_submodule(owner).register_parameter(key, first)
