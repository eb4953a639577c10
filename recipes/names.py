"""Refuses unknown names in the configuration and on the command line, and suggests the nearest known name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

CONFIG = Path(__file__).parents[1] / "conf"
# Settings of a group that train.py uses itself, in addition to those of the group's target.
OF_TRAINING = {"checkpoint": {"resume", "storage_options"}}
OF_HYDRA = {"_target_", "_args_", "_convert_", "_partial_", "_recursive_"}


def refuse_unknown_overrides(arguments: Sequence[str]) -> None:
    """Exit at the first override of a key that the configuration doesn't have.

    Other errors in overrides are left to Hydra, which reports them itself.
    """
    try:
        overrides = OverridesParser.create().parse_overrides([a for a in arguments if "=" in a and a[0] != "-"])
        groups = [o for o in overrides if (CONFIG / o.key_or_group).is_dir()]
        with initialize_config_dir(str(CONFIG), version_base="1.3"):
            config = compose("config", [str(group.input_line) for group in groups])
    except HydraException:
        return
    values = dict(walk(OmegaConf.to_container(config)))
    known = set(values) | {path.name for path in CONFIG.iterdir() if path.is_dir()}
    for override in overrides:
        key = override.key_or_group
        if key in known or override.is_add() or override.is_force_add() or key.split(".")[0].startswith("hydra"):
            continue
        parent, _, name = key.rpartition(".")
        if name in parameters(values.get(parent)):
            sys.exit(f"key {key} isn't in the configuration: to add it, write +{override.input_line}")
        sys.exit(unknown(key, known))


def refuse_unknown_names(config: DictConfig) -> None:
    """Exit at the first name that isn't a parameter of its target, or at a missing value (``???``)."""
    for path, node in walk(OmegaConf.to_container(config)):
        if node == "???":
            sys.exit(f"{path} must be given: {path}=…")
        if accepted := parameters(node):
            accepted |= OF_HYDRA | OF_TRAINING.get(path, set())
            for name in node.keys() - accepted:
                sys.exit(unknown(f"{path}.{name}", {f"{path}.{known}" for known in accepted}))


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and value of everything in a configuration."""
    for name, value in config.items():
        yield f"{prefix}{name}", value
        if isinstance(value, dict):
            yield from walk(value, f"{prefix}{name}.")


def parameters(node: Any) -> set[str]:
    """The parameter names of a node's target; empty if there is no target, or it accepts any name."""
    if not isinstance(node, dict) or "_target_" not in node:
        return set()
    try:
        taken = inspect.signature(get_object(node["_target_"])).parameters
    except ValueError:  # a class in C has no signature, and refuses unknown names itself
        return set()
    return set() if any(p.kind is p.VAR_KEYWORD for p in taken.values()) else set(taken)


def unknown(key: str, known: set[str]) -> str:
    nearest = get_close_matches(key, sorted(known), n=1)
    return f"unknown key {key}" + (f": did you mean {nearest[0]}?" if nearest else "")
