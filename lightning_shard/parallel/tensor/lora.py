"""Split the modules that peft puts in the place of layers (LoRA, ``modules_to_save``) by a tensor-parallel plan."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_shard.errors import PlanError

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
