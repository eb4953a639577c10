"""Counts a split backward (input gradients, then weight gradients) on fake tensors.

It runs the runtime's own split, and records what each part of the network keeps for the weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from lightning_shard.dryrun.counting.ledger import Ledger
from lightning_shard.pipeline.runtime.split_backward import Product, backward_but_products, backward_of_products
from lightning_shard.sharding import local_tensor


@dataclass(frozen=True)
class Left:
    """What one part of the network keeps from the first part of its backward for the second.

    Attributes:
        owed: Bytes that its matrix products keep; each storage counts once.
        given: Bytes of ``owed`` that are the gradient with which its backward began.
        late: Names of the parameters whose gradients are computed in the second part.
    """

    owed: int
    given: int
    late: tuple[str, ...]


class InTwoParts:
    """One split backward.

    Args:
        ledger: Records operations; those of the second part under ``("weights", key)``.
        names: Parameter names by ``id``.
    """

    def __init__(self, ledger: Ledger, names: Mapping[int, str]) -> None:
        self._ledger = ledger
        self._names = names
        self._products: dict[Hashable, list[Product]] = {}
        self.left: dict[Hashable, Left] = {}

    def run(self, loss: Tensor) -> None:
        backward_but_products([loss], [None], [], checks=False, seen=self._see)
        for key, products in self._products.items():
            self._products[key] = [product for product in products if product.gradient is not None]
            self.left[key] = self._left_of(key)
        for key, products in self._products.items():
            self._ledger.begin(("weights", key))
            backward_of_products(products)

    def held(self, label: Hashable) -> int:
        """Bytes of storages created under a label that products keep so far."""
        storages = self._ledger.storages()
        kept = {key for products in self._products.values() for key in _storages(products)}
        return sum(nbytes for key, (nbytes, of) in storages.items() if of == label and key in kept)

    def _see(self, product: Product) -> None:
        label: Any = self._ledger.label
        self._products.setdefault(label[1], []).append(product)

    def _left_of(self, key: Hashable) -> Left:
        products, storages = self._products[key], self._ledger.storages()
        kept = {each: storages[each] for each in _storages(products) if each in storages}
        gradients = {local_tensor(p.gradient).untyped_storage()._cdata for p in products if p.gradient is not None}
        own = {("forward", key), ("backward", key)}
        given = sum(nbytes for each, (nbytes, label) in kept.items() if each in gradients and label not in own)
        late = dict.fromkeys(self._names.get(id(product.leaf.variable), "") for product in products)  # type: ignore
        return Left(sum(nbytes for nbytes, _ in kept.values()), given, tuple(late))


def _storages(products: Iterable[Product]) -> Iterator[int]:
    for product in products:
        for tensor in (product.x, product.gradient):
            if tensor is not None:
                yield local_tensor(tensor).untyped_storage()._cdata


def accumulators(module: nn.Module) -> list[tuple[Tensor, Node]]:
    """Each trained parameter with its AccumulateGrad node, which lives as long as the result is kept."""
    return [(p, get_gradient_edge(p).node) for p in module.parameters() if p.requires_grad]


def told_of_gradients(
    nodes: Iterable[tuple[Tensor, Node]], tell: Callable[[Tensor], None]
) -> Iterator[RemovableHandle]:
    """Call ``tell(parameter)`` when a parameter's gradient is there, by hooks that don't prevent a split backward.

    Yields:
        The hooks' handles, to remove them.
    """
    for parameter, node in nodes:
        yield node.register_hook(lambda *_, own=parameter: tell(own))
