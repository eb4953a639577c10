"""Estimates a layout's checkpoint: files, bytes, the manifest's size, and a store's requests for a save and a load.

Each rank of a stage writes a file of the model and one of the optimizer, with a chunk of each tensor: of its shard, or
of one that replicas have, its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_shard.arguments import seconds_text, size_text
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES
from lightning_shard.checkpoint.store.remote import RANGE_BYTES
from lightning_shard.checkpoint.store.s3 import PART_BYTES
from lightning_shard.dryrun.counting.counts import Counts, ParameterCount
from lightning_shard.dryrun.memory.optimizer import OptimizerState
from lightning_shard.dryrun.memory.peak import shard_numel
from lightning_shard.layout import Layout

_OF_A_FILE = 160
"""Bytes of the manifest for each file: its path, sizes and digest."""
_OF_A_TENSOR = 70
"""Bytes of the manifest for each tensor, besides its name: its dtype, shape and rows."""
_OF_A_HEADER = 90
"""Bytes of a file's header for each tensor, besides its name."""


@dataclass(frozen=True)
class Stored:
    """The estimate of a checkpoint."""

    bytes: int  # of the whole checkpoint
    files: int  # with the manifest and the trainer state
    rank_bytes: int  # the most bytes that a rank writes, or reads on the same layout
    manifest_bytes: int  # approximately, with its table
    puts: int  # that rank's requests to S3 for a save
    gets: int  # the same for a load on the same layout

    def seconds(self, bytes_per_s: float) -> float:
        """The time of a save or a load, in seconds, if a rank has this much of a disk's or store's bandwidth."""
        return (self.rank_bytes + self.manifest_bytes) / bytes_per_s

    def __str__(self) -> str:
        return (
            f"checkpoint: {size_text(self.bytes)} in {self.files:,} files, at most"
            f" {size_text(self.rank_bytes)} of a rank, its manifest about {size_text(self.manifest_bytes)};\n"
            f"  {seconds_text(self.seconds(10**9))} at 1 GB/s for each rank; on S3 {self.puts:,} requests of a rank to"
            f" save, {self.gets:,} to load"
        )


def stored(counts: Counts, layout: Layout, ranks: Sequence[Sequence[range]], optimizer: OptimizerState) -> Stored:
    """Estimate a layout's checkpoint; ``ranks`` are the blocks of each stage of each pipeline rank."""
    held = [
        {p.name: p for blocks in stages for part in counts.of_stage(blocks) for p in part.parameters}
        for stages in ranks
    ]
    owners = {name: index for index, parameters in enumerate(held) for name in parameters}
    total = counts.saved_buffer_bytes
    most: list[float] = []
    files = manifest = 0
    for index, parameters in enumerate(held):
        own = [p for name, p in parameters.items() if owners[name] == index]  # tied: saved by its last rank
        written = []
        for tensors in ([_Tensor.of(p, layout) for p in own], _of_optimizer(own, layout, optimizer)):
            if tensors:
                names = sum(len(t.name) for t in tensors)
                headers = names + _OF_A_HEADER * len(tensors)
                written.append(sum(t.rank_bytes for t in tensors) + headers)
                total += sum(t.bytes for t in tensors) + headers * layout.stage_size
                manifest += names + _OF_A_TENSOR * len(tensors) + _OF_A_FILE * layout.stage_size
                manifest += sum(t.rows_bytes for t in tensors)
        files += len(written) * layout.stage_size
        most = max(most, written, key=sum)
    return Stored(
        total + manifest,
        files + 2,
        round(sum(most)),
        manifest,
        sum(1 if nbytes <= PART_BYTES else 2 + math.ceil(nbytes / PART_BYTES) for nbytes in most),
        1 + sum(math.ceil(nbytes / RANGE_BYTES) for nbytes in most),
    )


@dataclass(frozen=True)
class _Tensor:
    """A tensor of a stage; ``rank_bytes``: what a rank writes of it, of all replicas' ranks."""

    name: str
    ndim: int
    bytes: int
    rank_bytes: float
    chunks: int = 1

    @classmethod
    def of(cls, parameter: ParameterCount, layout: Layout, itemsize: int = 0, suffix: str = "") -> _Tensor:
        """A tensor with a parameter's elements, sharded alike."""
        itemsize = itemsize or parameter.dtype.itemsize
        is_cut = parameter.shape != parameter.local_shape
        shards = layout.shard_size // (layout.expert_parallel_size if parameter.is_expert else 1)
        tensor = layout.tensor_parallel_size if is_cut else 1
        replicas = layout.data_parallel_replicas * layout.tensor_parallel_size // tensor
        own = shard_numel(parameter, shards) * itemsize / replicas
        nbytes, chunks = math.prod(parameter.shape) * itemsize, layout.shard_size * tensor
        return cls(parameter.name + suffix, len(parameter.shape), nbytes, own, chunks)

    @property
    def rows_bytes(self) -> int:
        """Bytes of its chunks in the table: numbers, and a digest of each block."""
        row = (3 + 2 * max(self.ndim, 2)) * 8 + math.ceil(self.bytes / self.chunks / BLOCK_BYTES) * DIGEST_BYTES
        return self.chunks * row


def _of_optimizer(parameters: Sequence[ParameterCount], layout: Layout, optimizer: OptimizerState) -> list[_Tensor]:
    found: list[_Tensor] = []
    for p in parameters:
        for kept in optimizer.tensors.get(p.name, ()):
            name = f".{kept.key}"
            if kept.is_whole:
                found += kept.times * [_Tensor.of(p, layout, kept.dtype.itemsize, name)]
            else:
                nbytes = kept.numel(p, 0) * kept.dtype.itemsize
                found.append(_Tensor(p.name + name, len(kept.dims), nbytes, nbytes / layout.stage_size))
    return found
