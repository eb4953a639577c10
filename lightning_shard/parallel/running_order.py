"""The running order of blocks, and of the parts around them: a guess from source code.

A wrong guess costs communication or is refused, but can't give wrong numbers: a value that a stage doesn't hold is
tainted as unknown there (``pipeline/dataflow/taint.py``), and a part may not change buffers there.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_shard.parallel.containers import has_forward
from lightning_shard.parallel.module_lists import children_of, first_names, run_in_turn, trains
from lightning_shard.parallel.source_order import attributes_used, loops_first, methods_run
from lightning_shard.scripted import is_scripted


def lay_out(root: nn.Module, groups: dict[str, list[str]], network: str) -> tuple[list[str], list[tuple[str, int]]]:
    """All blocks in running order, and the parts around them with the indices of the blocks that they run before."""
    names: list[str] = []
    parts: list[tuple[str, int]] = []

    def add(name: str) -> None:
        module = root.get_submodule(name) if name not in own else None
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            parts.append((name, len(names)))
            return
        beside = next((path for path in groups if run_in_turn(root, path, name)), None)
        for child, block in zip(children_of(root, name), groups.get(beside or "", [""] * len(module))):
            if beside is None:
                add(child)
            else:
                turns.append((child, block))

    own = {name for name, _ in root.named_parameters()}
    turns: list[tuple[str, str]] = []
    named = first_names(root)
    blocks = {id(root.get_submodule(name)) for group in groups.values() for name in group}

    def holds_listed(module: nn.Module) -> bool:
        """Whether it holds blocks that are listed elsewhere: a level of a U, which holds the next level too."""
        return id(module) not in blocks and any(id(each) in blocks for each in module.modules())

    def visit(path: str, *, listed_elsewhere: bool = False) -> None:
        if path in groups:
            names.extend(groups[path])
            return
        level = root.get_submodule(path)
        prefix = f"{path}." if path else ""
        children = [name for name, _ in level.named_children()]
        bare = [name for name, _ in level.named_parameters(recurse=False)]
        own_lists = [n for n in children if any(g == prefix + n or g.startswith(f"{prefix}{n}.") for g in groups)]
        carriers = [n for n in children if n in own_lists or holds_listed(level.get_submodule(n))]

        def runs(name: str, rest: str) -> bool:
            """Whether code that uses ``name.rest`` may run it, or blocks in it: not so for ``self.model.embed(x)``."""
            if name in children and rest in dict(level.get_submodule(name).named_buffers()):
                return False  # all stages have buffers
            full = f"{prefix}{name}.{rest}"
            return name not in own_lists or not rest or any(g.startswith(full) or full.startswith(g) for g in groups)

        for name in _running_order(level, children, bare, carriers, runs, methods_run(root)):
            if name in carriers:
                visit(prefix + name, listed_elsewhere=listed_elsewhere or name not in own_lists)
            elif name in bare:
                add(prefix + name)
            elif id(child := level.get_submodule(name)) in blocks:
                continue
            elif _is_part(child, outside=not path, beside=bool(network)):
                add(named[id(child)] if listed_elsewhere else prefix + name)

    visit("")
    return names, [*parts, *((part, names.index(block)) for part, block in turns)]


def _is_part(module: nn.Module, *, outside: bool, beside: bool) -> bool:
    """Whether a stage holds a module for all; else it belongs to the code around the blocks, which all stages run.

    Args:
        outside: Whether it is the root's own.
        beside: Whether the network is another module of the root's.
    """
    if is_scripted(module) or _counts_only(module):
        return False
    return not outside or trains(module) or (not beside and any(True for _ in module.parameters()))


def _counts_only(module: nn.Module) -> bool:
    """Whether it is a metric, or a container of metrics only."""
    if isinstance(module, (Metric, MetricCollection)):
        return True
    held = list(module.children())
    return bool(held) and not has_forward(module) and all(map(_counts_only, held))


def _running_order(
    level: nn.Module,
    children: list[str],
    bare: list[str],
    carriers: list[str],
    runs: Callable[[str, str], bool],
    run: Set[str],
) -> list[str]:
    """A module's children and bare parameters, in the order in which its code first uses them.

    Of those that the code doesn't name, bare parameters come first, and a child keeps its registration order relative
    to the children with blocks.

    Args:
        carriers: The children that contain blocks.
        runs: Whether a use of attribute ``rest`` of a child counts as running it.
        run: The names of methods that may run in a step.
    """
    held = {*children, *bare}
    used: list[str] = []
    for method in ("training_step", "forward"):
        names = (name.partition(".") for name in attributes_used(type(level), method, depth=4))
        used = list(dict.fromkeys(name for name, _, rest in names if name in held and runs(name, rest)))
        if any(name in carriers for name in used):
            break
    else:
        used = []
    below = {*dict(level.named_modules(remove_duplicate=False)), *dict(level.named_parameters(remove_duplicate=False))}
    order = loops_first(type(level), used, carriers, below, run)
    for name in [child for child in carriers if child not in order]:
        order.append(name)
    place = {name: index for index, name in enumerate(children)}
    for name in reversed([child for child in children if child not in order]):
        earlier = [order.index(carrier) for carrier in carriers if place[carrier] < place[name]]
        order.insert(max(earlier) + 1 if earlier else 0, name)
    return [*(name for name in bare if name not in order), *order]
