"""A backward in two parts: first all gradients but those of matrix products' weights, then these.

Of ``y = x w`` the gradient of ``x`` is what earlier blocks, and so earlier stages, wait for; that of ``w``, the product
``xᵀ dy``, nobody waits for. So the first part runs the graph as a whole backward does, but for these products and what
leads from them to their weights (a transpose, a cast, a slice): each keeps ``x`` and ``dy``, and all else is freed. The
second part computes the products and runs the rest of the graph.

Every node of the graph runs once, in one of the parts, with all of its gradient: so do hooks, also a user's own, and
functions that change what they saved. A weight that is also used in another way, that has hooks, that is computed by
more than a few operations or of several tensors, or whose ``x`` isn't kept but computed again (activation
checkpointing), gets its gradient in the first part.

Relies on what torch documents of a graph's nodes, ``next_functions``, ``_saved_*`` and ``_raw_saved_*``, and on their
names, as of torch 2.13: where a torch names them otherwise, nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_shard.errors import StepError
from lightning_shard.sharding import local_tensor

_LEAF = "torch::autograd::AccumulateGrad"
_FACTORS = {"AddmmBackward0": (1, 2, "mat1"), "MmBackward0": (0, 1, "self")}
"""By a product's name: its edges to ``x`` and to ``w``, and under which name it has saved ``x``."""
_LONGEST_WAY = 8
"""Nodes from a product to its weight."""
_OFF = 0.05
"""Of the largest element of a gradient, how far that which is computed here may be from torch's: of no hook."""


@dataclass(eq=False)
class Product:
    """One whose weight's gradient comes later.

    Attributes:
        place: Of its node's edges that to the weight.
        x: What was multiplied by the weight, (rows, in).
        edge: Where the gradient of the weight as it was multiplied, (in, out), goes on to.
        way: The nodes from there to the leaf.
        is_transposed: Whether the factor was the transpose of what is stored.
        gradient: ``dy``, (rows, out); ``None`` where there is none.
    """

    place: int
    x: Tensor
    edge: GradientEdge
    way: tuple[Node, ...]
    is_transposed: bool
    gradient: Tensor | None = None
    was_seen: bool = False
    _versions: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self._versions = self.x._version, 0

    @property
    def leaf(self) -> Node:
        return self.way[-1]

    def see(self, gradients: Sequence[Tensor | None]) -> None:
        [self.gradient] = gradients
        self.was_seen = True
        if self.gradient is not None:
            self._versions = self._versions[0], self.gradient._version

    def keep(self, taken: set[int]) -> None:
        """Once the first part is over.

        Args:
            taken: The memory of leaves' gradients, which later microbatches add to in place.
        """
        assert self.gradient is not None
        self.check_unchanged()
        if (memory := _memory(self.gradient)) is None or memory in taken:
            self.see([self.gradient.clone()])

    def of_weight(self) -> Tensor:
        """The gradient, laid out in memory as the weight is."""
        assert self.gradient is not None
        if self.is_transposed:
            return self.gradient.t().mm(self.x).t()
        return self.x.t().mm(self.gradient)

    def check_unchanged(self) -> None:
        assert self.gradient is not None
        if (self.x._version, self.gradient._version) != self._versions:
            raise StepError(
                f"What a matrix product has multiplied by its weight, a tensor of shape {tuple(self.x.shape)}, or the"
                " product's gradient was changed in place before the second part of a backward: don't change it, or use"
                ' a schedule with whole backwards, such as schedule="1F1B".'
            )


@dataclass(frozen=True)
class _Plan:
    """Which products of a graph can wait, and which leaves get their gradients in the first part."""

    products: dict[Node, Product]
    leaves: list[Node]

    @classmethod
    def of(cls, roots: Iterable[Node], received: Iterable[Node]) -> _Plan:
        products: dict[Node, Product] = {}
        at_once: set[Node] = set()
        leaves: list[Node] = []  # in an order that is the same on all ranks

        def run_at_once(nodes: Iterable[Node]) -> None:
            waiting = [*nodes]
            while waiting:
                node = waiting.pop()
                if node in at_once:
                    continue
                at_once.add(node)
                following = [each for each, _ in node.next_functions]
                if not any(following):
                    leaves.append(node)
                elif (name := node.name()) in _FACTORS and (product := _product(node, name)) is not None:
                    products[node] = product
                    following[product.place] = None
                waiting += filter(None, following)

        run_at_once([*received, *roots])
        while overlapping := [node for node, each in products.items() if not at_once.isdisjoint(each.way)]:
            for node in overlapping:
                run_at_once(products.pop(node).way)
        return cls(products, leaves)


def backward_but_products(
    outputs: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    received: Iterable[Tensor],
    *,
    checks: bool,
    seen: Callable[[Product], None] | None = None,
) -> list[Product]:
    """The first part of a backward, which gives received tensors their gradients; returns what is left for the second.

    Args:
        outputs: Where it begins.
        gradients: Theirs; ``None`` for a loss.
        received: Leaves that wait for their gradients.
        checks: Run the whole backward, and see that each product that could wait gets the gradient that torch computes.
        seen: Told of each product that can wait when its own gradient is there.

    Raises:
        StepError: One doesn't.
    """
    plan = _Plan.of(_nodes_of(outputs), _nodes_of(received))
    handles = [node.register_prehook(product.see) for node, product in plan.products.items()]
    if seen is not None:
        handles += [node.register_prehook(partial(_tell, seen, product)) for node, product in plan.products.items()]
    if checks:
        handles += [node.register_hook(_checking(product)) for node, product in plan.products.items()]
    inputs = [GradientEdge(leaf, 0) for leaf in plan.leaves] if plan.products and not checks else None
    try:
        torch.autograd.backward(outputs, gradients, inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    if inputs is None:
        return []
    assert all(product.was_seen for product in plan.products.values()), "a product whose gradient can wait wasn't run"
    left = [product for product in plan.products.values() if product.gradient is not None]
    taken = {*_memory_of_gradients(plan.leaves)}
    for product in left:
        product.keep(taken)
    return left


@torch.no_grad()
def backward_of_products(products: Iterable[Product]) -> None:
    """The second part: gradients of the weights; each weight is done with before the next begins.

    Raises:
        StepError: A factor was changed meanwhile.
    """
    of_leaves: dict[Node, list[Product]] = {}
    for product in products:
        product.check_unchanged()
        of_leaves.setdefault(product.leaf, []).append(product)
    for of_leaf in of_leaves.values():
        gradients = [product.of_weight() for product in of_leaf]
        torch.autograd.backward([product.edge for product in of_leaf], gradients)


def _nodes_of(tensors: Iterable[Tensor]) -> list[Node]:
    return [get_gradient_edge(tensor).node for tensor in tensors if tensor.requires_grad]


def _product(node: Node, name: str) -> Product | None:
    """What a node of such a name computes, if the gradient of its weight can wait."""
    place_of_x, place, saved = _FACTORS[name]
    (next_of_x, _), (following, number) = node.next_functions[place_of_x], node.next_functions[place]
    if next_of_x is None or following is None or getattr(node, "_saved_alpha", 1) != 1:
        return None
    way = _way(following)
    if way is None or getattr(getattr(node, f"_raw_saved_{saved}"), "unpack_hook", True) is not None:
        return None
    x = getattr(node, f"_saved_{saved}").detach()
    if not x.is_floating_point() or x.layout != torch.strided:
        return None
    return Product(place, x, GradientEdge(following, number), way, following.name() == "TBackward0")


def _way(node: Node) -> tuple[Node, ...] | None:
    """The nodes to the leaf, where each leads to the next one alone, and nobody asks for the leaf's gradient."""
    way = [node]
    while way[-1].name() != _LEAF:
        following = [n for n, _ in way[-1].next_functions if n is not None]
        if len(following) != 1 or len(way) == _LONGEST_WAY:
            return None
        way += following
    leaf: Any = way[-1]
    if leaf.variable._backward_hooks or leaf.variable._post_accumulate_grad_hooks:
        return None
    return tuple(way)


def _tell(seen: Callable[[Product], None], product: Product, _: Any) -> None:
    seen(product)


def _memory_of_gradients(leaves: Iterable[Node]) -> Iterator[int]:
    for leaf in leaves:
        gradient = leaf.variable.grad if leaf.name() == _LEAF else None  # type: ignore[attr-defined]
        if gradient is not None and (memory := _memory(gradient)) is not None:
            yield memory


def _memory(tensor: Tensor) -> int | None:
    """Equal for tensors that share their memory; ``None`` where a tensor doesn't tell."""
    local = local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if isinstance(local, FakeTensor):
        return local.untyped_storage()._cdata
    return local.untyped_storage().data_ptr() if type(local) is Tensor else None


def _checking(product: Product) -> Any:
    def check(gradients: Sequence[Tensor | None], _: Any) -> None:
        torchs, shape = gradients[product.place], tuple(product.x.shape)
        if product.gradient is None or torchs is None:
            return
        with torch.no_grad():
            ours, theirs = local_tensor(product.of_weight()), local_tensor(torchs)
            off = (ours - theirs).abs().nan_to_num(0, 0, 0).max() if ours.shape == theirs.shape else torch.inf
            if ours.numel() and off > _OFF * theirs.abs().nan_to_num(0, 0, 0).max():
                raise StepError(
                    f"The gradient of a weight that a tensor of shape {shape} was multiplied by isn't that of a plain"
                    " matrix product, as where a hook of the product's node, or a module's register_backward_hook,"
                    " changes it. Its backward can't run in two parts: use register_full_backward_hook, or a schedule"
                    ' with whole backwards, such as schedule="1F1B".'
                )

    return check
