"""Counts the cost of each part of a network: parameters, bytes, and the floating-point operations of a forward.

Nothing is computed. Operations are counted on fake (or meta) tensors. Where the network can't run on these, because it
needs a real batch, they are estimated from the parameters.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_shard.pipeline.dataflow.masks import nothing_packed

Part = nn.Module | nn.Parameter


@dataclass(frozen=True)
class PartCost:
    """The cost of one block, or of one part before or after the blocks.

    ``flops`` counts one forward: of the run that was counted, or an estimate per token. A backward costs twice that, so
    each part's share of a training step is the same.

    Attributes:
        later: The share of ``flops`` spent in matrix products whose weight gradients can be deferred to the second
            part of a split backward (``split_backward.py``). An upper bound: only the autograd graph says for sure.
        runs_again: Whether the backward recomputes the forward first: by ``activation_checkpointing``, or by
            transformers' own flag.
    """

    name: str
    parameters: int
    bytes: int
    flops: int
    later: float = 0.0
    runs_again: bool = False


@dataclass(frozen=True)
class ModelCost:
    """The costs of a network that can be cut between its blocks; every stage holds a full copy of ``everywhere``.

    Attributes:
        parts: Those around the blocks, each with the place of the block that it runs before; ``len(blocks)`` if it runs
            after all.
    """

    blocks: tuple[PartCost, ...]
    parts: tuple[tuple[int, PartCost], ...] = ()
    everywhere: tuple[PartCost, ...] = ()

    def parts_at(self, place: int) -> tuple[PartCost, ...]:
        """The parts that run just before the block at this place, or after all blocks."""
        return tuple(part for own, part in self.parts if own == place)

    def as_run(self, recomputed: Collection[int], *, keeps_products: bool = False, compiled: bool = False) -> ModelCost:
        """The costs with some blocks recomputed, or all blocks compiled: such blocks can't defer weight gradients.

        Args:
            recomputed: Places of the blocks that use activation checkpointing.
            keeps_products: Recomputation runs no matrix products (selective checkpointing keeps their results).
            compiled: Whether blocks are compiled.
        """
        blocks = (
            replace(
                block,
                later=0.0 if compiled or place in recomputed else block.later,
                runs_again=block.runs_again or (place in recomputed and not keeps_products),
            )
            for place, block in enumerate(self.blocks)
        )
        return replace(self, blocks=tuple(blocks))


@dataclass(frozen=True)
class Run:
    """What was observed in one run of the network.

    Attributes:
        flops: Each part's operations, summed over all of its calls.
        calls: The names of the parts that were called, in order. A part that is called by another part is left out,
            unless it is a submodule of that part.
        products: Each part's operations in products of two matrices (``mm``, ``addmm``), as with weights.
    """

    flops: Mapping[str, int]
    calls: tuple[str, ...]
    products: Mapping[str, int]


def measure(
    blocks: Iterable[tuple[str, nn.Module]],
    parts: Mapping[str, tuple[int, Part]],
    seen: Run | None = None,
    everywhere: Mapping[str, Part] | None = None,
) -> ModelCost:
    """The cost of each block and of each part around them.

    Args:
        blocks: Names and modules in running order, repeated as often as they run; on any device or on meta.
        parts: By name, each with its place, as in :attr:`ModelCost.parts`.
        seen: The counted run. Without it, operations are estimated as 2 per token and parameter; embeddings are
            lookups and count nothing. Parts that the run didn't call are estimated likewise, for the run's number of
            tokens.
        everywhere: The parts that every stage holds and runs, by name.
    """
    blocks = list(blocks)
    times = Counter(name for name, _ in blocks)
    called = {name for name, flops in seen.flops.items() if flops or name in seen.calls} if seen is not None else set()
    estimated = sum(_estimated_flops(block) for name, block in blocks if name in called)
    tokens = sum(seen.flops[name] for name in times if name in called) / estimated if seen and estimated else 1

    def operations(name: str, part: Part) -> int:
        if seen is None or name not in called:
            return round(tokens * _estimated_flops(part))
        return seen.flops[name] // max(times[name], 1)

    everywhere = everywhere or {}
    every_part = {**dict(blocks), **{name: part for name, (_, part) in parts.items()}, **everywhere}
    users = Counter(id(parameter) for part in every_part.values() for parameter in _parameters(part))

    def later(name: str, part: Part) -> float:
        matrices = _matrices(part)
        deferrable = sum(p.numel() for p in matrices if p.requires_grad and users[id(p)] == 1)
        if not deferrable or _checkpoints_itself(part):
            return 0.0
        if seen is None or name not in called:
            return 2 * deferrable / _estimated_flops(part)
        share = deferrable / sum(p.numel() for p in matrices)
        return share * seen.products[name] / seen.flops[name] if seen.flops[name] else 0.0

    def cost(name: str, part: Part) -> PartCost:
        held = _parameters(part)
        return PartCost(
            name,
            sum(parameter.numel() for parameter in held),
            sum(parameter.numel() * parameter.element_size() for parameter in held),
            operations(name, part),
            later(name, part),
            _checkpoints_itself(part),
        )

    return ModelCost(
        tuple(cost(name, block) for name, block in blocks),
        tuple((place, cost(name, part)) for name, (place, part) in parts.items()),
        tuple(cost(name, part) for name, part in everywhere.items()),
    )


def watch(parts: Mapping[str, Part], run: Callable[[], Any], network: nn.Module | None = None) -> Run | None:
    """Count the operations of each part in one call of ``run``; if that fails, warn of the reason and return ``None``.

    Args:
        parts: The blocks, and the parts around them.
        run: Calls the network on inputs that it creates itself; they become fake tensors too.
        network: If ``run`` calls this module several times, only the first call is recorded in :attr:`Run.calls`: a
            step calls it once.
    """
    flops, products = dict.fromkeys(parts, 0), dict.fromkeys(parts, 0)
    calls: list[str] = []
    running: list[str] = []
    passes = 0
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten._grouped_mm: grouped_flops})

    def begin(*_: Any) -> None:
        nonlocal passes
        passes += 1

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def start(*_: Any) -> None:
            if passes < 2 and all(name.startswith(f"{outer}.") for outer in running):
                calls.append(name)
            running.append(name)
            flops[name] -= counter.get_total_flops()
            products[name] -= _product_flops(counter)

        def stop(*_: Any) -> None:
            running.pop()
            flops[name] += counter.get_total_flops()
            products[name] += _product_flops(counter)

        return start, stop

    with ExitStack() as stack:
        if network is not None:
            stack.callback(network.register_forward_pre_hook(begin).remove)
        for name, part in parts.items():
            if isinstance(part, nn.Module):
                start, stop = hooks(name)
                stack.callback(part.register_forward_pre_hook(start).remove)
                stack.callback(part.register_forward_hook(stop).remove)
        try:
            with (
                torch.no_grad(),
                on_fake_tensors(p for part in parts.values() for p in _parameters(part)),
                counter,
            ):
                run()
        except Exception as error:
            warnings.warn(
                f"the network's operations are estimated from its parameters: it can't be run on fake tensors"
                f" ({_first_sentence(error)})",
                stacklevel=3,
            )
            return None
    return Run(flops, tuple(calls), products)


def _first_sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0].partition(". ")[0]


def _parameters(part: Part) -> list[nn.Parameter]:
    return [part] if isinstance(part, nn.Parameter) else list(part.parameters())


def _estimated_flops(part: Part) -> int:
    if isinstance(part, nn.Parameter):
        return 0
    tables = _embedding_parameters(part)
    return 2 * sum(parameter.numel() for parameter in part.parameters() if id(parameter) not in tables)


def _embedding_parameters(part: nn.Module) -> set[int]:
    tables = (module for module in part.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    # Not module.weight: a parametrization computes it, and spectral_norm changes it with each access.
    return {id(parameter) for module in tables for parameter in module.parameters()}


def _matrices(part: Part) -> list[nn.Parameter]:
    """The parameters that matrix products may multiply by: those of two dimensions, without embedding tables."""
    if isinstance(part, nn.Parameter):
        return []
    tables = _embedding_parameters(part)
    return [parameter for parameter in part.parameters() if parameter.dim() == 2 and id(parameter) not in tables]


def _checkpoints_itself(part: Part) -> bool:
    """Whether transformers' own ``gradient_checkpointing`` flag is set, on a layer or on a module that calls layers."""
    return isinstance(part, nn.Module) and any(
        getattr(m, "gradient_checkpointing", False) is True for m in part.modules()
    )


def _product_flops(counter: FlopCounterMode) -> int:
    counts = counter.get_flop_counts().get("Global", {})
    return sum(counts.get(operation, 0) for operation in (torch.ops.aten.mm, torch.ops.aten.addmm))


@contextmanager
def on_fake_tensors(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Context in which a network with these parameters runs on fake (or meta) tensors."""
    on_meta = any(parameter.is_meta for parameter in parameters)
    without_data = torch.device("meta") if on_meta else FakeTensorMode(allow_non_fake_inputs=True)
    with without_data, GroupedMatmuls(), nothing_packed(), _without_tracebacks():
        yield


@contextmanager
def _without_tracebacks() -> Iterator[None]:
    """Keep torch from logging the traceback of an operation that fails on fake tensors: a warning says why."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class GroupedMatmuls(TorchDispatchMode):
    """Gives the output shape of ``_grouped_mm`` (a mixture of experts' matmul) for any dtype.

    torch 2.13 infers it for bf16 only, and logs an error for others. In a forward, each row is multiplied by one of
    several matrices; in a backward, each group of columns and rows gives one matrix.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default:
            a, b, ends = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs")
            if (a.dim(), b.dim()) == (2, 3):
                return a.new_empty(a.shape[0], b.shape[-1])
            if (a.dim(), b.dim()) == (2, 2) and ends is not None:
                return a.new_empty(ends.numel(), a.shape[0], b.shape[1])
        return func(*args, **kwargs)


def grouped_flops(a: torch.Size, b: torch.Size, *_: Any, **__: Any) -> int:
    """Each row of ``a`` is multiplied by one of the matrices in ``b``; in a backward both are rows of tokens."""
    return 2 * a.numel() * b[-1]
