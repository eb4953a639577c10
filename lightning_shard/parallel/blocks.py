"""Find a model's repeated blocks, and what stands before and after them.

A model is cut, sharded and initialised block by block, so the blocks are found once, by name, and everything else
follows: a pipeline stage is a range of them; what runs before them belongs to the first stage, what runs after them to
the last.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType

from torch import nn

from lightning_shard.errors import PlacementError

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of ``root`` and the parts around them, all as dotted names in ``root``.

    Attributes:
        path: The list that holds the blocks, such as ``"model.layers"``.
        names: Every block's name, in order.
        network: The module that a step calls: the first part of ``path``, or ``""`` where that is ``root`` itself.
        before: Modules and bare parameters of the network that run before the blocks.
        after: Those that run after them.
    """

    path: str
    names: tuple[str, ...]
    network: str
    before: tuple[str, ...]
    after: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.names)

    def modules(self, root: nn.Module) -> list[nn.Module]:
        return [root.get_submodule(name) for name in self.names]


def block_lists(root: nn.Module) -> dict[str, list[str]]:
    """Every outermost list of at least two modules of one class that hold parameters: its path, and its blocks' names.

    A list inside a block (the experts of a mixture, say) isn't one of the model's.
    """
    found: dict[str, list[str]] = {}
    for path, module in root.named_modules():
        if not isinstance(module, _LISTS) or any(path.startswith(f"{outer}.") for outer in found):
            continue
        children = dict(module.named_children())
        alike = len({type(child) for child in children.values()}) == 1
        if len(children) > 1 and alike and all(any(True for _ in child.parameters()) for child in children.values()):
            found[path] = [f"{path}.{name}" for name in children]
    return found


def find_blocks(root: nn.Module, path: str | None = None) -> Blocks:
    """The blocks at ``path``, or the longest list of like modules that are trained, if any are.

    Args:
        root: The LightningModule.
        path: A list of blocks by its name in ``root`` or by the end of that name: ``"layers"`` finds ``"model.layers"``
            where no other list ends so.

    Raises:
        PlacementError: No list, or none by this name; says which there are.
    """
    lists = block_lists(root)
    if path is None:
        if not lists:
            raise PlacementError(
                f"{type(root).__name__} has no list of repeated blocks (an nn.ModuleList, nn.Sequential or"
                " nn.ModuleDict of at least two modules of one class): name it by pipeline_blocks, or use"
                " pipeline_parallel_size=1."
            )
        path = max(lists, key=lambda name: (_trains(root.get_submodule(name)), len(lists[name]), _size(root, name)))
    else:
        path = _resolve(root, path, lists)
    names = tuple(f"{path}.{name}" for name, _ in root.get_submodule(path).named_children())
    head, _, rest = path.partition(".")
    network = head if rest else ""
    before, after = _surroundings(root, path, network)
    return Blocks(path, names, network, tuple(before), tuple(after))


def tied_parameters(root: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names that share one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _resolve(root: nn.Module, path: str, lists: dict[str, list[str]]) -> str:
    matches = [
        name
        for name, module in root.named_modules()
        if isinstance(module, _LISTS) and (name == path or name.endswith(f".{path}"))
    ]
    exact = [name for name in matches if name == path]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    problem = f"fits {matches}" if matches else "is not a list of modules"
    raise PlacementError(
        f"pipeline_blocks={path!r} {problem} in {type(root).__name__}: name one of {sorted(lists) or 'its lists'} in"
        " full."
    )


def _trains(module: nn.Module) -> bool:
    """A frozen teacher may have more blocks than the network that is trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _size(root: nn.Module, path: str) -> int:
    return sum(parameter.numel() for parameter in root.get_submodule(path).parameters())


def _surroundings(root: nn.Module, path: str, network: str) -> tuple[list[str], list[str]]:
    """What the network holds beside the blocks, split by whether it runs before or after them."""
    before: list[str] = []
    after: list[str] = []
    prefix = network
    for step in path.removeprefix(f"{network}." if network else "").split("."):
        level = root.get_submodule(prefix)
        held = [name for name, _ in level.named_children()] + [
            name for name, _ in level.named_parameters(recurse=False)
        ]
        earlier = _runs_before(level, step, held)
        for name in held:
            if name != step:
                (before if name in earlier else after).append(f"{prefix}.{name}" if prefix else name)
        prefix = f"{prefix}.{step}" if prefix else step
    return before, after


def _runs_before(level: nn.Module, blocks: str, held: list[str]) -> set[str]:
    """The names that ``forward`` reads before it reads ``blocks``; registration order for names that it doesn't read.

    The order in which the code names its parts is only a first guess of the order in which they run. A wrong one can't
    pass unseen: what a stage doesn't hold raises when it's used on the wrong side of the blocks
    (``pipeline/stage.py``).
    """
    used: list[str] = []
    for method in ("forward", "training_step"):
        used = list(dict.fromkeys(name for name in _attributes_read(type(level), method, depth=3) if name in held))
        if blocks in used:
            break
    else:
        used = []
    place = {name: i for i, name in enumerate(used)}
    children = [name for name in held if name in dict(level.named_children())]
    registered = {name: i for i, name in enumerate(children)}
    earlier = set()
    for name in held:
        if name in place:
            if place[name] < place[blocks]:
                earlier.add(name)
        elif name not in registered or registered[name] < registered[blocks]:
            earlier.add(name)
    return earlier


def _attributes_read(cls: type, method: str, depth: int) -> Iterator[str]:
    """Names of attributes in the order in which a method's code reads them, its class's own methods unfolded."""
    function = inspect.unwrap(getattr(cls, method, None) or (lambda: None))
    code = getattr(function, "__code__", None)
    if not isinstance(code, CodeType):
        return
    for instruction in dis.get_instructions(code):
        if instruction.opname not in ("LOAD_ATTR", "LOAD_METHOD") or not isinstance(instruction.argval, str):
            continue
        name = instruction.argval
        if depth and name != method and inspect.isfunction(inspect.getattr_static(cls, name, None)):
            yield from _attributes_read(cls, name, depth - 1)
        else:
            yield name
