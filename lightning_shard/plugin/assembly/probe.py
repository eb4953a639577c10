"""Runs code of a module in order to observe it, or so that it can run again: state that a run changes is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_shard.parallel.blocks import Blocks
from lightning_shard.parallel.experts.module_lists import RestoreAndReplay
from lightning_shard.pipeline.cost import watch
from lightning_shard.pipeline.stages.parts import part_of
from lightning_shard.plugin.steps import randomness
from lightning_shard.state.tree_state import Taken, take


class RunChanges(NamedTuple):
    """Access to what runs of a module's code have changed."""

    changed: Callable[[], list[str]]
    restore: Callable[[], None]


@contextmanager
def _taken(module: nn.Module) -> Iterator[Taken]:
    taken = take(module)
    try:
        yield taken
    finally:
        taken.forget()


@contextmanager
def trial_runs(device: torch.device, module: nn.Module) -> Iterator[RunChanges]:
    """Snapshot what a run of the module's code may change: its state and the generators; yields how to restore it."""
    with _taken(module) as taken:
        put_generators_back = randomness.remember(device)

        def restore() -> None:
            try:
                taken.put_back()
            finally:
                put_generators_back()

        yield RunChanges(taken.changed, restore)


@contextmanager
def two_runs(device: torch.device, module: nn.Module) -> Iterator[RestoreAndReplay]:
    """Yield what a second run of a module's code needs: how to restore its state and draw the same numbers."""
    with _taken(module) as taken:
        put_generators_back = randomness.remember(device)

        @contextmanager
        def same_draws() -> Iterator[None]:
            with randomness.preserved(device):
                put_generators_back()
                yield

        yield taken.put_back, same_draws


_EXAMPLE_TOKENS = 16


@contextmanager
def restoring_state(module: nn.Module) -> Iterator[None]:
    """Restore the module's state after a run inside: a cache filled in the run would hold fake tensors."""
    with _taken(module) as taken:
        try:
            yield
        finally:
            taken.put_back()


def calls_on_example(module: nn.Module) -> Sequence[str]:
    """The names of all modules in the order in which an example run calls them; empty without an example."""
    run = example_of(module, None)
    if run is None:
        return ()
    with restoring_state(module):
        seen = watch({name: part for name, part in module.named_modules() if name}, run)
    return seen.calls if seen is not None else ()


def example_of(module: nn.Module, blocks: Blocks | None) -> Callable[[], Any] | None:
    """A call of the network in which to count operations: on the module's or model's own example, or on token ids.

    Args:
        blocks: ``None`` if it isn't known yet what is cut.
    """
    example: Any = getattr(module, "example_input_array", None)
    if example is not None:
        inputs = example if isinstance(example, (tuple, dict)) else (example,)
        return lambda: module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    for network in [module.get_submodule(blocks.network)] if blocks else module.children():
        if isinstance(getattr(type(network), "dummy_inputs", None), property):  # transformers
            return partial(_call_on_dummies, network)
    if blocks:
        inside = (name for name in blocks.before if not blocks.network or name.startswith(f"{blocks.network}."))
        takes_tokens = any(isinstance(part_of(module, name), nn.Embedding) for name in inside)
        return partial(_call_on_tokens, module.get_submodule(blocks.network)) if takes_tokens else None
    for network in module.children():
        if any(isinstance(part, nn.Embedding) for part in network.children()):
            return partial(_call_on_tokens, network)
    return None


def _call_on_dummies(network: Any) -> Any:
    return network(**network.dummy_inputs)


def _call_on_tokens(network: nn.Module) -> Any:
    return network(torch.zeros(1, _EXAMPLE_TOKENS, dtype=torch.long))
