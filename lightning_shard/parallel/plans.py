"""Parallel plans as patterns of module names: checks, the plans that transformers models declare, and matching."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from torch import nn
from torch.nn.utils import parametrize

from lightning_shard.errors import PlanError


def check_plan(name: str, plan: Any, known: Collection[str], kinds: type | tuple[type, ...] = ()) -> None:
    """Check a user's plan, as far as that is possible without the model; ``None`` stands for the model's own plan.

    Args:
        name: Name of the setting, for errors.
        plan: The value of the setting.
        known: Names of styles.
        kinds: Classes whose instances are styles too.

    Raises:
        PlanError: The plan isn't a mapping of patterns to styles, or has an unknown style.
    """
    if plan is None:
        return
    if not isinstance(plan, Mapping):
        raise PlanError(
            f"{name}={plan!r} must be a mapping of patterns of names to styles, such as"
            f' {{"layers.*.name": "{min(known)}"}}.'
        )
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise PlanError(f'{name}: {pattern!r} is no pattern of names, such as "layers.*.name": use a text.')
        if not isinstance(style, kinds) and not (isinstance(style, str) and style in known):
            objects = f", or pass a {kinds.__name__}" if isinstance(kinds, type) else ""
            raise PlanError(f"{name}: {pattern!r} has style {style!r}; known are {sorted(known)}{objects}.")


def declared_plan(root: nn.Module, kind: Literal["tp", "ep"]) -> dict[str, str]:
    """The plans that transformers models in ``root`` declare, by names in ``root``; empty if there are none.

    transformers 5 declares ``config.base_model_tp_plan`` for the base model, and ``_tp_plan`` of the class for its
    head; the same with ``ep`` for experts. ``base_model_prefix`` and ``_tp_plan`` are read from the class, since a
    wrapper such as peft's forwards instance attributes to the model that it wraps.
    """
    plan: dict[str, str] = {}
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        base = getattr(type(module), "base_model_prefix", None)
        config = getattr(module, "config", None)
        if not isinstance(base, str) or config is None or any(key.startswith(prefix) for key in plan):
            continue
        held = f"{prefix}{base}." if isinstance(getattr(module, base, None), nn.Module) and base else prefix
        for pattern, style in (getattr(config, f"base_model_{kind}_plan", None) or {}).items():
            plan[held + pattern] = style
        for pattern, style in (getattr(type(module), f"_{kind}_plan", None) or {}).items():
            plan[prefix + pattern] = style
    return plan


def check_heads(modules: Mapping[str, nn.Module], name: str, parts: int) -> None:
    """Check that ``parts`` divides the heads of a query or key projection that is split by output features.

    Args:
        modules: Modules by name; transformers' attention modules have a ``head_dim``.
        name: Name of the layer.
        parts: Size of the tensor axis.

    Raises:
        PlanError: A part wouldn't be a whole number of heads.
    """
    owner, _, kind = name.rpartition(".")
    features = getattr(modules[name], "out_features", None)
    size = getattr(modules[owner], "head_dim", None)
    if kind not in _OF_HEADS or not isinstance(features, int) or not isinstance(size, int) or size < 1:
        return
    if features % size == 0 and features // size % parts:
        raise PlanError(
            f"{name} makes {features // size} heads of {size} features, which tensor_parallel_size ({parts}) must"
            f" divide ({_OF_HEADS[kind]} of the model's configuration): choose another size, or use"
            " tensor_parallel_size=1."
        )


_OF_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


def matches(name: str, pattern: str) -> bool:
    """Whether the last parts of a dotted name match a pattern; ``*`` in it stands for any one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts[-len(wanted) :], wanted))


def similar(names: Iterable[str], pattern: str) -> str:
    """For the error of a pattern without a match: a clause that names modules with the pattern's last part."""
    last = pattern.rpartition(".")[2]
    near = [name for name in names if name and name.rpartition(".")[2] == last]
    return f"; modules with that last name: {near[:4]}" if near else ""


def weight_computed_by(module: nn.Module) -> str:
    """Names of what computes a module's weight: parametrizations, or ``torch.nn.utils`` hooks (old weight_norm)."""
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        return ", ".join(type(each).__name__ for of_one in lists.values() for each in of_one)
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return ", ".join(type(hook).__name__ for hook in hooks)
