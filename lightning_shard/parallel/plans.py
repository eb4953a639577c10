"""Plans by names of modules: those that transformers models declare, and how a pattern's names are matched."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

from torch import nn
from torch.nn.utils import parametrize

from lightning_shard.errors import PlanError


def check_plan(name: str, plan: Any, known: Collection[str], kinds: type | tuple[type, ...] = ()) -> None:
    """Check a user's own plan, as far as it can be without the model; ``None`` is the model's.

    Args:
        name: The setting's, for errors.
        known: Names of styles.
        kinds: Of objects that are styles too.

    Raises:
        PlanError: It isn't a mapping of patterns to styles, or has an unknown style.
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
    """What transformers models in ``root`` declare, by names in ``root``; empty where there is none.

    transformers 5: ``config.base_model_tp_plan`` for the base model, ``_tp_plan`` of the class for its head; the same
    with ``ep`` for experts. A wrapper such as peft's passes their attributes on, so the class is asked.
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
    """Of a layer that is split by output features and makes whole heads, a part has to be some whole heads.

    Args:
        modules: By name; transformers' attention modules know their ``head_dim``.

    Raises:
        PlanError: It isn't.
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
    """Whether a dotted name, or its end, is of a pattern whose ``*`` stands for any one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts[-len(wanted) :], wanted))


def similar(names: Iterable[str], pattern: str) -> str:
    """What an error says of names that end as a pattern does, which matches none."""
    last = pattern.rpartition(".")[2]
    near = [name for name in names if name and name.rpartition(".")[2] == last]
    return f"; modules with that last name: {near[:4]}" if near else ""


def weight_computed_by(module: nn.Module) -> str:
    """What it is: a parametrization, or a hook of ``torch.nn.utils`` such as its older weight_norm."""
    if parametrize.is_parametrized(module):
        lists: Any = module.parametrizations
        return ", ".join(type(each).__name__ for of_one in lists.values() for each in of_one)
    hooks = [hook for hook in module._forward_pre_hooks.values() if type(hook).__module__.startswith("torch.nn.utils.")]
    return ", ".join(type(hook).__name__ for hook in hooks)
