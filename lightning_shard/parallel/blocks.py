"""Find a model's repeated blocks, and the place of every other part among them in running order.

A model is cut, sharded and initialised block by block. So the blocks are found once, by name, in the order in which
they run, and the rest follows from that order: a pipeline stage is a range of blocks, and a part around the blocks
belongs to the stage of the block that it runs before.

Order is guessed from source code (``running_order.py``), and corrected by a run where there is an example input
(:meth:`Blocks.ordered`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate

from torch import Tensor, nn

from lightning_shard.errors import PlacementError
from lightning_shard.parallel.containers import has_forward
from lightning_shard.parallel.running_order import (
    attributes_used,
    children_of,
    first_names,
    held_by,
    is_list,
    lay_out,
    loops,
    run_in_turn,
    trains,
)

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_SMALL = 0.1
"""A list whose blocks have other classes than the largest list's is cut only if it has at least this share of its size.

Sizes are numbers of parameters, without those of embedding tables, which are looked up.
"""
_USELESS = 0.8
"""Lists aren't cut if so large a share of the size runs between two of their cuts, and other modules share it."""
_FINE = 0.35
"""Modules of at most this share of the size aren't opened to cut between their parts."""


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of ``root`` and the parts around them, all as dotted names in ``root``.

    Attributes:
        names: Every block's name in running order; a block that runs several times appears as often.
        network: The module that a step calls: the first part of all names, or ``""`` if it is ``root`` itself.
        parts: Modules and bare parameters around the blocks, each with the index in ``names`` of the block that it runs
            before; ``len(names)`` if it runs after all blocks. Without metrics. Of the root's own modules those with
            parameters, and outside of the network only those that are trained.
    """

    names: tuple[str, ...]
    network: str
    parts: tuple[tuple[str, int], ...]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def before(self) -> tuple[str, ...]:
        """The parts that run before all blocks."""
        return tuple(name for name, place in self.parts if place == 0)

    def modules(self, root: nn.Module) -> list[nn.Module]:
        return [root.get_submodule(name) for name in self.names]

    def ordered(self, calls: Sequence[str]) -> Blocks:
        """The same blocks and parts in the order of a run.

        Args:
            calls: Names of blocks and parts, in the order in which they were called. A part that wasn't called keeps
                its place. If a block wasn't called, all blocks keep their order.
        """
        called = tuple(name for name in calls if name in self.names)
        names = called if {*called} == {*self.names} else self.names
        place_of = {place: names.index(name) for place, name in enumerate(self.names)}
        beside = {name: place_of.get(place, len(names)) for name, place in self.parts}
        begun = 0
        seen: dict[str, int] = {}
        for name in calls:
            if name in beside:
                seen.setdefault(name, begun)
            elif name in self.names:
                begun = begun + 1 if names is called else max(begun, names.index(name) + 1)
        return replace(self, names=names, parts=tuple({**beside, **seen}.items()))


def block_lists(root: nn.Module, *, mixed: bool = False) -> dict[str, list[str]]:
    """The outermost lists of at least two modules of one class with parameters; list name to names of its blocks.

    A list inside of a block, such as a mixture's experts, is left out.

    Args:
        mixed: Also find lists of several classes, at least one of them repeated, such as alternating attention and
            state-space layers.
    """
    found: dict[str, list[str]] = {}
    named = first_names(root)
    for path, module in root.named_modules():
        if not path or not is_list(module) or any(path.startswith(f"{outer}.") for outer in found):
            continue
        names = [named[id(child)] for child in held_by(module)]
        classes = [type(child) for child in map(root.get_submodule, names) if _holds(child)]
        if classes and all(issubclass(kind, _TABLES) for kind in classes):
            continue  # tables run side by side
        alike = len(set(classes)) == 1 and len(classes) == len(names)
        in_turn = mixed and len(set(classes)) < len(classes) and len(names) > 2
        if len(classes) > 1 and (alike or in_turn):
            found[path] = names
    blocks = {name for names in found.values() for name in names}
    return {path: names for path, names in found.items() if not any(path.startswith(f"{name}.") for name in blocks)}


def find_blocks(
    root: nn.Module, path: str | Sequence[str] | None = None, calls: Callable[[], Sequence[str]] = tuple
) -> Blocks:
    """The blocks at ``path``, or without a path those of the model's lists of blocks.

    Without a path, the first of these that exists:

    - The longest list, a trained one if there is one, without lists that are small beside others (a tenth of one), and
      other lists of the same network, or of one that a step calls too, that hold blocks of its classes or are about as
      large: an encoder's and a decoder's, or a ResNet's stages. Lists that the example doesn't run are left out, such
      as those of a vision tower if the example is text.
    - A module that runs several times: instead of lists inside of it, or if there are no lists.
    - The parts of an ``nn.Sequential``.
    - Modules that a forward calls one after the other, each once, as its source or the example shows: also instead of
      lists that carry next to nothing, such as the layers of a U-Net's embedding of time.

    Modules of a list that are containers without a forward, ``ModuleList([attention, feedforward])`` say, are replaced
    by what they hold, in order.

    Args:
        root: The LightningModule.
        path: A list of blocks, by its name in ``root`` or the end of that name: ``"layers"`` finds ``"model.layers"``
            if no other list's name ends so. Or several names of lists or modules in running order, each as often as
            it runs.
        calls: Runs the network on an example, and returns the names of all called modules in order. Called only if
            there are several lists or none, or if all chosen lists are inside of a loop.

    Raises:
        PlacementError: There is no list, or none of this name; the message names the lists that there are.
    """
    lists = block_lists(root, mixed=True)
    if path is None:
        calls = cache(calls)
        if len(lists) > 1:
            lists = _run_by(root, lists, set(calls()))
        groups = _chain(root, lists, calls)
        if all(_is_looped(root, path) for path in groups):
            often = _run_often(root, calls())
            if all(any(path.startswith(f"{name}.") for name in often) for path in groups):
                groups = often or groups
            groups = groups or _sequential(root)
        if _carries_little(root, groups) and _largest_share(root, groups) > _USELESS:
            opened = _opened(root, partial(_called_once, root, calls=calls()))
            if _largest_share(root, opened) < _USELESS:
                groups = opened
        if not groups:
            raise PlacementError(_nothing_to_cut(root))
        network = _network(groups)
        names, parts = lay_out(root, groups, network)
    else:
        found = [_resolve(root, name, lists) for name in ([path] if isinstance(path, str) else path)]
        groups = {name: children_of(root, name) for name in found}
        network = _network(groups)
        names, parts = lay_out(root, groups, network)
        if not isinstance(path, str):
            names = [name for one in found for name in groups[one]]
    names, parts = _with_called(root, names, parts)
    around = {name: place for name, place in reversed(parts) if name not in names}  # reversed: the first place wins
    return Blocks(tuple(names), network, tuple(reversed(around.items())))


def names_of_parameters(root: nn.Module) -> list[tuple[str, ...]]:
    """The names of each parameter: several if it is tied."""
    names: dict[int, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values()]


def tied_parameters(root: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names that share one parameter."""
    return [names for names in names_of_parameters(root) if len(names) > 1]


# -- which blocks


def _chain(root: nn.Module, lists: dict[str, list[str]], calls: Callable[[], Sequence[str]]) -> dict[str, list[str]]:
    """The longest list, a trained one if there is one, and the lists that are cut with it."""
    if not lists:
        return {}
    small = _small(root, lists)
    path = max(
        lists,
        key=lambda name: (trains(root.get_submodule(name)), name not in small, len(lists[name]), _size(root, name)),
    )
    if type(_parent(root, path)) is nn.Sequential and type(root.get_submodule(path)) is nn.Sequential:
        return _sequential(root)
    classes = {type(root.get_submodule(name)) for name in lists[path]}
    network = path.partition(".")[0]

    @cache
    def runs_beside(other: str) -> bool:
        """Whether a step calls both networks once: two towers that the LightningModule compares, say."""
        both = [network, other]
        return other == network or _called_once(root, both, calls=calls()) == both

    def belongs(other: str) -> bool:
        held = [root.get_submodule(name) for name in lists[other]]
        does = trains(root.get_submodule(other))
        if does != trains(root.get_submodule(path)) or not runs_beside(other.partition(".")[0]):
            return False
        if run_in_turn(root, path, other):
            return False
        if any(type(block) in classes for block in held):
            return True
        same_kind = all(map(_is_leaf, held)) == all(map(_is_leaf, (root.get_submodule(n) for n in lists[path])))
        return same_kind and _size(root, other) >= _SMALL * _size(root, path)

    return {other: names for other, names in lists.items() if other == path or belongs(other)}


def _small(root: nn.Module, lists: dict[str, list[str]]) -> set[str]:
    """Lists that aren't worth cutting beside others that train: much smaller than one."""
    trained = [name for name in lists if trains(root.get_submodule(name))]
    sizes = {name: _size(root, name) for name in trained or lists}
    return {name for name, size in sizes.items() if size < _SMALL * max(sizes.values())}


def _run_by(root: nn.Module, lists: dict[str, list[str]], called: Set[str]) -> dict[str, list[str]]:
    """``lists`` without those that the example doesn't call, in networks of which it calls other lists.

    Modules of a list that is left out are held by one stage, and run there if a step calls them.
    """
    run = {path for path, names in lists.items() if any(not called.isdisjoint(_called(root, name)) for name in names)}
    networks = {path.partition(".")[0] for path in run}
    return {path: names for path, names in lists.items() if path in run or path.partition(".")[0] not in networks}


def _called(root: nn.Module, name: str) -> list[str]:
    """The names of the modules that are called for a block.

    It is the block itself; for a container without a forward, what it holds, without what has no parameters or buffers.
    """
    module = root.get_submodule(name)
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)) or has_forward(module):
        return [name]
    named = first_names(root)
    held = (child for child in held_by(module) if any(True for _ in _state(child)))
    return [called for child in held for called in _called(root, named[id(child)])]


def _with_called(
    root: nn.Module, names: Sequence[str], parts: Iterable[tuple[str, int]]
) -> tuple[list[str], list[tuple[str, int]]]:
    """Blocks and parts with containers that are never called replaced by what they hold (:func:`_called`)."""
    called = [_called(root, name) for name in names]
    starts = [0, *accumulate(map(len, called))]
    return [name for group in called for name in group], [(part, starts[place]) for part, place in parts]


def _state(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _sequential(root: nn.Module) -> dict[str, list[str]]:
    """The children of the largest ``nn.Sequential``, nested ones flattened; they may be of different classes."""
    paths = [path for path, module in root.named_modules() if type(module) is nn.Sequential]
    found = {path: list(_unfolded(root, path)) for path in paths}
    found = {path: names for path, names in found.items() if sum(_holds(root.get_submodule(n)) for n in names) > 1}
    if not found:
        return {}
    path = max(found, key=lambda name: (trains(root.get_submodule(name)), _size(root, name), len(found[name])))
    return {path: found[path]}


def _run_often(root: nn.Module, calls: Sequence[str]) -> dict[str, list[str]]:
    """The outermost modules that run several times, of the class that computes most: ALBERT's one layer, say.

    Empty if the largest of them has less than :data:`_SMALL` of the parameters.
    """
    times = Counter(calls)
    often = [name for name, count in times.items() if count > 1 and name and trains(root.get_submodule(name))]
    outermost = [name for name in often if not any(name.startswith(f"{other}.") for other in often)]
    if not outermost:
        return {}
    largest = max(outermost, key=lambda name: times[name] * _size(root, name))
    if _size(root, largest) < _SMALL * _size(root, ""):
        return {}
    kind = type(root.get_submodule(largest))
    return {name: [name] for name in outermost if type(root.get_submodule(name)) is kind}


def _is_looped(root: nn.Module, path: str) -> bool:
    """Whether a loop in some class's code uses a module that contains ``path``."""
    names = path.split(".")
    levels = [(root.get_submodule(".".join(names[:depth])), name) for depth, name in enumerate(names[:-1])]
    owners = ((level, name) for level, name in levels if not is_list(level))
    return any(name in loop for level, name in owners for loop in loops(type(level)))


def _carries_little(root: nn.Module, groups: dict[str, list[str]]) -> bool:
    """Whether lists hold single layers only, or less than :data:`_SMALL` of the size."""
    names = {name for names in groups.values() for name in names}
    size = sum(_size(root, name) for name in names)
    return size < _SMALL * _size(root, "") or all(_is_leaf(root.get_submodule(name)) for name in names)


def _largest_share(root: nn.Module, groups: dict[str, list[str]]) -> float:
    """The largest share of the size between two neighbouring cuts: a block with the parts before it, say."""
    if not groups:
        return 1.0
    names, parts = lay_out(root, groups, _network(groups))
    sizes = [_size(root, name) for name in names]
    for part, place in parts:
        sizes[min(place, len(names) - 1)] += _size(root, part)
    return max(sizes) / max(1, sum(sizes))


def _opened(root: nn.Module, called_once: Callable[[list[str]], list[str]]) -> dict[str, list[str]]:
    """The lists and modules that carry most of the size; those above :data:`_FINE` are replaced by what they call.

    Args:
        called_once: Of the names of one module's children, those that it calls once.
    """
    whole, found = _size(root, ""), dict[str, list[str]]()

    def visit(path: str) -> None:
        module = root.get_submodule(path)
        if path and is_list(module):
            found[path] = children_of(root, path)
            return
        prefix = f"{path}." if path else ""
        children = [prefix + name for name, child in module.named_children() if trains(child)]
        large = [name for name in children if _size(root, name) > _SMALL / 2 * whole]
        if not path or _size(root, path) > _FINE * whole:
            once = called_once(large)
            if once and once == large:
                for name in once:
                    visit(name)
                return
        if path:
            found[path] = [path]

    visit("")
    return found


def _called_once(root: nn.Module, names: list[str], *, calls: Sequence[str]) -> list[str]:
    """Of one module's children, those that it calls once: in an example's run, or else by its source."""
    path = names[0].rpartition(".")[0] if names else ""
    if path in calls:
        return [name for name in names if all(calls.count(each) == 1 for each in _called(root, name))]
    level, own = type(root.get_submodule(path)), [name.rpartition(".")[2] for name in names]
    for method in ("training_step", "forward"):
        uses = Counter(attributes_used(level, method, depth=4))
        if any(name in uses for name in own):
            break
    looped = set[str]().union(*loops(level))
    return [
        name
        for name, key in zip(names, own)
        if key in uses
        and (isinstance(root.get_submodule(name), nn.ModuleList) or (uses[key] == 1 and key not in looped))
    ]


def _nothing_to_cut(root: nn.Module) -> str:
    """The error for a model without blocks; it names modules that ``pipeline_blocks`` could name."""
    path, level = "", root
    while len(trained := [name for name, child in level.named_children() if trains(child)]) == 1:
        path, level = f"{path}{trained[0]}.", level.get_submodule(trained[0])
    such_as = f", such as {[path + name for name in trained[:4]]} if they run one after the other" if trained else ""
    return (
        f"{type(root).__name__} has no list of repeated blocks (an nn.ModuleList, nn.Sequential or nn.ModuleDict of at"
        f" least two modules that hold parameters): name modules to cut between by pipeline_blocks{such_as}. Or use"
        " pipeline_parallel_size=1: a single module, such as an nn.LSTM, isn't cut."
    )


def _parent(root: nn.Module, path: str) -> nn.Module | None:
    return root.get_submodule(path.rpartition(".")[0]) if "." in path else None


def _unfolded(root: nn.Module, path: str) -> Iterator[str]:
    for name in children_of(root, path):
        child = root.get_submodule(name)
        if type(child) is nn.Sequential and len(child):
            yield from _unfolded(root, name)
        else:
            yield name


def _network(groups: dict[str, list[str]]) -> str:
    heads = {path.partition(".")[0] for path in groups}
    return heads.pop() if len(heads) == 1 and all("." in path for path in groups) else ""


def _resolve(root: nn.Module, path: str, lists: dict[str, list[str]]) -> str:
    modules = [name for name, _ in root.named_modules() if name == path or name.endswith(f".{path}")]
    matches = [name for name in modules if is_list(root.get_submodule(name))] or modules
    exact = [name for name in matches if name == path]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    problem = f"fits {matches}" if matches else "is not a list of modules"
    raise PlacementError(
        f"pipeline_blocks={path!r} {problem} in {type(root).__name__}: name one of {sorted(lists) or 'its lists'} in"
        " full."
    )


def _holds(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children())


def _size(root: nn.Module, path: str) -> int:
    """The number of parameters of a module, or of one parameter; without embedding tables."""
    owner, _, key = path.rpartition(".")
    if key in root.get_submodule(owner)._parameters:
        return root.get_parameter(path).numel()
    module = root.get_submodule(path)
    tables = {id(p) for part in module.modules() if isinstance(part, _TABLES) for p in part.parameters()}
    return sum(parameter.numel() for parameter in module.parameters() if id(parameter) not in tables)
