"""A dispatch mode that records the lifetime of storages and the cost of operations, on fake or real tensors.

Memory is counted by storage, so views are free. Each storage belongs to the label that was set when an operation
created it. Limits: temporary storage inside a kernel isn't seen, nor an allocator's overhead.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
_BETWEEN_RANKS = ("_c10d_functional", "c10d", "_c10d_functional_autograd")


class Ledger(TorchDispatchMode):
    """Records operations and memory, with an account for each label.

    Attributes:
        label: The label of the next operations.
        around: Under this label, a result belongs to the label of its inputs if that is another one.
        work: The cost of operations, by label: ``flops``, ``moved`` and ``beside`` as in ``counts.py``; and for each
            collective operation ``(name, "bytes")`` of its inputs, and ``(name, "calls")``.
        live: Bytes of all storages that were created inside and are alive.
        growth: The largest growth of ``live`` between a :meth:`begin` and the next, by label.
        of_gradients: Bytes of that growth that were parameters' gradients, as announced by :meth:`mark`, by label.
    """

    def __init__(self) -> None:
        super().__init__()
        self.label: Hashable = None
        self.around: Hashable = None
        self.work: dict[Hashable, Counter[Hashable]] = defaultdict(Counter)
        self.live = 0
        self.growth: dict[Hashable, int] = defaultdict(int)
        self.of_gradients: dict[Hashable, int] = defaultdict(int)
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

    def _leave(self, key: int) -> None:
        entry = self._made.pop(key, None)
        if entry is not None:
            self.live -= entry[1]
        self._gradients -= self._marked.pop(key, 0)


def _grouped_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Each row of ``a`` is multiplied by one of the matrices in ``b``; in a backward both are rows of tokens."""
    return 2 * a.numel() * b.shape[-1]


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, widths: Any = (1, 1), **__: Any) -> int:
    """As torch's own formula: causal masks aren't subtracted; ``widths``: products over each width."""
    batch, heads, queries, width = query.shape
    return 2 * batch * heads * queries * key.shape[2] * (widths[0] * width + widths[1] * value.shape[-1])


def _attention_backward_flops(_gradient: Tensor, *tensors: Tensor, **_: Any) -> int:
    """Five matrix products, where the forward has two."""
    return _attention_flops(*tensors[:3], widths=(3, 2))


_FLOPS: dict[Any, Callable[..., int]] = {
    _aten._grouped_mm: _grouped_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}
