"""What all ways to train have in common: networks, batches, and who watches the steps.

A *way* trains a network for as many steps as its watch wants, on every rank, and tells it of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import Dataset

from recipes.gpt import GPT, MLP

EXPERTS, CHOSEN = 8, 2
_STEPS_OF_PEAKS = 5
_MARK = "a step ends"


@dataclass(frozen=True)
class Size:
    """What is trained.

    Attributes:
        batch: Windows of a data rank, of ``context`` tokens.
        has_experts: Whether each block has a mixture in place of its MLP.
        device: "cpu", or "cuda" for ranks that each have a device or share the only one.
    """

    width: int = 256
    layers: int = 6
    context: int = 128
    batch: int = 8
    microbatches: int = 4
    has_experts: bool = False
    device: str = "cpu"


class Tokens(Dataset[Tensor]):
    """Windows for as many steps as are measured."""

    def __init__(self, size: Size, steps: int, data_ranks: int) -> None:
        self._context = size.context
        self._windows = size.batch * data_ranks * steps

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 256, (self._context + 1,), generator=torch.Generator().manual_seed(index))


class Experts(nn.Module):
    """MLPs of one shape in two stacks of matrices, each multiplied by the rows of its own tokens."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up = nn.Parameter(torch.randn(experts, width, inner) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.02)

    def forward(self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
        chosen, choices = chosen_NK.flatten(), chosen_NK.size(1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        results = self.on_rows(x_ND[order // choices], counts) * weights_NK.flatten()[order, None]
        return torch.zeros_like(x_ND).index_add(0, order // choices, results)

    def on_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Each expert on as many rows as are its own, which lie one expert's after the other's."""
        parts = zip(rows.split(counts), self.up.unbind(), self.down.unbind())
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


class Mixture(MLP):
    """A shared expert, whose layers are an MLP's own, and routed ones."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 2 * width)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        weights_NK, chosen_NK = self.router(x_ND).softmax(-1).topk(CHOSEN)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        return super().forward(x_BTD) + self.experts(x_ND, chosen_NK, weights_NK).view_as(x_BTD)


def network(size: Size) -> GPT:
    torch.manual_seed(1)
    model = GPT(width=size.width, layers=size.layers, heads=4, context=size.context)
    if size.has_experts:
        for block in model.blocks:
            block.mlp = Mixture(size.width)
    return model


def loss_of(logits: Tensor, window: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


# -- who watches ------------------------------------------------------------------------------------------------------


@dataclass
class Watch:
    """Is told of each step that ended; keeps the losses of this rank, where it has them."""

    steps: int
    losses: list[float] = field(default_factory=list)

    def ended(self, loss: Tensor | None) -> None:
        if loss is not None:
            self.losses.append(float(loss.detach()))


Way = Callable[[Watch], None]


class _Marks(Watch):
    def ended(self, loss: Tensor | None) -> None:
        with record_function(_MARK):
            pass


class _Peaks(Watch):
    def __init__(self, steps: int) -> None:
        super().__init__(steps)
        self._before = torch.cuda.memory_allocated()
        self.of_steps: list[int] = []

    def ended(self, loss: Tensor | None) -> None:
        self.of_steps.append(torch.cuda.max_memory_allocated() - self._before)
        torch.cuda.reset_peak_memory_stats()


def peak_of(way: Way, device: str) -> int:
    """The most bytes that this process's tensors had on the device in a step, from one step's end to the next."""
    if device == "cpu":
        return _peak_on_cpu(way)
    peaks = _Peaks(_STEPS_OF_PEAKS)
    way(peaks)
    return min(peaks.of_steps[-3:])


def _peak_on_cpu(way: Way) -> int:
    """By every allocation of the CPU's allocator from the run's beginning, whoever makes it.

    So parameters, optimizer state, gradients, activations, what is gathered and what kernels take count. What gloo's
    own buffers take doesn't. A tensor that one of gloo's threads frees is seen to be gone when its address is used
    again; so of the last three steps of five the least peak is taken.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        way(_Marks(_STEPS_OF_PEAKS))
    results: Any = profiler.profiler.kineto_results  # type: ignore[union-attr]
    peaks = [0]
    live: dict[int, int] = {}
    held = 0
    for event in sorted(_told(results.experimental_event_tree()), key=lambda event: event.start_time_ns):
        if event.name == _MARK:
            peaks.append(held)
            continue
        address, nbytes = event.extra_fields.ptr, event.extra_fields.alloc_size
        held -= live.pop(address, 0)
        if nbytes > 0:
            live[address] = nbytes
            held += nbytes
        peaks[-1] = max(peaks[-1], held)
    return min(peaks[-4:-1])


def _told(events: Iterable[Any]) -> Iterator[Any]:
    """Of a tree, allocations and ends of steps."""
    for event in events:
        if event.tag == _EventType.Allocation or event.name == _MARK:
            yield event
        yield from _told(event.children)
