"""Runs a step once on fake tensors, and counts operations and memory for each block and part by hooks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.nn import functional

from lightning_shard import tree
from lightning_shard.dryrun.counting.counts import AROUND, EXPERT, LOSS, TENSOR, Cost, Ledger, TwoParts, Work
from lightning_shard.dryrun.counting.model import Likes, Model
from lightning_shard.parallel.activation_checkpointing import leave_out_caches, recompute
from lightning_shard.parallel.fsdp.shard import with_forward
from lightning_shard.pipeline.dataflow.masks import nothing_packed
from lightning_shard.pipeline.runtime.split_backward import Product, backward_but_products, backward_of_products
from lightning_shard.pipeline.stages.parts import part_of
from lightning_shard.sharding import local_tensor
from lightning_shard.torch_private import replaced

Way = Literal["plain", "recomputed", "selective"]
Key = str | int
"""A part's name, or a block's place."""
_RING: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather_into_tensor": lambda p: p - 1,
    "reduce_scatter_tensor": lambda p: (p - 1) / p,
    "all_to_all_single": lambda p: (p - 1) / p,
}
"""Bytes that one of ``p`` tensor-parallel ranks sends in a ring, per byte of input to DTensor's collective."""
_EXCHANGE = "alltoall_base_"
"""The operation by which expert-parallel ranks exchange tokens."""


@dataclass(frozen=True)
class Outcome:
    """The counts of one run."""

    costs: Mapping[Key, Cost]
    outputs: Mapping[Key, int]
    stands_for: Mapping[int, int]  # a block that was stood in for, to the one that was run in its place
    takes_unpacked: bool  # whether a row without mask and positions was taken to be one sequence
    late: Mapping[Key, set[str]]  # the parameters whose gradients come in a backward's second part

    def cost(self, key: Key) -> Cost:
        return self.costs.get(self.like(key), Cost())

    def like(self, key: Key) -> Key:
        return self.stands_for.get(key, key) if isinstance(key, int) else key


class Watched:
    """The module with hooks around its blocks and parts, for one run; see ``_LaidOut`` for its arguments.

    It has many attributes: each is a count that the hooks take while the module runs.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        model: Model,
        sizes: tuple[int, int] = (1, 1),
        *,
        stands_in: bool = True,
    ) -> None:
        self.module, self.model, self._sizes, self.ledger = module, model, sizes, Ledger()
        self.places: dict[str, list[int]] = {}
        for place, name in enumerate(model.blocks.names if model.blocks else ()):
            self.places.setdefault(name, []).append(place)
        self._calls: dict[str, int] = {}
        self._running: list[Key] = []
        self._begun = 0
        self._likes = Likes() if stands_in else None
        self._outputs: dict[Key, int] = {}
        self._left: dict[Key, int] = {}
        self._alive: dict[Key, dict[Hashable, int]] = {}
        self._products: dict[Key, list[Product]] = {}
        self._late: dict[Key, set[str]] = {}

    def run(self, batch: Any, way: Way, nodes: Sequence[tuple[Tensor, Node]] = ()) -> Outcome:
        """Run forward and backward of the user's step; split in two, if given the AccumulateGrad nodes."""
        module, ledger = self.module, self.ledger
        module.train()
        with ExitStack() as stack:
            stack.enter_context(self.model.fake_trainer(module))
            for name in self.places:
                for called in with_forward(module.get_submodule(name)):
                    self._watch(stack, name, called, way)
            for name, _ in self.model.blocks.parts if self.model.blocks else ():
                part = part_of(module, name)
                if isinstance(part, nn.Module):
                    stack.callback(part.register_forward_pre_hook(partial(self._begin, name)).remove)
                    stack.callback(part.register_forward_hook(self._end, always_call=True).remove)
            for parameter, node in nodes:  # by hooks that don't prevent a split backward
                stack.callback(node.register_hook(lambda *_, own=parameter: self._mark_gradient(own)).remove)
            for parameter in module.parameters() if not nodes else ():
                if parameter.requires_grad:
                    stack.callback(parameter.register_post_accumulate_grad_hook(self._mark_gradient).remove)
            given = tree.map_leaves(_without_data, batch)
            asked = stack.enter_context(nothing_packed(given))
            if self.model.device_type != "cpu":
                stack.enter_context(_as_on_devices())
            stack.enter_context(ledger)
            ledger.around = ("forward", AROUND)
            self._begin_forward(AROUND if self.places else LOSS)
            with self.model.autocast():
                loss = self.model.loss_of(module, given)
            kept = dict(ledger.by_label())
            ledger.begin(("backward", LOSS))
            parts = self._backward_in_two_parts(loss) if nodes else loss.backward()
        keys = {label[1] for label in (*kept, *ledger.work, *ledger.growth) if isinstance(label, tuple)}
        costs = {key: self._cost(key, kept, parts) for key in keys}
        return Outcome(costs, self._outputs, self._likes.stands_for if self._likes else {}, asked.is_asked, self._late)

    def differ(self, outcome: Outcome) -> bool:
        """Whether two blocks that were taken to be equal have different costs."""

        def of(place: int) -> tuple[Any, ...]:
            # not bytes moved in backward, as the first block's include what runs before it
            cost = outcome.costs.get(place, Cost())
            work = cost.forward.flops, cost.forward.moved, cost.backward.flops, cost.kept
            return *work, cost.forward.traffic, cost.backward.traffic

        return any(of(first) != of(second) for first, second in (self._likes.pairs() if self._likes else ()))

    # -- costs

    def _cost(self, key: Key, kept: Mapping[Hashable, int], parts: Mapping[Key, TwoParts] | None) -> Cost:
        ledger, forward, backward = self.ledger, ("forward", key), ("backward", key)
        own, alive = kept.get(forward, 0), self._alive.get(key, {})
        cost = Cost(
            forward=self._work(forward),
            backward=self._work(backward),
            kept=own,
            forward_peak=ledger.growth.get(forward, 0),
            backward_peak=ledger.growth.get(backward, 0),
            adding_peak=ledger.adding.get(backward, 0),
            freed=max(0, own - self._left.get(key, own)),
            carried=sum(max(0, nbytes - kept.get(other, 0)) for other, nbytes in alive.items() if other != forward),
            of_gradients=ledger.of_gradients.get(backward, 0),
        )
        if parts is None:
            return cost
        two = replace(
            parts.get(key, TwoParts()),
            first=cost,
            weights_peak=ledger.growth.get(("weights", key), 0),
            weights_adding_peak=ledger.adding.get(("weights", key), 0),
            weights=self._work(("weights", key)),
        )
        return replace(cost, parts=two)

    def _work(self, label: Hashable) -> Work:
        entered, (tensor, expert) = self.ledger.work[label], self._sizes
        along = {
            TENSOR: round(sum(of(tensor) * entered[name, "bytes"] for name, of in _RING.items())),
            EXPERT: round((expert - 1) / expert * entered[_EXCHANGE, "bytes"]),
        }
        calls = {TENSOR: sum(entered[name, "calls"] for name in _RING), EXPERT: entered[_EXCHANGE, "calls"]}
        return Work(
            entered["flops"],
            entered["moved"],
            entered["beside"],
            {axis: nbytes for axis, nbytes in along.items() if nbytes},
            {axis: number for axis, number in calls.items() if along[axis]},
        )

    # -- a split backward: the runtime's own, recording what each part keeps for the gradients of products' weights

    def _backward_in_two_parts(self, loss: Tensor) -> dict[Key, TwoParts]:
        ledger = self.ledger

        def see(product: Product) -> None:
            label: Any = ledger.label
            self._products.setdefault(label[1], []).append(product)

        backward_but_products([loss], [None], [], checks=False, seen=see)
        names = {id(p): name for name, p in self.module.named_parameters()}
        found = {}
        for key, products in self._products.items():
            self._products[key] = done = [product for product in products if product.gradient is not None]
            self._late[key] = {names.get(id(product.leaf.variable), "") for product in done}  # type: ignore
            found[key] = self._owed(key)
        for key, products in self._products.items():
            ledger.begin(("weights", key))
            backward_of_products(products)
        return found

    def _owed(self, key: Key) -> TwoParts:
        products, storages = self._products[key], self.ledger.storages()
        kept = {each: storages[each] for each in _storages(products) if each in storages}
        gradients = {local_tensor(p.gradient).untyped_storage()._cdata for p in products if p.gradient is not None}
        own = {("forward", key), ("backward", key)}
        given = sum(nbytes for each, (nbytes, label) in kept.items() if each in gradients and label not in own)
        return TwoParts(owed=sum(nbytes for nbytes, _ in kept.values()), given=given)

    def _kept_by_products(self, label: Hashable) -> int:
        """Bytes of storages created under a label that products keep so far for a second part of the backward."""
        kept = {key for products in self._products.values() for key in _storages(products)}
        return sum(n for key, (n, of) in self.ledger.storages().items() if of == label and key in kept) if kept else 0

    # -- hooks

    def _watch(self, stack: ExitStack, name: str, called: nn.Module, way: Way) -> None:
        before = dict(vars(called))

        def put_back() -> None:
            vars(called).pop("forward", None)
            if "forward" in before:
                vars(called)["forward"] = before["forward"]

        stack.callback(put_back)
        if way != "plain":
            recompute(called, lambda: lambda: None, selective=way == "selective")
            leave_out_caches(called)
        if self._likes is not None:
            vars(called)["forward"] = self._likes.of(called, called.forward, lambda: self._running[-1])
        stack.callback(called.register_forward_pre_hook(partial(self._begin_block, name), prepend=True).remove)
        stack.callback(called.register_forward_hook(self._end, always_call=True).remove)

    def _begin_block(self, name: str, *_: Any) -> None:
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        self._begun += 1
        self._begin(self.places[name][min(number, len(self.places[name]) - 1)])

    def _begin(self, key: Key, *_: Any) -> None:
        self._running.append(key)
        self._begin_forward(key)

    def _begin_forward(self, key: Key) -> None:
        if key != AROUND:  # AROUND resumes after each block
            self._alive[key] = self.ledger.by_label()
        self.ledger.begin(("forward", key))

    def _end(self, _part: nn.Module, _args: Any, output: Any) -> None:
        key = self._running.pop()
        tensors = tree.tensors(output)
        seen = {t.untyped_storage()._cdata: t.numel() * t.element_size() for t in tensors if type(t) is not DTensor}
        self._outputs[key] = sum(seen.values())
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._begin_backward, key))
        if self._running:
            self.ledger.begin(("forward", self._running[-1]))
        else:
            done = self._begun >= sum(map(len, self.places.values()))
            self._begin_forward(LOSS if done else AROUND)

    def _begin_backward(self, key: Key, _gradient: Tensor) -> None:
        self.ledger.begin(("backward", key))
        label = "forward", key
        self._left[key] = self.ledger.by_label()[label] - self._kept_by_products(label)

    def _mark_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.ledger.mark(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def _without_data(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


def _storages(products: Sequence[Product]) -> Iterator[int]:
    for product in products:
        for tensor in (product.x, product.gradient):
            if tensor is not None:
                yield local_tensor(tensor).untyped_storage()._cdata


def accumulators(module: nn.Module) -> list[tuple[Tensor, Node]]:
    """Each trained parameter with its AccumulateGrad node, which lives as long as the result is kept."""
    return [(p, get_gradient_edge(p).node) for p in module.parameters() if p.requires_grad]


def _as_on_devices() -> AbstractContextManager[None]:
    """As on a GPU, dropout saves a mask of bytes, and attention with dropout only the random generator's state.

    Not by a mode: a mode is off while a backward, which recomputes blocks, is a call that it handles.
    """
    attend = functional.scaled_dot_product_attention

    def attention(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("dropout_p", None)
        return attend(*args[:4], *(0.0 for _ in args[4:5]), *args[5:], **kwargs)

    fused = ("dropout", _dropout), (attend.__name__, attention)
    return replaced(*((functional, name, function) for name, function in fused))


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input
