"""Which experts a mixture's tokens go to, on any layout: by sample, and as the rows that each expert computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_shard.parallel.experts.stacked import Dispatched
from tests.parity import LENGTH, world

Place = tuple[str, int]
"""A mixture's name and the step."""


@dataclass
class Routed:
    """What one rank saw in training; where experts are one module, of stacked parameters.

    Attributes:
        chosen: Each sample's experts, ``[LENGTH, k]``, by the sample's own tokens.
        computed: How many rows came to each expert, ``[experts]``. Not in the first step, whose batch runs again in a
            rehearsal.
        loads: What lists of experts count themselves, in evaluations too, by their buffers' names.
    """

    chosen: dict[Place, dict[bytes, Tensor]] = field(default_factory=dict)
    computed: dict[Place, Tensor] = field(default_factory=dict)
    loads: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class _Now:
    """Of this process's run. Not the callback's own: what hooks hold is kept apart by the stages of a rank."""

    routed: Routed
    samples: list[bytes] = field(default_factory=list)
    step: int = 0


_now = _Now(Routed())


class Routing(L.Callback):
    """Fills ``routed``."""

    def __init__(self, routed: Routed) -> None:
        self.routed = routed

    def on_train_start(self, trainer: L.Trainer, module: Any) -> None:
        _now.routed = self.routed
        getattr(module, "entrance", module.model).register_forward_pre_hook(_begin)
        for name, inner in module.named_modules():
            if name.endswith("experts") and type(getattr(inner, "num_experts", None)) is int:
                inner.register_forward_pre_hook(partial(_choose, name), with_kwargs=True)
                dispatched = getattr(inner.forward, "__func__", None)
                if isinstance(dispatched, Dispatched):
                    _count_rows(name, dispatched)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        _now.step = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for name, inner in module.named_modules():
            # of a block that another stage holds it is no state of this one's
            if "load" in inner._buffers and "load" not in inner._non_persistent_buffers_set:
                self.routed.loads[f"{name}.load"] = inner.get_buffer("load").clone()


def _begin(module: nn.Module, args: Any) -> None:
    _now.samples = [sample.numpy().tobytes() for sample in args[0].cpu()]


def _choose(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    if not _counts(module):
        return
    hidden, indices, _ = [*args, *kwargs.values()]
    assert len(hidden) == len(indices) == LENGTH * len(_now.samples)
    of_samples = indices.detach().cpu().sort(-1).values.unflatten(0, (-1, LENGTH)).clone()
    _now.routed.chosen.setdefault((name, _now.step), {}).update(zip(_now.samples, of_samples))


def _count_rows(name: str, dispatched: Dispatched) -> None:
    compute, mesh = dispatched._compute, dispatched._mesh

    def counted(module: nn.Module, rows: Tensor, experts: Tensor, scales: Tensor, here: int) -> Tensor:
        if _counts(module) and _now.step:
            nothing = torch.zeros(here * mesh.size(), dtype=torch.long)
            counts = _now.routed.computed.setdefault((name, _now.step), nothing)
            counts[mesh.get_local_rank() * here :][:here] += experts.flatten().cpu().bincount(minlength=here)
        return compute(module, rows, experts, scales, here)

    vars(dispatched)["_compute"] = counted


def _counts(module: nn.Module) -> bool:
    """In training, and not when it runs again in a backward."""
    return module.training and torch._C._current_graph_task_id() == -1


def assert_routed_alike(ranks: Sequence[Routed], plain: Routed, sizes: Mapping[str, int]) -> None:
    """Every sample's experts in every step, and how many rows each computed, are those of one process.

    Args:
        ranks: Of all ranks of a layout, in their order.
    """
    tensor = sizes["tensor_parallel_size"]
    assert len(ranks) == world(sizes)
    chosen: dict[Place, dict[bytes, Tensor]] = {}
    computed: dict[Place, Tensor] = {}
    loads: dict[str, Tensor] = {}
    for rank, routed in enumerate(ranks):
        for place, samples in routed.chosen.items():
            before = chosen.setdefault(place, {})
            assert all(torch.equal(before[key], samples[key]) for key in before.keys() & samples.keys()), place
            before |= samples
        if rank % tensor:  # computes what its neighbours compute
            assert all(
                torch.equal(routed.computed[place], ranks[rank - 1].computed[place]) for place in routed.computed
            )
            continue
        for place, counts in routed.computed.items():
            computed[place] = computed.get(place, 0) + counts
        for name, load in routed.loads.items():
            loads[name] = loads.get(name, 0) + load
    assert chosen.keys() == plain.chosen.keys()
    for place, expected in plain.chosen.items():
        assert chosen[place].keys() == expected.keys(), place
        moved = sum(int((chosen[place][key] != expected[key]).sum()) for key in expected)
        assert not moved, f"{place}: {moved} choices are other ones"
        if place in computed:
            everything = torch.cat([*expected.values()]).flatten()
            assert torch.equal(computed[place], everything.bincount(minlength=len(computed[place]))), place
    if sizes.get("expert_parallel_size", 1) > 1:
        assert plain.chosen or plain.loads
        assert computed.keys() == {place for place in plain.chosen if place[1]}
    assert loads.keys() == plain.loads.keys()
    assert all(torch.equal(loads[name], plain.loads[name]) for name in loads)
