"""Resolve a tensor-parallel plan to one style of ``styles.py`` per module, and apply the styles.

A plan maps patterns of module names to styles. :func:`resolve_plan` checks it on the whole model and changes nothing;
:func:`apply_tensor_parallel` splits the modules.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Shard,
)
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_shard.errors import PlanError
from lightning_shard.parallel.blocks import tied_parameters
from lightning_shard.parallel.plans import check_heads, declared_plan, matches, similar, weight_computed_by
from lightning_shard.parallel.tensor.styles import (
    BY_HEADS,
    CUTS,
    EXPERTS,
    LAST,
    MLA,
    MODULE_STYLE_NAMES,
    REPLICATED,
    STYLES,
    IndivisibleError,
    SharedOutput,
    Split,
    SummedGradients,
    SummedOutput,
    layers_in_place,
)
from lightning_shard.torch_private import StridedShard

Plan = Mapping[str, str | ParallelStyle]


def resolve_plan(
    root: nn.Module, plan: Plan | None, parts: int, without: Collection[str] = ()
) -> dict[str, ParallelStyle]:
    """The style of every module that a plan splits, by the module's name in ``root``; changes nothing.

    Args:
        root: The whole model.
        plan: Patterns of module names to a style's name or a ``ParallelStyle``. In a pattern, ``*`` stands for any one
            part of a name (``"layers.*.attn.q"``), and leading parts may be left out. Patterns of parameter names say
            how the parameters of a module of style ``"moe_tp_experts"`` are sharded. ``None``: the model's own plan.
        parts: The size of the tensor axis.
        without: Names of modules that are left out, with everything inside of them.

    Raises:
        PlanError: A pattern matches nothing, a style is unknown, ``parts`` doesn't divide a size, or there is no plan.
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
    first_names = _first_names(root)
    parameters = dict(root.named_parameters())
    resolved: dict[str, ParallelStyle] = {}
    experts: list[str] = []
    cuts: dict[str, str] = {}
    for pattern, chosen in plan.items():
        names = [*dict.fromkeys(first for name, first in first_names.items() if matches(name, pattern))]
        own = [name for name in parameters if matches(name, pattern)] if not names else []
        if not names and not own:
            if declared:  # one declared plan serves all models of a class, such as with dense layers or without
                continue
            raise PlanError(
                f"tensor_parallel_plan: {pattern!r} matches no module{similar(modules, pattern)}. Correct it or leave"
                " it out."
            )
        if own and chosen not in CUTS:
            raise PlanError(
                f"tensor_parallel_plan: {pattern!r} names a parameter and has style {chosen!r}; those of parameters are"
                f' {sorted(CUTS)}, of a module of style "{EXPERTS}".'
            )
        cuts.update((name, str(chosen)) for name in own if not _is_in(name, without))
        for name in names:
            if _is_in(name, without):
                continue
            if chosen == EXPERTS:
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
            f'tensor_parallel_plan: {", ".join(cuts)} are parameters of no module of style "{EXPERTS}": name the'
            " module too, or name modules only."
        )
    if declared:
        _complete_sums(modules, resolved, parts)
    _complete_ties(root, first_names, resolved, parts, declared=declared)
    return resolved


def _first_names(root: nn.Module) -> dict[str, str]:
    """Every name of every module, as of one that is held in two places, to its first name."""
    firsts = {module: name for name, module in root.named_modules()}
    return {name: firsts[module] for name, module in root.named_modules(remove_duplicate=False)}


def _is_in(name: str, outer: Collection[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in outer)


def _stays_whole(modules: Mapping[str, nn.Module], name: str, chosen: Any, parts: int) -> bool:
    """Whether a layer of a declared plan stays whole: ``parts`` doesn't divide it, and its input and output are whole.

    For example a head or an embedding with a vocabulary to which a token was added.
    """
    style = STYLES.get(chosen)
    if not isinstance(style, Split) or (style.input_layout, style.output_layout) != (REPLICATED, REPLICATED):
        return False
    try:
        [*_styles(modules, name, name, chosen, parts)]
    except IndivisibleError:
        return True
    return False


def _styles(
    modules: Mapping[str, nn.Module], name: str, pattern: str, chosen: str | ParallelStyle, parts: int
) -> Iterator[tuple[str, ParallelStyle]]:
    """Check a module against its style; yields names and styles of the module, or of peft's modules in its place."""
    module = modules[name]
    if chosen == MLA:
        features = getattr(modules[name.rpartition(".")[0]], "qk_rope_head_dim", None)
        if type(features) is not int:
            raise PlanError(
                f"tensor_parallel_plan: {name} has style {MLA!r}, and the module around it no qk_rope_head_dim: leave"
                " this attention out of the plan."
            )
        yield name, SharedOutput(features)
        return
    style = _style(pattern, chosen)
    if isinstance(style, SummedGradients) and not module._parameters:
        if next(module.parameters(), None) is None:  # a norm without a scale: no gradients to sum
            return
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
        if isinstance(layer, nn.Embedding) and style.input_layout == LAST:
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


_OF_OTHER_INPUTS = (nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.Bilinear, nn.RNNBase, nn.EmbeddingBag)
"""torch's layers whose features aren't in the last dim of one input, or that compute more than a product or lookup."""


def _of_whole_tables(embedding: nn.Embedding) -> str:
    """The setting of an embedding, if there is one, that works on a whole table only."""
    if embedding.max_norm is not None:
        return f"max_norm={embedding.max_norm}"
    return "sparse=True" if embedding.sparse else ""


def _experts_style(name: str, module: nn.Module, cuts: Mapping[str, str], parts: int) -> SummedOutput:
    def refusal(reason: str) -> PlanError:
        return PlanError(
            f"tensor_parallel_plan: {name}, a {type(module).__name__} of style {EXPERTS!r}, {reason}: leave it out of"
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
        from_end, packed = CUTS[cut]
        if parameter.ndim != 3:
            raise refusal(f"has {key} of shape {tuple(parameter.shape)}, and not [experts, …, …]")
        dim = parameter.ndim - from_end
        if parameter.size(dim) % (packed * parts):
            raise refusal(
                f"has {parameter.size(dim)} features in dim {dim} of {key}, which {packed * parts} must divide"
                f" ({packed} × tensor_parallel_size)"
            )
        placements[key] = Shard(dim) if packed == 1 else StridedShard(dim, split_factor=packed)
    return SummedOutput(placements)


_SPLIT_BEFORE = {
    "q_norm": "q_proj",
    "k_norm": "k_proj",
    "q_layernorm": "q_proj",
    "k_layernorm": "k_proj",
    "act_fn": "up_proj",
}
"""Modules that plans of transformers forget: the module's name to the name of the layer whose output it is given."""


def _complete_sums(modules: Mapping[str, nn.Module], resolved: dict[str, ParallelStyle], parts: int) -> None:
    """Add styles for modules with parameters that plans of transformers forget, between layers split by features.

    These are norms over each head (such as Qwen3-VL-MoE's) and activations with parameters (Apertus'). Without a style,
    each rank's gradient would be that of its own features alone. Norms with separate weights for each head (Cohere's)
    are sharded with the heads.
    """
    for name, module in modules.items():
        own = [*module.parameters(recurse=False)]
        parent, _, key = name.rpartition(".")
        layer = _SPLIT_BEFORE.get(key)
        before = resolved.get(f"{parent}.{layer}")
        if name in resolved or not own or not isinstance(before, Split) or before.output_layout != LAST:
            continue
        features = getattr(modules[f"{parent}.{layer}"], "out_features", 0)
        if all(parameter.numel() * parts <= features for parameter in own):
            resolved[name] = STYLES["replicated_with_grad_allreduce"]
        elif all(parameter.ndim == 2 and parameter.numel() == features for parameter in own):
            resolved[name] = BY_HEADS


def _complete_ties(
    root: nn.Module,
    first_names: Mapping[str, str],
    resolved: dict[str, ParallelStyle],
    parts: int,
    *,
    declared: bool,
) -> None:
    """If an embedding and a linear layer share a weight and one of them is split by rows, split the other so too.

    If that isn't possible, the model's own plan leaves both whole; a user's plan is refused when it is applied.
    """
    modules = dict(root.named_modules())
    for group in tied_parameters(root):
        owners = [*dict.fromkeys(first_names[name.rpartition(".")[0]] for name in group)]
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
    """The style that splits a plain embedding or linear layer by rows; ``None`` for others, which may scale, say."""
    if isinstance(module, nn.Embedding) and module._parameters.keys() == {"weight"} and not _of_whole_tables(module):
        return "embedding_rowwise"
    return "colwise_gather_output" if type(module) is nn.Linear else None


def apply_tensor_parallel(root: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Split modules of ``root`` over ``mesh``, in place.

    Args:
        root: The model, or this stage of it. Its parameters have the same values on every rank of ``mesh``, or are on
            meta.
        mesh: The one-dimensional tensor axis.
        styles: The result of :func:`resolve_plan`, for the modules of ``root``.

    Raises:
        PlanError: Tied parameters are split in different ways, or only some of them are.
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
            f"tensor_parallel_plan: {pattern!r} has style {style!r}; known are {sorted(MODULE_STYLE_NAMES)}, or pass a"
            " torch.distributed.tensor.parallel.ParallelStyle. (Of a model's own plan, leave out all layers that this"
            " one works with, such as the whole attention.)"
        )
    return STYLES[style]


def _keep_tied(root: nn.Module, tied: list[tuple[str, ...]]) -> None:
    """Make tied parameters, which were split in the same way, one object again."""
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
