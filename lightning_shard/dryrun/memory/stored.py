"""Estimates a layout's checkpoint: files, bytes, the manifest's size, and a store's requests for a save and a load.

The checkpoint's own planners compute what one rank of each stage writes. The stage's other ranks are taken to write the
same amount, which is right except for a few bytes of replicated tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES
from lightning_shard.checkpoint.format.header import header_of
from lightning_shard.checkpoint.saving.files import Piece, plan_file
from lightning_shard.checkpoint.saving.part import Outlined, my_cuts
from lightning_shard.checkpoint.shards import Split, local_boxes, shard_strided_last
from lightning_shard.checkpoint.store.remote import RANGE_BYTES
from lightning_shard.checkpoint.store.s3 import PART_BYTES
from lightning_shard.checkpoint.tensors import Frame, KnownMesh, Spread
from lightning_shard.dryrun.counting.counts import Counts, ParameterCount
from lightning_shard.dryrun.memory.optimizer import OptimizerState, StateTensor
from lightning_shard.layout import Layout
from lightning_shard.pipeline.placement import seconds_text, size_text

_ATTEMPT = "0" * 12
_OF_A_FILE = len(f'"model/rank-00000-{_ATTEMPT}.safetensors"') + 110
"""Bytes of the manifest for each file: its path, sizes and digest."""

_OF_A_TENSOR = 70
"""Bytes of the manifest for each tensor, besides its name: its dtype, shape and rows."""


@dataclass(frozen=True)
class Stored:
    """The estimate of a checkpoint."""

    bytes: int  # of the whole checkpoint
    files: int  # with the manifest and the trainer state
    rank_bytes: int  # the most bytes that a rank writes, or reads on the same layout
    manifest_bytes: int  # approximately, with its table
    puts: int  # that rank's requests to S3 for a save
    gets: int  # the same for a load on the same layout
    has_optimizer: bool = True  # whether the numbers include the optimizer's state

    def seconds(self, bytes_per_s: float) -> float:
        """The time of a save or a load, in seconds, if a rank has this much of a disk's or store's bandwidth."""
        return (self.rank_bytes + self.manifest_bytes) / bytes_per_s

    def __str__(self) -> str:
        without = "" if self.has_optimizer else " without the optimizer's state, which isn't known"
        return (
            f"checkpoint{without}: {size_text(self.bytes)} in {self.files:,} files, at most"
            f" {size_text(self.rank_bytes)} of a rank, its manifest about {size_text(self.manifest_bytes)};\n"
            f"  {seconds_text(self.seconds(10**9))} at 1 GB/s for each rank; on S3 {self.puts:,} requests of a rank to"
            f" save, {self.gets:,} to load"
        )


def stored(
    counts: Counts, layout: Layout, ranks: Sequence[Sequence[range]], optimizer: OptimizerState | None
) -> Stored:
    """Estimate a layout's checkpoint; ``ranks`` are the blocks of each stage of each pipeline rank."""
    held = [
        {p.name: p for blocks in stages for part in counts.of_stage(blocks) for p in part.parameters}
        for stages in ranks
    ]
    owners = {name: index for index, parameters in enumerate(held) for name in parameters}
    per_rank: list[list[int]] = []
    total = files = manifest = 0
    for index, parameters in enumerate(held):
        own = [p for name, p in parameters.items() if owners[name] == index]  # tied: saved by its last rank
        written, rows = _of_rank(own, layout, index, optimizer)
        total += sum(written) * layout.stage_size
        files += len(written) * layout.stage_size
        manifest += rows * layout.stage_size + len(written) * layout.stage_size * _OF_A_FILE
        per_rank.append(written)
    most = max(per_rank, key=sum)
    return Stored(
        total + counts.saved_buffer_bytes + manifest,
        files + 2,
        sum(most),
        manifest,
        sum(1 if nbytes <= PART_BYTES else 2 + math.ceil(nbytes / PART_BYTES) for nbytes in most),
        1 + sum(math.ceil(nbytes / RANGE_BYTES) for nbytes in most),
        optimizer is not None,
    )


def _of_rank(
    parameters: Sequence[ParameterCount], layout: Layout, stage: int, optimizer: OptimizerState | None
) -> tuple[list[int], int]:
    """Bytes of each file of the stage's first rank, and of the table's rows of their chunks and the tensors' lines."""
    ranks = torch.tensor(layout.stages()[stage]).view(layout.data_parallel_replicas, layout.shard_size, -1)
    frame = Frame(ranks, int(ranks[0, 0, 0]))
    place = KnownMesh(lambda: None, ranks, (0, 0, 0))  # type: ignore[arg-type,return-value]

    @cache
    def plain(*sizes: int) -> Spread:
        return Spread(sizes, tuple(local_boxes([((0, size),) for size in sizes])))

    cut = cache(partial(_spread, layout=layout, place=place))

    def spread(parameter: ParameterCount) -> Spread:
        return cut(parameter.shape, parameter.local_shape, parameter.is_expert)

    def kept_for(parameter: ParameterCount, kept: StateTensor) -> list[Outlined]:
        name = f"{parameter.name}.{kept.key}"
        if kept.is_whole:
            return kept.times * [Outlined(name, kept.dtype, spread(parameter))]
        more = (kept.times,) * (kept.times != 1)
        return [Outlined(name, kept.dtype, plain(*more, *(parameter.local_shape[dim] for dim in kept.dims)))]

    sections: dict[str, list[Outlined]] = {"model": [Outlined(p.name, p.dtype, spread(p)) for p in parameters]}
    sections["optimizer"] = [
        each
        for p in parameters
        for kept in (optimizer.tensors.get(p.name, ()) if optimizer is not None else ())
        for each in kept_for(p, kept)
    ]
    files, rows = [], 0
    for tensors in sections.values():
        cuts = my_cuts(list(enumerate(tensors)), frame)
        if not cuts:
            continue
        outlined = [(tensors[cut.number], cut.box) for cut in cuts]
        plan = plan_file([Piece(t.name, t.dtype, t.spread.shape, box) for t, box in outlined])
        files.append(len(header_of(plan.header, plan.places)) + plan.data_bytes)
        rows += sum(_row_bytes(tensor, box.sizes, layout) for tensor, box in outlined)
    return files, rows


def _row_bytes(tensor: Outlined, sizes: Sequence[int], layout: Layout) -> int:
    """Bytes of a chunk in the table, with its share of the manifest's line of its tensor."""
    blocks = -(-math.prod(sizes) * tensor.dtype.itemsize // BLOCK_BYTES)
    row = (3 + 2 * max(len(sizes), 2)) * 8 + blocks * DIGEST_BYTES
    return row + (len(tensor.name) + _OF_A_TENSOR) // layout.stage_size


def _spread(
    shape: tuple[int, ...], local_shape: tuple[int, ...], is_expert: bool, layout: Layout, place: KnownMesh
) -> Spread:
    """A parameter's layout over the stage's replicas, shards and tensor ranks, as by FSDP2 over tensor parallelism."""
    from torch.distributed.tensor import Replicate, Shard

    cut = [] if is_expert else [d for d, (whole, local) in enumerate(zip(shape, local_shape)) if whole != local][:1]
    tensor = layout.tensor_parallel_size
    # experts are over both of their axes; the same bytes for any dim
    splits = [Split(0, layout.shard_size, 0, tensor if cut == [0] else 1)] if shape else []
    boxes = tuple(local_boxes(shard_strided_last(shape, [*splits, *(Split(dim, tensor, 0) for dim in cut)])))
    placements = Replicate(), Shard(0) if shape else Replicate(), Shard(cut[0]) if cut else Replicate()
    return Spread(shape, boxes, place, placements)
