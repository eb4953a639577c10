"""Lists of a network's modules: torch's own, and modules whose forward runs what they hold one after the other."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lightning_shard.parallel.source_order import loops, loops_over_children, methods_run

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def is_list(module: nn.Module) -> bool:
    return isinstance(module, LISTS) or loops_over_children(module)


def children_of(root: nn.Module, path: str) -> list[str]:
    """Names of a list's modules, each by its first name in ``root``; for any other module, its own name."""
    module = root.get_submodule(path)
    if not is_list(module):
        return [path]
    named = first_names(root)
    return [named[id(child)] for child in held_by(module)]


def first_names(root: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in root.named_modules()}


def held_by(listed: nn.Module) -> Iterator[nn.Module]:
    """A list's modules, repeated ones as often as they are in it. A place may hold ``None``, and is left out."""
    return (module for module in listed._modules.values() if module is not None)


def run_in_turn(root: nn.Module, one: str, other: str) -> bool:
    """Whether one loop runs two lists of one length: ``for a, f in zip(self.attentions, self.feedforwards)``."""
    parent, _, name = one.rpartition(".")
    other_parent, _, other_name = other.rpartition(".")
    if parent != other_parent or len(children_of(root, one)) != len(children_of(root, other)):
        return False
    inside = loops(type(root.get_submodule(parent)), methods_run(root))
    return any(name in used and other_name in used for used in inside)


def trains(module: nn.Module) -> bool:
    """Whether a module has trained parameters; used since a frozen teacher may have more blocks than the network."""
    return any(parameter.requires_grad for parameter in module.parameters())
