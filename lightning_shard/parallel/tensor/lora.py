"""What peft puts in the place of layers that a tensor-parallel plan splits, and how that is split with them."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_shard.errors import PlanError

_WITH_LORA = ("colwise", "colwise_gather_output", "rowwise", "rowwise_split_input")


def layers_in_place(name: str, module: nn.Module, style: Any, features: str | None) -> dict[str, nn.Module]:
    """The layers, by name, that are split as a plan says of ``name``: the module itself where it is a plain one.

    Args:
        style: As the plan names it.
        features: Which of a layer's features that splits.

    Raises:
        PlanError: Of an adapter it isn't known how.
    """
    if isinstance(getattr(module, "base_layer", None), nn.Module):
        return _with_lora(name, module, style, features)
    copies = getattr(module, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict) and isinstance(getattr(module, "original_module", None), nn.Module):
        # one of them is called in its place
        return {f"{name}.original_module": module.get_submodule("original_module")} | {
            f"{name}.modules_to_save.{key}": copy for key, copy in copies.items()
        }
    return {name: module}


def _with_lora(name: str, module: nn.Module, style: Any, features: str | None) -> dict[str, nn.Module]:
    """What of a layer of peft's LoRA is split as the layer that it adapts: that, and ``A`` or ``B``.

    ``y = x·W + (x·A)·B``. Where ``W`` is split by output features, so is ``B``, and ``x·A`` is computed alike on all
    ranks; where it is split by input features, so is ``A``, and ``(x·A)·B`` is.
    """
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
