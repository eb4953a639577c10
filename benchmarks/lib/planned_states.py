"""The states of large GPTs on many ranks, as a save and a load plan them: by arithmetic, without memory or ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from benchmarks.lib.state import MOMENTS
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES
from lightning_shard.checkpoint.format.header import header_of
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.stored import StoredTensor
from lightning_shard.checkpoint.saving.accounts import Account
from lightning_shard.checkpoint.saving.files import Piece, Written, plan_file
from lightning_shard.checkpoint.saving.part import my_cuts, outlined
from lightning_shard.checkpoint.shards import LocalBox, Split, local_boxes, local_shape, shard_strided_last
from lightning_shard.checkpoint.tensors import Frame, KnownMesh, Located, Spread

ATTEMPT = "0123456789ab"


@dataclass(frozen=True)
class Layout:
    pipeline: int
    data: int
    tensor: int

    @property
    def ranks(self) -> int:
        return self.pipeline * self.data * self.tensor

    def stage_ranks(self, stage: int) -> Tensor:
        """The ranks of a stage, of shape (data, tensor)."""
        return torch.arange(self.ranks).view(self.pipeline, self.data, self.tensor)[stage]

    def __str__(self) -> str:
        return f"{self.pipeline} × {self.data} × {self.tensor}"


@dataclass(frozen=True)
class Parameter:
    """``tensor_dim`` is cut by the tensor ranks; where None, each holds it whole. The data ranks cut rows."""

    shape: tuple[int, ...]
    tensor_dim: int | None = None


Parameters = dict[str, Parameter]
Pieces = list[tuple[Piece, Tensor]]


def gpt(layers: Iterable[int], width: int) -> Parameters:
    """The parameters of some consecutive layers."""
    parameters: Parameters = {}
    for layer in layers:
        for name in ("query", "key", "value", "mlp.up"):
            rows = 4 * width if name == "mlp.up" else width
            parameters[f"model.layers.{layer}.{name}.weight"] = Parameter((rows, width), 0)
            parameters[f"model.layers.{layer}.{name}.bias"] = Parameter((rows,), 0)
        for name in ("output", "mlp.down"):
            columns = 4 * width if name == "mlp.down" else width
            parameters[f"model.layers.{layer}.{name}.weight"] = Parameter((width, columns), 1)
            parameters[f"model.layers.{layer}.{name}.bias"] = Parameter((width,))
        for name in ("norm_1", "norm_2"):
            parameters[f"model.layers.{layer}.{name}.weight"] = Parameter((width,))
            parameters[f"model.layers.{layer}.{name}.bias"] = Parameter((width,))
    return parameters


def sections(parameters: Parameters) -> dict[str, dict[str, Parameter | None]]:
    """Model and optimizer; None stands for a step, a single number that all ranks of a stage hold."""
    optimizer: dict[str, Parameter | None] = {}
    for name, parameter in parameters.items():
        optimizer |= {f"{name}.{moment}": parameter for moment in MOMENTS}
        optimizer[f"{name}.step"] = None
    return {"model": dict(parameters), "optimizer": optimizer}


def pieces(tensors: list[Located], frame: Frame) -> Pieces:
    cuts = my_cuts(list(enumerate(outlined(tensors))), frame)
    return [
        (Piece(tensor.name, tensor.local.dtype, tensor.spread.shape, cut.box), cut.of(tensor))
        for cut in cuts
        for tensor in [tensors[cut.number]]
    ]


@lru_cache(maxsize=4096)
def boxes_of(
    parameter: Parameter, layout: Layout, data: int, tensor: int
) -> tuple[tuple[LocalBox, ...], tuple[int, ...]]:
    """The boxes of a rank's part, and its shape."""
    splits = [Split(0, layout.data, data, layout.tensor if parameter.tensor_dim == 0 else 1)]
    if parameter.tensor_dim is not None:
        splits.append(Split(parameter.tensor_dim, layout.tensor, tensor))
    runs = shard_strided_last(parameter.shape, splits)
    return tuple(local_boxes(runs)), local_shape(runs)


def pieces_of(parameters: Parameters, layout: Layout, stage: int, data: int, tensor: int) -> dict[str, Pieces]:
    ranks = layout.stage_ranks(stage)
    frame = Frame(ranks, int(ranks[data, tensor]))
    mesh = KnownMesh(lambda: None, ranks, (data, tensor))

    def located(name: str, parameter: Parameter | None) -> Located:
        if parameter is None:
            return Located(name, torch.empty((), device="meta"), Spread((), tuple(local_boxes(()))))
        boxes, shape = boxes_of(parameter, layout, data, tensor)
        placements = Shard(0), Replicate() if parameter.tensor_dim is None else Shard(parameter.tensor_dim)
        return Located(name, torch.empty(shape, device="meta"), Spread(parameter.shape, boxes, mesh, placements))

    return {
        title: pieces([located(name, parameter) for name, parameter in sorted(section.items())], frame)
        for title, section in sections(parameters).items()
    }


def account_of(pieces: dict[str, Pieces], rank: int, mesh_ranks: tuple[int, ...]) -> Account:
    """What the rank would tell after writing; the digests are made up."""
    account = Account.of_rank(rank, mesh_ranks)
    for section, parts in pieces.items():
        if not parts:
            continue
        plan = plan_file([piece for piece, _ in parts])
        header = header_of(plan.header, plan.places)
        blocks = sum(-(-data.nbytes // BLOCK_BYTES) for _, data in parts)
        path = f"{section}/rank-{rank:05d}-{ATTEMPT}.safetensors"
        file = FileEntry(path, len(header) + plan.data_bytes, len(header), "00" * DIGEST_BYTES)
        digests = np.zeros((blocks, DIGEST_BYTES), np.uint8)
        rows = plan.rows._replace(begin=plan.rows.begin + len(header), digests=digests)
        account.add(section, Written(file, plan.tensors, rows))
    return account


def reads_of(manifest: Manifest, parameters: Parameters, layout: Layout, data: int, tensor: int) -> Iterator[Read]:
    """What a rank reads; every tensor's memory is the same, which no one touches."""
    numels = [torch.Size(boxes_of(p, layout, data, tensor)[1]).numel() for p in parameters.values()]
    memory = torch.empty(max(numels))
    stored = {"model": manifest.model, "optimizer": manifest.optimizer}
    for title, section in sections(parameters).items():
        for name, parameter in section.items():
            boxes, shape = boxes_of(parameter, layout, data, tensor) if parameter else (tuple(local_boxes(())), ())
            local = memory[: torch.Size(shape).numel()].view(shape)
            for place in boxes:
                view = local
                for dim, (offset, size) in enumerate(zip(place.local_offsets, place.box.sizes)):
                    view = view.narrow(dim, offset, size)
                yield Read(StoredTensor(name, stored[title][name], None), place.box, view)  # type: ignore[arg-type]
