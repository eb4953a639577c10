"""Runs a step once on fake tensors, and counts operations and memory for each block and part by hooks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor

from lightning_shard import tree
from lightning_shard.dryrun.counting.counts import AROUND, EXPERT, LOSS, TENSOR, Cost, TwoParts, Work
from lightning_shard.dryrun.counting.kernels import AsOnDevices
from lightning_shard.dryrun.counting.ledger import Ledger
from lightning_shard.dryrun.counting.ledger import Work as Entered
from lightning_shard.dryrun.counting.model import Model, fake_trainer
from lightning_shard.dryrun.counting.similar_blocks import Likes
from lightning_shard.dryrun.counting.two_parts import InTwoParts, Left, told_of_gradients
from lightning_shard.parallel.activation_checkpointing import leave_out_caches, recompute
from lightning_shard.parallel.experts.module_lists import is_list
from lightning_shard.parallel.fsdp.shard import with_forward
from lightning_shard.pipeline.dataflow.packed_sequences import nothing_packed
from lightning_shard.plugin.assembly.example import part_of
from lightning_shard.scripted import after_calls, before_calls

Way = Literal["plain", "recomputed", "selective"]
_RING: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather_into_tensor": lambda p: p - 1,
    "reduce_scatter_tensor": lambda p: (p - 1) / p,
    "all_to_all_single": lambda p: (p - 1) / p,
}
"""Bytes that one of ``p`` tensor-parallel ranks sends in a ring, per byte of input to DTensor's collective."""
_EXCHANGE = "alltoall_base_"
"""The operation by which expert-parallel ranks exchange tokens."""


@dataclass
class Outcome:
    """The counts of one run; keys are labels such as ``("forward", place)``."""

    work: Mapping[Hashable, Entered]
    kept: Mapping[Hashable, int]
    growth: Mapping[Hashable, int]
    adding: Mapping[Hashable, int]
    left: Mapping[Hashable, int]
    outputs: dict[str | int, int]
    stands_for: dict[int, int]
    carried: Mapping[Hashable, int]
    of_gradients: Mapping[Hashable, int]
    experts_done: Mapping[Hashable, int]
    takes_unpacked: bool
    left_over: Mapping[Hashable, Left]

    def like(self, key: str | int) -> str | int:
        """The block that was run in place of a block that was stood in for; other keys are unchanged."""
        return self.stands_for.get(key, key) if isinstance(key, int) else key

    def in_two_parts(self, key: str | int, tensor: int, expert: int, names: Sequence[str]) -> TwoParts:
        """The counts of a part's split backward.

        Args:
            key: The part.
            tensor, expert: Sizes of the axes.
            names: The names of the parameters of the block that was run for it.
        """
        key = self.like(key)
        forward, inputs, weights = ("forward", key), ("backward", key), ("weights", key)
        kept = self.kept.get(forward, 0)
        left = self.left_over.get(key, Left(0, 0, ()))
        return TwoParts(
            left.owed,
            left.given,
            max(0, kept - self.left.get(forward, kept)),
            self.growth.get(inputs, 0),
            self.adding.get(inputs, 0),
            self.of_gradients.get(inputs, 0),
            self.growth.get(weights, 0),
            self.adding.get(weights, 0),
            tuple(place for place, name in enumerate(names) if name in left.late),
            _work(self.work.get(weights), tensor, expert),
        )

    def cost(self, key: str | int, tensor: int, expert: int) -> Cost:
        key = self.like(key)
        forward, backward = ("forward", key), ("backward", key)
        kept = self.kept.get(forward, 0)
        return Cost(
            _work(self.work.get(forward), tensor, expert),
            _work(self.work.get(backward), tensor, expert),
            kept,
            self.growth.get(forward, 0),
            self.growth.get(backward, 0),
            self.adding.get(backward, 0),
            max(0, kept - self.left.get(forward, kept)),
            self.carried.get(forward, 0),
            self.of_gradients.get(backward, 0),
            self.experts_done.get(backward, 0),
        )


def _work(entered: Entered | None, tensor: int, expert: int) -> Work:
    if entered is None:
        return Work()
    along = {
        TENSOR: sum(_RING[name](tensor) * nbytes for name, nbytes in entered.sent.items() if name in _RING),
        EXPERT: (expert - 1) / expert * entered.sent.get(_EXCHANGE, 0),
    }
    calls = {
        TENSOR: sum(number for name, number in entered.calls.items() if name in _RING),
        EXPERT: entered.calls.get(_EXCHANGE, 0),
    }
    return Work(
        entered.flops,
        entered.moved,
        entered.beside,
        {axis: round(nbytes) for axis, nbytes in along.items() if nbytes},
        {axis: number for axis, number in calls.items() if along[axis]},
    )


class Watched:
    """The module with hooks around its blocks and parts, for one run.

    Args:
        experts: The names of modules whose experts are sharded over ranks.
        stands_in: Whether only two of several equal blocks are run.
    """

    def __init__(
        self, module: pl.LightningModule, model: Model, experts: Sequence[str] = (), *, stands_in: bool = True
    ) -> None:
        self.module = module
        self.model = model
        self.experts = experts
        self.ledger = Ledger()
        self.places: dict[str, list[int]] = {}
        for place, name in enumerate(model.blocks.names if model.blocks else ()):
            self.places.setdefault(name, []).append(place)
        self._calls: dict[str, int] = {}
        self._running: list[str | int] = []
        self._begun = 0
        self._likes = Likes() if stands_in else None
        self._outputs: dict[str | int, int] = {}
        self._left: dict[Hashable, int] = {}
        self._alive: dict[Hashable, dict[Hashable, int]] = {}
        self._experts_done: dict[Hashable, int] = {}
        self._parted: InTwoParts | None = None

    def run(self, batch: Any, way: Way, nodes: Sequence[tuple[Tensor, Node]] = ()) -> Outcome:
        """Run forward and backward of the user's step.

        Args:
            batch: A microbatch.
            way: How blocks are run: plain, or with full or selective activation checkpointing.
            nodes: The parameters' AccumulateGrad nodes, for a split backward; empty for a whole one.
        """
        module, ledger = self.module, self.ledger
        module.train()
        with ExitStack() as stack:
            stack.enter_context(fake_trainer(module))
            for name in self.places:
                for called in with_forward(module.get_submodule(name)):
                    self._watch(stack, name, called, way)
            for name, _ in self.model.blocks.parts if self.model.blocks else ():
                part = part_of(module, name)
                if isinstance(part, nn.Module):
                    stack.callback(before_calls(part, partial(self._begin_part, name)).remove)
                    stack.callback(after_calls(part, partial(self._end, name), always_call=True).remove)
            for name in self.experts:
                experts = module.get_submodule(name)
                if is_list(experts):  # these are gathered by themselves
                    continue
                stack.callback(before_calls(experts, self._begin_experts, with_kwargs=True).remove)
            if nodes:
                names = {id(parameter): name for name, parameter in module.named_parameters()}
                self._parted = InTwoParts(ledger, names)
                for handle in told_of_gradients(nodes, self._mark_gradient):
                    stack.callback(handle.remove)
            else:
                for parameter in module.parameters():
                    if parameter.requires_grad:
                        stack.callback(parameter.register_post_accumulate_grad_hook(self._mark_gradient).remove)
            given = tree.map_leaves(_without_data, batch)
            asked = stack.enter_context(nothing_packed(given))
            if self.model.device_type != "cpu":
                stack.enter_context(AsOnDevices())
            stack.enter_context(ledger)
            ledger.around = ("forward", AROUND)
            self._begin_forward(AROUND if self.places else LOSS)
            with self.model.autocast():
                loss = self.model.loss_of(module, given)
            kept = dict(ledger.by_label())
            ledger.begin(("backward", LOSS))
            if self._parted is None:
                loss.backward()
            else:
                self._parted.run(loss)
        stands_for = self._likes.stands_for if self._likes else {}
        carried = {
            key: sum(max(0, nbytes - kept.get(label, 0)) for label, nbytes in alive.items() if label != key)
            for key, alive in self._alive.items()
        }
        return Outcome(
            dict(ledger.work),
            kept,
            dict(ledger.growth),
            {},
            self._left,
            self._outputs,
            stands_for,
            carried,
            dict(ledger.of_gradients),
            self._experts_done,
            asked.is_asked,
            self._parted.left if self._parted is not None else {},
        )

    def differ(self, outcome: Outcome) -> bool:
        """Whether two blocks that were taken to be equal have different costs."""
        pairs = self._likes.pairs() if self._likes else []
        return any(_of(outcome, first) != _of(outcome, second) for first, second in pairs)

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
        stack.callback(before_calls(called, partial(self._begin_block, name), prepend=True).remove)
        stack.callback(after_calls(called, partial(self._end_block), always_call=True).remove)

    def _begin_block(self, name: str, *_: Any) -> None:
        number = self._calls.get(name, 0)
        self._calls[name] = number + 1
        place = self.places[name][min(number, len(self.places[name]) - 1)]
        self._begun += 1
        self._begin(place)

    def _begin_part(self, name: str, *_: Any) -> None:
        self._begin(name)

    def _begin(self, key: str | int) -> None:
        self._running.append(key)
        self._begin_forward(key)

    def _begin_forward(self, key: str | int) -> None:
        if key != AROUND:  # AROUND resumes after each block
            self._alive["forward", key] = self.ledger.by_label()
        self.ledger.begin(("forward", key))

    def _end_block(self, block: nn.Module, args: Any, output: Any) -> None:
        self._end(self._running[-1], block, args, output)

    def _end(self, key: str | int, _part: nn.Module, _args: Any, output: Any) -> None:
        self._running.pop()
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

    def _begin_backward(self, key: str | int, _gradient: Tensor) -> None:
        self.ledger.begin(("backward", key))
        label = "forward", key
        held = self._parted.held(label) if self._parted is not None else 0
        self._left[label] = self.ledger.by_label()[label] - held

    def _mark_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self.ledger.mark(gradient.to_local() if isinstance(gradient, DTensor) else gradient)

    def _begin_experts(self, _experts: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hook the experts' inputs to record the memory when their gradient is there; not in a recomputed forward."""
        if not self._running:
            return None
        key = "backward", self._running[-1]

        def done(_gradient: Tensor) -> None:
            self._experts_done[key] = self.ledger.grown()

        def noticed(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or not leaf.requires_grad:
                return leaf
            own = leaf.view_as(leaf)
            own.register_hook(done)
            return own

        return tree.map_leaves(noticed, args), tree.map_leaves(noticed, kwargs)


def _without_data(leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") if isinstance(leaf, Tensor) else leaf


def _of(outcome: Outcome, place: int) -> tuple[int, ...]:
    """The costs that must be equal; not bytes moved in backward, as the first block's include what runs before it."""
    forward, backward = (outcome.work.get((way, place), Entered()) for way in ("forward", "backward"))
    kept = outcome.kept.get(("forward", place), 0)
    return forward.flops, forward.moved, backward.flops, sum(forward.sent.values()), sum(backward.sent.values()), kept
