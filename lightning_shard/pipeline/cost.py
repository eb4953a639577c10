"""What the parts of a network cost: parameters, bytes, and floating-point operations of a forward.

Nothing is computed: operations are counted on fake (or meta) tensors, and where the network can't be run without a real
batch, estimated from the parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["ModelCost", "PartCost", "measure"]


@dataclass(frozen=True)
class PartCost:
    """One block, or one part before or after the blocks.

    ``flops`` are of a forward: of the run that was counted, or estimated per token (see :attr:`ModelCost.counted`);
    a backward costs twice that, so shares are the same for a training step.
    """

    name: str
    parameters: int
    bytes: int
    flops: int


@dataclass(frozen=True)
class ModelCost:
    """The costs of a network that can be cut between its blocks."""

    blocks: tuple[PartCost, ...]
    before: tuple[PartCost, ...] = ()
    after: tuple[PartCost, ...] = ()
    counted: bool = False


def measure(
    blocks: Sequence[nn.Module],
    before: Mapping[str, nn.Module | nn.Parameter],
    after: Mapping[str, nn.Module | nn.Parameter],
    *,
    run: Callable[[], Any] | None = None,
) -> ModelCost:
    """The cost of each block and of each part before and after them.

    Args:
        blocks: In the order in which they run; on any device or on meta.
        run: Calls the network, or the parts one by one, on inputs that it makes itself: what it makes are fake tensors
            too. Without it, or where it raises (the reason is warned), the operations are estimated as 2 per token and
            parameter; embeddings look up and count nothing.
    """
    modules: list[tuple[str, nn.Module | nn.Parameter]] = [
        *before.items(),
        *((str(index), block) for index, block in enumerate(blocks)),
        *after.items(),
    ]
    flops = _counted_flops([part for _, part in modules], run) if run is not None else None
    costs = [
        PartCost(
            name,
            sum(parameter.numel() for parameter in _parameters(part)),
            sum(parameter.numel() * parameter.element_size() for parameter in _parameters(part)),
            _estimated_flops(part) if flops is None else flops[index],
        )
        for index, (name, part) in enumerate(modules)
    ]
    first, last = len(before), len(before) + len(blocks)
    return ModelCost(tuple(costs[first:last]), tuple(costs[:first]), tuple(costs[last:]), counted=flops is not None)


def _parameters(part: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [part] if isinstance(part, nn.Parameter) else list(part.parameters())


def _estimated_flops(part: nn.Module | nn.Parameter) -> int:
    if isinstance(part, nn.Parameter):
        return 0
    looked_up = {id(module.weight) for module in part.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    return 2 * sum(parameter.numel() for parameter in part.parameters() if id(parameter) not in looked_up)


def _counted_flops(parts: Sequence[nn.Module | nn.Parameter], run: Callable[[], Any]) -> list[int] | None:
    """Of each part in one call of ``run``; ``None`` if it fails."""
    flops = [0] * len(parts)
    counter = FlopCounterMode(display=False)

    def count_during(index: int) -> tuple[Callable[..., None], Callable[..., None]]:
        def start(*_: Any) -> None:
            flops[index] -= counter.get_total_flops()

        def stop(*_: Any) -> None:
            flops[index] += counter.get_total_flops()

        return start, stop

    with ExitStack() as stack:
        for index, part in enumerate(parts):
            if isinstance(part, nn.Module):
                start, stop = count_during(index)
                stack.callback(part.register_forward_pre_hook(start).remove)
                stack.callback(part.register_forward_hook(stop).remove)
        try:
            with torch.no_grad(), _without_computing(parts), counter:
                run()
        except Exception as error:
            warnings.warn(
                f"the network's operations are estimated from its parameters: it can't be run on fake tensors"
                f" ({type(error).__name__}: {error})",
                stacklevel=3,
            )
            return None
    return flops


@contextmanager
def _without_computing(parts: Sequence[nn.Module | nn.Parameter]) -> Iterator[None]:
    if any(parameter.is_meta for part in parts for parameter in _parameters(part)):
        with torch.device("meta"):
            yield
    else:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
