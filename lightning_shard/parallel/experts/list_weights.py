"""Shard the parameters of a list's experts over all data ranks, and gather those of this rank's experts in a forward.

Each expert keeps its parameters, under their names. If each rank held only its own experts' parameters, ranks would
hold parameters of different names. So they are sharded over all data ranks, as any other parameter. In a forward, each
rank gathers the full parameters of its own experts only, by an all-to-all: ``1/p`` of the bytes that FSDP2 would
all-gather, with ``p`` expert ranks. Gradients go back the same way in 32 bits, and are averaged over all data ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.parallel.collectives import all_to_all
from lightning_shard.parallel.containers import slots_of
from lightning_shard.parallel.tensor.local_modules import computing_with
from lightning_shard.sharding import chunk, laid_out


class _Kind(NamedTuple):
    """Shape and sharded dim of one parameter; the same for all experts of a list."""

    shape: torch.Size
    dim: int


class ExpertWeights:
    """Gathers the parameters of this rank's experts from all data ranks' shards, and reduces their gradients.

    Args:
        experts: All experts of the list.
        parts: Size of the expert axis: the number of adjacent data ranks that the experts are distributed over.
        mesh: The mesh of the data ranks; its last axis is the one that parameters are sharded over.
    """

    def __init__(self, experts: Sequence[nn.Module], parts: int, mesh: DeviceMesh) -> None:
        self._mesh, self._parts = mesh, parts
        self._ranks, self._rank = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
        self.here = len(experts) // parts
        self._slots = [slots_of(expert) for expert in experts]
        self._device = torch.device(mesh.device_type)
        self._kinds: list[_Kind] = []
        for module, key in self._slots[0]:
            parameter = module._parameters[key]
            assert isinstance(parameter, DTensor)
            dim: int = parameter.placements[-1].dim  # type: ignore[attr-defined]
            self._kinds.append(_Kind(parameter.shape, dim))
        first = self._rank % parts * self.here
        self.own = experts[first : first + self.here]
        self._own_slots = self._slots[first : first + self.here]

    def shards(self) -> list[Tensor]:
        """This rank's shards of the parameters of all experts, expert by expert."""
        return [module._parameters[key] for slots in self._slots for module, key in slots]  # type: ignore[misc]

    def in_place(self, place: int, full: Sequence[Tensor]) -> AbstractContextManager[None]:
        """Inside, one of this rank's experts holds its full parameters.

        Args:
            place: Index of the expert among this rank's experts.
            full: The result of :meth:`gather`.
        """
        slots = self._own_slots[place]
        whole = {id(module._parameters[key]): each for (module, key), each in zip(slots, full[place * len(slots) :])}
        return computing_with({module: None for module, _ in slots}, lambda shard: whole[id(shard)])

    def gather(self, shards: Sequence[DTensor]) -> list[Tensor]:
        """The full parameters of this rank's experts, expert by expert. Collective over the data ranks."""
        local = [shard.to_local().to(self._device).reshape(-1) for shard in shards]
        kinds = self._kinds * self.here
        for_part = [torch.cat(local[first : first + len(kinds)]) for first in range(0, len(local), len(kinds))]
        sent = [for_part[rank % self._parts] for rank in range(self._ranks)]
        came = self._exchange(sent, [self._elements(kinds, rank) for rank in range(self._ranks)])
        from_ranks = [self._cut(flat, kinds, rank) for rank, flat in enumerate(came)]
        return [torch.cat(pieces, kind.dim) for kind, pieces in zip(kinds, zip(*from_ranks))]

    def reduce_gradients(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of this rank's shards of all experts, averaged over all data ranks. Collective over these.

        Args:
            gradients: Gradients of the full parameters of this rank's experts, expert by expert.
        """
        kinds = self._kinds * self.here
        for_ranks = [
            torch.cat([chunk(g, kind.dim, self._ranks, rank).reshape(-1) for g, kind in zip(gradients, kinds)])
            for rank in range(self._ranks)
        ]
        own = self._elements(kinds, self._rank)
        came = self._exchange(for_ranks, [own] * self._ranks)
        own_experts = [torch.stack(came[i :: self._parts]).sum(0) for i in range(self._parts)]
        total = torch.cat(own_experts) / self._ranks
        for axis in range(self._mesh.ndim - 1):
            dist.all_reduce(total, group=self._mesh.get_group(axis))
            total /= self._mesh.size(axis)
        return self._cut(total, self._kinds * len(self._slots), self._rank)

    def _exchange(self, given: Sequence[Tensor], counts: list[int]) -> list[Tensor]:
        group = self._mesh.get_group(self._mesh.ndim - 1)
        return list(all_to_all(torch.cat(list(given)), group, [len(flat) for flat in given], counts).split(counts))

    def _shape(self, kind: _Kind, rank: int) -> list[int]:
        size = -(-kind.shape[kind.dim] // self._ranks)
        part = max(0, min(size, kind.shape[kind.dim] - rank * size))
        return [*kind.shape[: kind.dim], part, *kind.shape[kind.dim + 1 :]]

    def _elements(self, kinds: Sequence[_Kind], rank: int) -> int:
        """The number of elements of a rank's shards of some parameters."""
        return sum(torch.Size(self._shape(kind, rank)).numel() for kind in kinds)

    def _cut(self, flat: Tensor, kinds: Sequence[_Kind], rank: int) -> list[Tensor]:
        shapes = [self._shape(kind, rank) for kind in kinds]
        pieces = flat.split([torch.Size(shape).numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes)]


class Gathered(torch.autograd.Function):
    """Autograd function from the shards of all experts to the full parameters of this rank's experts.

    ``called`` must say, by the time of the backward, which experts any rank has called; the others get no gradients.
    Inputs are DTensors and not their local parts, since torch 2.11's ``to_local`` makes zeros of a missing gradient.
    """

    @staticmethod
    def forward(ctx: Any, weights: ExpertWeights, called: list[bool], *shards: DTensor) -> tuple[Tensor, ...]:
        ctx.weights, ctx.called, ctx.shards = weights, called, shards
        return tuple(weights.gather(shards))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights: ExpertWeights = ctx.weights
        shards: tuple[DTensor, ...] = ctx.shards
        kinds = len(gradients) // weights.here
        reduced_in = torch.promote_types(shards[0].dtype, torch.float32)
        back = weights.reduce_gradients([gradient.to(reduced_in) for gradient in gradients])
        # on one process, an expert that isn't called has no gradient
        has = [has_any for has_any in ctx.called for _ in range(kinds)]
        return None, None, *(laid_out(g.to(s.device, s.dtype), s) if h else None for g, s, h in zip(back, shards, has))
