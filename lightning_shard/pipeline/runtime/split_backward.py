"""Splits a backward in two parts (zero bubble, arXiv:2401.10241): weight gradients of matrix products come second.

For ``y = x w``, earlier stages wait for the gradient of ``x``, but no stage waits for that of ``w``, the product
``xᵀ dy``. So the first part runs the graph like a whole backward, except for these products and the nodes between them
and their weights (a transpose, a cast, a slice). For each product it keeps ``x`` and ``dy``; everything else is freed.
The second part computes the products and runs the remaining nodes.

Every node of the graph runs exactly once, in one of the parts, with its complete gradient. So hooks, including a user's
own, run once, and so do functions that modify their saved tensors. The gradient of a weight comes in the first part if
the weight is also used in another way, has hooks, is computed by more than a few operations or from several tensors, or
if ``x`` isn't kept but recomputed (activation checkpointing).

Relies on documented attributes of torch's graph nodes, ``next_functions``, ``_saved_*`` and ``_raw_saved_*``, and on
node names, as of torch 2.13. If a torch version names nodes otherwise, no gradient is deferred.
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
"""By node name: the indices of the edges to ``x`` and to ``w``, and the name under which the node saves ``x``."""
_LONGEST_WAY = 8
"""The most nodes between a product and its weight, the weight's ``AccumulateGrad`` included."""
_OFF = 0.05
"""The tolerance when a weight gradient is compared with torch's, relative to the largest element: only a hook that
changes the gradient exceeds it."""


@dataclass(eq=False)
class Product:
    """A matrix product whose weight gradient is deferred.

    Attributes:
        place: The index of the node's edge to the weight.
        x: The tensor multiplied by the weight, (rows, in).
        edge: The edge that receives the gradient of the multiplied factor, (in, out).
        way: The nodes from this edge to the leaf (the parameter's ``AccumulateGrad``).
        is_transposed: Whether the factor was the transpose of the stored weight.
        gradient: ``dy``, (rows, out); ``None`` if there is none.
        was_seen: Whether the first part has reached the node.
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
        """Secure ``dy`` after the first part: copy it if its memory may change before the second.

        Args:
            taken: Addresses of parameters' gradients, to which later microbatches add in place.
        """
        assert self.gradient is not None
        self.check_unchanged()
        if (memory := _memory(self.gradient)) is None or memory in taken:
            self.see([self.gradient.clone()])

    def of_weight(self) -> Tensor:
        """The weight's gradient, with the memory layout of the weight."""
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
    """The products of a graph that can be deferred, and the leaves that get their gradients in the first part."""

    products: dict[Node, Product]
    leaves: list[Node]

    @classmethod
    def of(cls, roots: Iterable[Node], received: Iterable[Node]) -> _Plan:
        products: dict[Node, Product] = {}
        at_once: set[Node] = set()
        leaves: list[Node] = []  # in the same order on all ranks

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
    """Run the first part of a backward, which gives received tensors their gradients.

    Args:
        outputs: The tensors to differentiate.
        gradients: Their gradients; ``None`` for a loss.
        received: The leaves received from the previous stage.
        checks: Run a whole backward instead, and compare the weight gradient of each product that could be deferred
            with torch's.
        seen: Called with each product that can be deferred, once its ``dy`` has been computed.

    Returns:
        The products that are left for the second part.

    Raises:
        StepError: A weight gradient differs from torch's (with ``checks``).
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
    """Run the second part: compute the weight gradients, one weight after the other.

    Raises:
        StepError: ``x`` or ``dy`` was changed in place since the first part.
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
    """The product that this node computes, or ``None`` if its weight's gradient can't be deferred."""
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
    """The nodes up to the leaf; ``None`` if they branch, are too many, or the leaf has gradient hooks."""
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
    """An id of a tensor's storage, equal for tensors that share memory; ``None`` if it can't be determined."""
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
