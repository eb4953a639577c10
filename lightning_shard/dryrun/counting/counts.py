"""Data classes of the counts: what one microbatch costs on one rank, part by part.

The counts of one pair of tensor and expert sizes are made once; all layouts with that pair are computed from them.
Counting computes no values and uses no memory for the model: its own ``training_step`` runs forward and backward on
fake tensors, with the tensor- and expert-parallel styles of a run, on a fake process group. What the step does outside
of blocks and parts has its own accounts: *around*, which every pipeline stage runs (masks, positions), and *loss*, what
follows the last block, which only the last stage runs.

Memory is counted by storage, so views are free. Each storage belongs to the label that was set when an operation
created it. Limits: temporary storage inside a kernel isn't seen, nor an allocator's overhead.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from lightning_shard.pipeline.cost import grouped_flops

AROUND, LOSS = "(around)", "(loss)"
TENSOR, EXPERT = "tensor", "expert"


@dataclass(frozen=True)
class Work:
    """The cost of one part's forward or backward on one rank."""

    flops: int = 0  # floating-point operations of matrix products, convolutions and attention
    moved: int = 0  # bytes that operations read and write, without fusion: the bound of memory-bound operations
    beside: int = 0  # bytes of ``moved`` by operations that ``flops`` doesn't count
    traffic: Mapping[str, int] = field(default_factory=dict)
    """Bytes that this rank sends, by axis (``"tensor"``, ``"expert"``), for ring collectives. Traffic of pipelines and
    data ranks isn't included: it follows from ``output`` and ``parameters``."""
    collectives: Mapping[str, int] = field(default_factory=dict)  # the number of these, by axis


@dataclass(frozen=True)
class Cost:
    """The cost of one microbatch in a part, for one way of running it. Memory in bytes."""

    forward: Work = Work()
    backward: Work = Work()  # with the second forward if the part is recomputed
    kept: int = 0
    """Created in the forward and alive until the backward; each storage counts once. Without parameters and inputs. A
    block's output counts for the block if the next one keeps it."""
    forward_peak: int = 0  # the largest growth of memory during the forward
    backward_peak: int = 0  # the same during the backward, with the gradients that it creates if weights have none yet
    adding_peak: int = 0  # the same if weights have gradients, to which new ones are added one at a time
    freed: int = 0  # of ``kept``, what the backward of later parts has freed when the part's backward begins
    carried: int = 0
    """Alive when the forward begins, from what ran before, beyond what that keeps: values that local variables hold,
    such as logits, and that no backward needs."""
    of_gradients: int = 0  # of ``backward_peak``, gradients of whole parameters
    parts: TwoParts | None = None  # the split backward; ``None`` if nothing of it can be delayed, or it wasn't counted


@dataclass(frozen=True)
class TwoParts:
    """A split backward: first the gradients of inputs, later those of matrix products' weights. In bytes."""

    first: Cost = Cost()  # the cost if the backward is its first part only
    owed: int = 0  # what products keep from the first part to the second; each storage counts once
    given: int = 0  # of ``owed``, the gradient with which the backward began
    weights_peak: int = 0  # as ``Cost.backward_peak``, in the second part
    weights_adding_peak: int = 0
    late: tuple[int, ...] = ()  # indices in ``PartCount.parameters`` of those whose gradients come in the second part
    weights: Work = Work()  # the second part's operations


@dataclass(frozen=True)
class ParameterCount:
    """One parameter. A tied one is in each part that uses it, under its first name."""

    name: str
    shape: tuple[int, ...]  # the whole parameter's
    local_shape: tuple[int, ...]  # one rank's under tensor and expert parallelism, before FSDP shards it
    dtype: torch.dtype
    requires_grad: bool = True
    is_expert: bool = False
    """Whether it is sharded over expert-parallel ranks; FSDP then shards it over the data ranks that hold the same
    experts, not over all."""
    gathered_dtype: torch.dtype | None = None  # in which FSDP gathers it; None for its own

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def gathers_in(self) -> torch.dtype:
        return self.gathered_dtype or self.dtype

    @property
    def gathered_bytes(self) -> int:
        return self.numel * self.gathers_in.itemsize


@dataclass(frozen=True)
class PartCount:
    """A block; a part before, between or after blocks; or what the step does around them."""

    name: str  # the module's
    parameters: tuple[ParameterCount, ...] = ()
    output: int = 0  # bytes of the tensors that it returns: what a pipeline sends, if a cut follows
    plain: Cost = Cost()  # without activation checkpointing
    recomputed: Cost = Cost()  # with ``activation_checkpointing=True``; as ``plain`` if it isn't a block
    selective: Cost = Cost()


@dataclass(frozen=True)
class Counts:
    """A module's step on one microbatch, for one tensor and one expert size; its many attributes are the counts."""

    blocks: tuple[PartCount, ...]  # in running order; a block that runs several times is listed as often
    parts: tuple[tuple[int, PartCount], ...] = ()
    """(place, part) of the others; a part runs before the block of that place, ``len(blocks)``: after all."""
    everywhere: tuple[PartCount, ...] = ()
    """What every stage holds and runs: *around*, and frozen modules beside the network."""
    loss: PartCount = PartCount(LOSS)  # what the step does after the last block, outside of parts
    samples: int = 1  # of the microbatch
    tokens: int = 1  # elements of the microbatch's largest integer tensor; samples, if there is none
    batch_bytes: int = 0  # of the microbatch's tensors
    buffer_bytes: int = 0  # of all of the module's buffers, which every rank holds whole
    saved_buffer_bytes: int = 0  # of those that are saved in checkpoints
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    in_two_parts: bool = False  # whether split backwards were counted, too
    assumed: tuple[str, ...] = ()

    def in_order(self) -> Iterator[tuple[int, PartCount]]:
        """Yield (place, part or block) in running order; parts come before the block of their place."""
        for place in range(len(self.blocks) + 1):
            yield from ((place, part) for own, part in self.parts if own == place)
            if place < len(self.blocks):
                yield place, self.blocks[place]

    @cached_property
    def uses(self) -> Counter[str]:
        """For each parameter name, how many blocks and parts use it; a block that runs again counts once."""
        parts = {part.name: part for _, part in self.in_order()}
        return Counter(parameter.name for part in parts.values() for parameter in part.parameters)

    def of_stage(self, blocks: range) -> tuple[PartCount, ...]:
        """What a stage with these blocks runs, in order: first what every stage runs, last the loss."""
        is_last = blocks.stop == len(self.blocks)
        own = [part for place, part in self.in_order() if place in blocks or (is_last and place == blocks.stop)]
        return (*self.everywhere, *own, *((self.loss,) if is_last else ()))


_aten = torch.ops.aten
_BETWEEN_RANKS = ("_c10d_functional", "c10d", "_c10d_functional_autograd")


class Ledger(TorchDispatchMode):
    """Records operations and memory, with an account for each label.

    Attributes:
        label: The label of the next operations.
        around: Under this label, a result belongs to the label of its inputs if that is another one.
        work: The cost of operations, by label: ``flops``, ``moved`` and ``beside`` as above; and for each
            collective operation ``(name, "bytes")`` of its inputs, and ``(name, "calls")``.
        live: Bytes of all storages that were created inside and are alive.
        growth: The largest growth of ``live`` between a :meth:`begin` and the next, by label.
        of_gradients: Bytes of that growth that were parameters' gradients, as announced by :meth:`mark`, by label.
        adding: The largest growth if weights had gradients already: of all but announced gradients. A new one lives
            until it was added, as it is here until it is announced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label: Hashable = None
        self.around: Hashable = None
        self.work: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
        self.live = 0
        self.growth: dict[Hashable, int] = defaultdict(int)
        self.of_gradients: dict[Hashable, int] = defaultdict(int)
        self.adding: dict[Hashable, int] = defaultdict(int)
        self._at_begin = 0
        self._gradients = self._gradients_at_begin = 0
        self._marked: dict[int, int] = {}
        self._made: dict[int, tuple[weakref.ref[Any], int, Hashable]] = {}

    def begin(self, label: Hashable) -> None:
        """Start a new account: following operations belong to ``label``."""
        self.label = label
        self._at_begin = self.live
        self._gradients_at_begin = self._gradients

    def grown(self) -> int:
        """The growth of ``live`` since the last :meth:`begin`, without parameters' gradients."""
        return self.live - self._at_begin - (self._gradients - self._gradients_at_begin)

    def mark(self, gradient: Tensor) -> None:
        """Declare a tensor to be the gradient of a parameter."""
        key = gradient.untyped_storage()._cdata
        if key in self._made and key not in self._marked:
            self._marked[key] = self._made[key][1]
            self._gradients += self._marked[key]

    def by_label(self) -> dict[Hashable, int]:
        """Live bytes, by the label under which they were created."""
        found: dict[Hashable, int] = defaultdict(int)
        for nbytes, label in self.storages().values():
            found[label] += nbytes
        return found

    def storages(self) -> dict[int, tuple[int, Hashable]]:
        """Bytes and label of each live storage, by its identity (``UntypedStorage._cdata``)."""
        made = self._made.copy()  # other threads free storages meanwhile
        return {key: (nbytes, label) for key, (_, nbytes, label) in made.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # decomposes into operations on local tensors, which are dispatched here, too
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries a tensor's device, as most calls on fake tensors do
            return func(*args, **kwargs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._count(func, args, kwargs, given, result, made)
        before = {leaf.untyped_storage()._cdata for leaf in given if not isinstance(leaf, DTensor)}
        for tensor in made:
            if tensor.untyped_storage()._cdata not in before:  # not a view of an input
                self._enter(tensor, self._maker(before))
        return result

    def _maker(self, given: Iterable[int]) -> Hashable:
        """The label of storages that an operation creates from these inputs."""
        if self.around is None or self.label != self.around:
            return self.label
        labels = (self._made[key][2] for key in given if key in self._made)
        return next((label for label in labels if label != self.around), self.label)

    def _count(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], result: Any, made: list[Tensor]) -> None:
        work = self.work[self.label]
        if func.namespace in _BETWEEN_RANKS:
            if given and func._opname not in ("wait_tensor", "_wrap_tensor_autograd"):
                # c10d's operations have their output as the first argument
                of_input = given[1:] if func.namespace == "c10d" else given
                work[func._opname, "bytes"] += sum(t.nbytes for t in of_input)
                work[func._opname, "calls"] += 1
            return
        counted = flop_registry.get(func._overloadpacket) or _FLOPS.get(func._overloadpacket)
        if counted is not None:
            work["flops"] += counted(*args, **kwargs, out_val=result)
        if not func.is_view:
            moved = sum(t.nbytes for t in (*given, *made))
            work["moved"] += moved
            work["beside"] += moved if counted is None else 0

    def _enter(self, tensor: Tensor, label: Hashable) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._made:
            return
        nbytes = storage.nbytes()
        self._made[key] = weakref.ref(storage, lambda _: self._leave(key)), nbytes, label
        self._grow(nbytes)

    def _grow(self, nbytes: int) -> None:
        self.live += nbytes
        if self.live - self._at_begin > self.growth[self.label]:
            self.growth[self.label] = self.live - self._at_begin
            self.of_gradients[self.label] = self._gradients - self._gradients_at_begin
        self.adding[self.label] = max(self.adding[self.label], self.grown())

    def _leave(self, key: int) -> None:
        entry = self._made.pop(key, None)
        if entry is not None:
            self.live -= entry[1]
        self._gradients -= self._marked.pop(key, 0)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, widths: Any = (1, 1), **__: Any) -> int:
    """As torch's own formula: causal masks aren't subtracted; ``widths``: products over each width."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (widths[0] * width + widths[1] * value.shape[-1])


def _attention_backward_flops(_gradient: Tensor, *tensors: Tensor, **_: Any) -> int:
    """Five matrix products, where the forward has two."""
    return _attention_flops(*tensors[:3], widths=(3, 2))


_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: shape_wrapper(grouped_flops),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
