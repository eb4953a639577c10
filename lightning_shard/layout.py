"""The layout of ranks: sizes of the parallel axes, each rank's coordinates, and the device meshes.

No other module computes ranks. The world is one multi-dimensional box of ranks, in which the last axis varies fastest::

    rank = ((((stages − 1 − stage) × replicas + replica) × shards + shard) × context + context_rank) × tensor
           + tensor_rank

Why in this order: ``docs/architecture.md`` (Ranks). Context ranks, which hold parts of one sequence, lie inside the
data axis: parameters are sharded over them too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from lightning_shard.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PIPELINE_AXIS = "pipeline_parallel"
REPLICA_AXIS = "data_parallel_replicas"
DATA_AXIS = "data_parallel"
TENSOR_AXIS = "tensor_parallel"
EXPERT_AXIS = "expert_parallel"
EXPERT_DATA_AXIS = "data_parallel_of_experts"
PARTS_OF_DATA_AXIS = (EXPERT_DATA_AXIS, EXPERT_AXIS)
"""The axes of the experts' mesh that make up :data:`DATA_AXIS`."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a run's parallel axes, and the coordinates of one rank.

    ``data_parallel_size`` counts every data-parallel rank; parameters are sharded over ``shard_size`` ranks and
    replicated over ``data_parallel_replicas``. A mixture's experts are distributed over ``expert_parallel_size``
    adjacent data ranks, and sharded over the ``shard_size / expert_parallel_size`` ranks that hold the same experts.
    Each data rank's sequences are split over ``context_parallel_size`` ranks; parameters are sharded over these too.
    """

    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_replicas: int = 1
    tensor_parallel_size: int = 1
    rank: int = 0
    expert_parallel_size: int = 1
    context_parallel_size: int = 1

    @classmethod
    def resolve(
        cls,
        world_size: int,
        rank: int = 0,
        *,
        data_parallel_size: int | Literal["auto"] = "auto",
        **sizes: int,
    ) -> Layout:
        """The layout for ``world_size`` ranks, checked; ``data_parallel_size="auto"`` takes the ranks that are left.

        Args:
            sizes: Of the other axes, by the names of the attributes; 1 by default.

        Raises:
            LayoutError: The product of the sizes isn't the world size; the message names sizes that fit.
        """
        check_sizes(data_parallel_size=data_parallel_size, **sizes)
        names = "pipeline_parallel_size", "tensor_parallel_size", "context_parallel_size"
        of_model = {name: sizes.get(name, 1) for name in names}
        model_ranks = math.prod(of_model.values())
        product = " × ".join(f"{name} ({size})" for name, size in of_model.items() if size > 1 or name in names[:2])
        left, rest = divmod(world_size, model_ranks)
        data = left if data_parallel_size == "auto" else data_parallel_size
        models = f"sizes whose product is one of {divisors(world_size)}"
        if rest and data_parallel_size == "auto":
            raise LayoutError(
                f"{product} = {model_ranks} must divide the number of processes ({world_size}): start a multiple of"
                f" {model_ranks} processes, or choose {models}."
            )
        if model_ranks * data != world_size:
            fits = f"model {models}" if rest else f'data_parallel_size={left} (or "auto")'
            raise LayoutError(
                f"{product} × data_parallel_size ({data}) = {model_ranks * data} must equal the number of processes"
                f" ({world_size}): start {model_ranks * data} processes, or use {fits}."
            )
        _check_parts(data, sizes.get("data_parallel_replicas", 1), sizes.get("expert_parallel_size", 1))
        return cls(data_parallel_size=data, rank=rank, **sizes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes by the name of their setting, without this rank's coordinates.

        Checkpoints hold this mapping, in which the expert and context axes are only if they are larger than 1.
        """
        optional = "expert_parallel_size", "context_parallel_size"
        return {name: getattr(self, name) for name in SIZES if name not in optional or getattr(self, name) > 1}

    @property
    def world_size(self) -> int:
        return self.pipeline_parallel_size * self.stage_size

    @property
    def shard_size(self) -> int:
        """The number of ranks that fully sharded data parallelism shards a parameter over."""
        return self.data_parallel_size // self.data_parallel_replicas * self.context_parallel_size

    @property
    def pipeline_rank(self) -> int:
        """This rank's stage."""
        return self.pipeline_parallel_size - 1 - self.rank // self.stage_size

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads; the same for all ranks of a pipeline, tensor or context group."""
        return self.rank // (self.tensor_parallel_size * self.context_parallel_size) % self.data_parallel_size

    @property
    def is_first_of_data_rank(self) -> bool:
        """Whether this rank comes first among those of its data rank that have the last stage: it writes results."""
        return self.pipeline_rank == self.pipeline_parallel_size - 1 and self.context_rank == self.tensor_rank == 0

    @property
    def context_rank(self) -> int:
        """Which part of each sequence this rank computes."""
        return self.rank // self.tensor_parallel_size % self.context_parallel_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def stage_size(self) -> int:
        """The number of ranks that hold one pipeline stage."""
        return self.data_parallel_size * self.context_parallel_size * self.tensor_parallel_size

    def at(self, rank: int) -> Layout:
        """The same layout with the coordinates of another rank."""
        return replace(self, rank=rank)

    def stages(self) -> list[range]:
        """The ranks of each stage, in stage order."""
        return [range(first, first + self.stage_size) for first in range(0, self.world_size, self.stage_size)][::-1]

    def neighbours(self, size: int) -> range:
        """The aligned run of ``size`` consecutive ranks that holds this rank: its stage, or its tensor group."""
        first = self.rank - self.rank % size
        return range(first, first + size)

    def pipelines(self) -> list[list[int]]:
        """The ranks of each pipeline, in stage order."""
        return [ranks[::-1] for ranks in self.groups("stage")]

    def groups(self, *axes: Literal["stage", "data", "context", "tensor"]) -> list[list[int]]:
        """The groups of ranks that differ in these axes only, in ascending order: of stages the last comes first."""
        data, context, tensor = self.data_parallel_size, self.context_parallel_size, self.tensor_parallel_size
        sizes = {"stage": self.pipeline_parallel_size, "data": data, "context": context, "tensor": tensor}
        box = np.arange(self.world_size).reshape(*sizes.values())
        moved = np.moveaxis(box, [[*sizes].index(axis) for axis in axes], range(-len(axes), 0))
        groups: list[list[int]] = moved.reshape(-1, math.prod(sizes[axis] for axis in axes)).tolist()
        return groups

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis name to size, slowest axis first; without the replica axis if there is one replica."""
        axes = {PIPELINE_AXIS: self.pipeline_parallel_size}
        if self.data_parallel_replicas > 1:
            axes[REPLICA_AXIS] = self.data_parallel_replicas
        axes[DATA_AXIS] = self.shard_size
        axes[TENSOR_AXIS] = self.tensor_parallel_size
        return axes

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The mesh axes within one pipeline stage."""
        return (*self.data_axes, TENSOR_AXIS)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The mesh axes that parameters are sharded over; with replicas, the replica axis first."""
        return (REPLICA_AXIS, DATA_AXIS) if self.data_parallel_replicas > 1 else (DATA_AXIS,)

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of all ranks. Collective: every rank calls it once."""
        return _mesh(device_type, self.mesh_shape)

    def expert_mesh(self, device_type: str) -> DeviceMesh:
        """The mesh of all ranks, its data axis divided in two for experts.

        The expert axis is the inner one, since its ranks communicate in every layer. Collective, as :meth:`mesh`.
        """
        shape: dict[str, int] = {}
        for axis, size in self.mesh_shape.items():
            if axis == DATA_AXIS:
                shape[EXPERT_DATA_AXIS] = size // self.expert_parallel_size
                shape[EXPERT_AXIS] = self.expert_parallel_size
            else:
                shape[axis] = size
        return _mesh(device_type, shape)

    @property
    def expert_data_axes(self) -> tuple[str, ...]:
        """The axes of the experts' mesh that experts are sharded over; with replicas, the replica axis first."""
        return (REPLICA_AXIS, EXPERT_DATA_AXIS) if self.data_parallel_replicas > 1 else (EXPERT_DATA_AXIS,)

    def __str__(self) -> str:
        replicas = f" in {self.data_parallel_replicas} replicas" if self.data_parallel_replicas > 1 else ""
        experts = f" (experts over {self.expert_parallel_size})" if self.expert_parallel_size > 1 else ""
        context = f" × {self.context_parallel_size} context" if self.context_parallel_size > 1 else ""
        return (
            f"{self.pipeline_parallel_size} pipeline × {self.data_parallel_size} data{replicas}{experts}{context}"
            f" × {self.tensor_parallel_size} tensor"
        )


def _mesh(device_type: str, shape: Mapping[str, int]) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))


SIZES = tuple(field.name for field in fields(Layout) if field.name != "rank")
"""The names of all sizes."""


def check_sizes(*, data_parallel_size: int | Literal["auto"] = 1, **others: int) -> None:
    """Check the axis sizes, by name, as far as that is possible without the world size.

    Raises:
        LayoutError: A size isn't a positive integer, replicas or experts don't divide the data ranks, or context
            parallelism is combined with an axis that it doesn't support.
    """
    sizes: dict[str, Any] = {**dict.fromkeys(SIZES, 1), **others, "data_parallel_size": data_parallel_size}
    for name, value in sizes.items():
        if name == "data_parallel_size" and isinstance(value, str) and value == "auto":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            auto = ' or "auto"' if name == "data_parallel_size" else ""
            raise LayoutError(f"{name} ({value!r}) must be an integer of at least 1{auto}.")
    if (context := sizes["context_parallel_size"]) > 1:
        for name in ("pipeline_parallel_size", "tensor_parallel_size", "expert_parallel_size"):
            if sizes[name] > 1:
                raise LayoutError(
                    f"context_parallel_size ({context}) goes with data-parallel ranks and replicas only: use {name}=1"
                    f" (it is {sizes[name]}), or context_parallel_size=1."
                )
    if data_parallel_size != "auto":
        _check_parts(data_parallel_size, sizes["data_parallel_replicas"], sizes["expert_parallel_size"])


def _check_parts(data: int, replicas: int, experts: int) -> None:
    if data % replicas:
        raise LayoutError(
            f"data_parallel_replicas ({replicas}) must divide data_parallel_size ({data}): use one of {divisors(data)}."
        )
    shards = data // replicas
    if shards % experts:
        product = "data_parallel_size" + (" / data_parallel_replicas" if replicas > 1 else "")
        raise LayoutError(
            f"expert_parallel_size ({experts}) must divide {product} ({shards}), since experts are dealt to"
            f" data-parallel ranks: use one of {divisors(shards)}, or a multiple of {experts * replicas} data-parallel"
            " ranks."
        )


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
