"""Plans by names of modules: those that transformers models declare, and how a pattern's names are matched."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from typing import Literal

from torch import nn


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


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted name, or its end, is of a pattern whose ``*`` stands for any one part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts[-len(wanted) :], wanted))


def similar(names: Iterable[str], pattern: str) -> str:
    """What an error says of names that end as a pattern does, which matches none."""
    last = pattern.rpartition(".")[2]
    near = [name for name in names if name and name.rpartition(".")[2] == last]
    return f"; modules with that last name: {near[:4]}" if near else ""
