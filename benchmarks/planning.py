"""What does it take to plan a checkpoint of 175 billion parameters on 512 ranks? Nothing is saved; all is reckoned.

GPT-3 with AdamW's state on 8 pipeline stages × 8 data × 8 tensor ranks. Planning a save is timed on one rank of a fake
process group of that size, with DTensors on the meta device; what all other ranks would write follows from the same
arithmetic, and makes the real manifest. The load is planned for a rank of another layout of as many ranks.

    python benchmarks/planning.py          # about a minute; results/planning-<date>.json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard  # as in checkpoint/dtensor.py: what FSDP2 makes
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.lib.report import RESULTS, Row, Target, show, write_result
from benchmarks.lib.state import MOMENTS
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES
from lightning_shard.checkpoint.format.header import header_of
from lightning_shard.checkpoint.format.manifest import FileEntry, Manifest
from lightning_shard.checkpoint.format.table import Table
from lightning_shard.checkpoint.loading.ranges import BATCH_BYTES, Read, _batches, plan_reads
from lightning_shard.checkpoint.loading.stored import StoredTensor
from lightning_shard.checkpoint.saving.accounts import Account, joined
from lightning_shard.checkpoint.saving.files import Piece, Written, plan_file
from lightning_shard.checkpoint.saving.merge import Merged
from lightning_shard.checkpoint.saving.part import my_cuts, outlined
from lightning_shard.checkpoint.shards import LocalBox, Split, local_boxes, local_shape, shard_strided_last
from lightning_shard.checkpoint.tensors import Frame, KnownMesh, Located, Spread, known_mesh, locate

SECOND = Target("seconds", 1, most=True)
PLAN_SAVE = "plan a save, each rank"
MERGE, WRITE = "make the manifest, first rank", "the manifest to bytes, first rank"
PARSE, PLAN_LOAD = "parse the manifest, each rank", "plan a load, each rank"
VOCABULARY, CONTEXT = 51_200, 2048
Timed = Callable[[str, Callable[[], Any]], Any]
"""Gives what the function gives, having taken its time."""
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


def gpt(layers: Iterable[int], width: int, *, first: bool, last: bool) -> Parameters:
    """The parameters of some consecutive layers, with what stands before the first and after the last of all."""
    parameters: Parameters = {}
    if first:
        parameters["model.embedding.weight"] = Parameter((VOCABULARY, width), 0)
        parameters["model.positions.weight"] = Parameter((CONTEXT, width))
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
    if last:
        parameters["model.norm.weight"] = Parameter((width,))
        parameters["model.head.weight"] = Parameter((VOCABULARY, width), 0)
    return parameters


def stage_parameters(layout: Layout, stage: int, layers: int, width: int) -> Parameters:
    per_stage = layers // layout.pipeline
    own = range(stage * per_stage, (stage + 1) * per_stage)
    return gpt(own, width, first=stage == 0, last=stage == layout.pipeline - 1)


def sections(parameters: Parameters) -> dict[str, dict[str, Parameter | None]]:
    """Model and optimizer; None stands for a step, a single number that all ranks of a stage hold."""
    optimizer: dict[str, Parameter | None] = {}
    for name, parameter in parameters.items():
        optimizer |= {f"{name}.{moment}": parameter for moment in MOMENTS}
        optimizer[f"{name}.step"] = None
    return {"model": dict(parameters), "optimizer": optimizer}


# -- a state of DTensors, on a fake process group ---------------------------------------------------------------------


def dtensors(parameters: Parameters, mesh: Any, layout: Layout) -> dict[str, dict[str, Tensor]]:
    """As FSDP2 over tensor parallelism makes them, on the meta device."""

    def tensor(parameter: Parameter | None) -> Tensor:
        if parameter is None:
            return torch.empty((), device="meta")
        sharded = _StridedShard(0, split_factor=layout.tensor) if parameter.tensor_dim == 0 else Shard(0)
        placements = [sharded, Replicate() if parameter.tensor_dim is None else Shard(parameter.tensor_dim)]
        data, tensor = mesh.get_coordinate()
        local = torch.empty(boxes_of(parameter, layout, data, tensor)[1], device="meta")
        whole = torch.empty(parameter.shape, device="meta")
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())

    return {
        title: {name: tensor(parameter) for name, parameter in section.items()}
        for title, section in sections(parameters).items()
    }


def plan_save(state: dict[str, dict[str, Tensor]], mesh: Any, rank: int) -> dict[str, Pieces]:
    frame = Frame.of(known_mesh(mesh), tuple(range(dist.get_world_size())), rank)
    return {
        title: pieces([locate(name, tensor) for name, tensor in sorted(section.items())], frame)
        for title, section in state.items()
    }


def pieces(tensors: list[Located], frame: Frame) -> Pieces:
    cuts = my_cuts(list(enumerate(outlined(tensors))), frame)
    return [
        (Piece(tensor.name, tensor.local.dtype, tensor.spread.shape, cut.box), cut.of(tensor))
        for cut in cuts
        for tensor in [tensors[cut.number]]
    ]


# -- the same for any rank, by arithmetic -----------------------------------------------------------------------------


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
    account = Account(rank, mesh_ranks)
    for section, parts in pieces.items():
        if not parts:
            continue
        plan = plan_file([piece for piece, _ in parts])
        header = header_of(plan.header, plan.places)
        digests = bytes(DIGEST_BYTES * sum(-(-data.nbytes // BLOCK_BYTES) for _, data in parts))
        path = f"{section}/rank-{rank:05d}-{ATTEMPT}.safetensors"
        file = FileEntry(path, len(header) + plan.data_bytes, len(header), "00" * DIGEST_BYTES)
        account.add(section, Written(file, plan.columns, digests))
    return account


def accounts_of(layout: Layout, layers: int, width: int) -> Iterator[Account]:
    for stage in range(layout.pipeline):
        parameters = stage_parameters(layout, stage, layers, width)
        mesh_ranks = tuple(layout.stage_ranks(stage).flatten().tolist())
        places = itertools.product(range(layout.data), range(layout.tensor))
        for rank, (data, tensor) in zip(mesh_ranks, places):
            yield account_of(pieces_of(parameters, layout, stage, data, tensor), rank, mesh_ranks)


# -- a load on another layout -----------------------------------------------------------------------------------------


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


def parsed(data: bytes, table: bytes) -> Manifest:
    manifest = Manifest.from_bytes(data)
    return manifest.take_table(Table(manifest.table, manifest.table.path, lambda: table))


# -- the question -----------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    layout, other = Layout(*options.layout), Layout(*options.other)
    seconds: dict[str, list[float]] = {}

    def timed(what: str, function: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = function()
        seconds.setdefault(what, []).append(time.perf_counter() - start)
        return result

    _plan_saves(options, layout, timed)
    data = _make_manifest(options, layout, timed)
    facts = _plan_loads(options, other, data, timed)
    limited = (PLAN_SAVE, PARSE, PLAN_LOAD)
    rows = [
        Row(what, "", statistics.median(times), target=SECOND if what in limited else None, rounds_s=times)
        for what, times in seconds.items()
    ]
    show(f"{facts['parameters'] / 1e9:,.4g} B parameters, {layout} ranks; loaded on {other}", rows)
    for name, value in facts.items():
        print(f"{name}: {value:,}")
    if options.results is not None:
        print(write_result("planning", rows, options.results, layout=str(layout), other_layout=str(other), **facts))


def _plan_saves(options: argparse.Namespace, layout: Layout, timed: Timed) -> None:
    """For a rank in the middle of the others."""
    rank, stage = layout.ranks // 2 + 1, layout.pipeline // 2
    dist.init_process_group("fake", rank=rank, world_size=layout.ranks, store=FakeStore())
    try:
        sizes = (layout.pipeline, layout.data, layout.tensor)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("pipeline", "data", "tensor"))["data", "tensor"]
        parameters = stage_parameters(layout, stage, options.layers, options.width)
        state = dtensors(parameters, mesh, layout)
        for _ in range(options.rounds):
            pieces = timed(PLAN_SAVE, lambda: plan_save(state, mesh, rank))
        data, tensor = mesh.get_coordinate() or ()
    finally:
        dist.destroy_process_group()
    _check_same(pieces, pieces_of(parameters, layout, stage, data, tensor))


def _make_manifest(options: argparse.Namespace, layout: Layout, timed: Timed) -> tuple[bytes, bytes]:
    for _ in range(options.rounds):
        accounts = list(accounts_of(layout, options.layers, options.width))
        manifest = timed(
            MERGE,
            lambda: Merged([joined(accounts)]).manifest(attempt=ATTEMPT, layout=None, writer="planning", digests=True),  # noqa: B023
        )
        data = timed(WRITE, manifest.to_bytes), bytes(manifest.chunks.table.data)
        del manifest
    return data


def _plan_loads(options: argparse.Namespace, layout: Layout, data: tuple[bytes, bytes], timed: Timed) -> dict[str, int]:
    """For the first rank, which has the embedding."""
    parameters = stage_parameters(layout, 0, options.layers, options.width)
    for _ in range(options.rounds):
        manifest = timed(PARSE, lambda: parsed(*data))
        reads = reads_of(manifest, parameters, layout, 0, 0)
        batches = timed(PLAN_LOAD, lambda: plan_reads(manifest, reads, verify=True))  # noqa: B023
    return _facts(manifest, data, batches)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12_288)
    parser.add_argument("--layout", type=int, nargs=3, default=[8, 8, 8], help="that saves: pipeline, data, tensor")
    parser.add_argument("--other", type=int, nargs=3, default=[2, 64, 4], help="that loads")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small, to try; no result unless --results is given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the result goes (benchmarks/results)")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(layers=4, width=512, layout=[2, 2, 2], other=[1, 4, 2], rounds=1, results=None)
    return parser.parse_args()


def _check_same(own: dict[str, Pieces], reckoned: dict[str, Pieces]) -> None:
    """What the arithmetic gives for the rank that was planned for is what its DTensors gave."""
    for section, pieces in own.items():
        left, right = ({(p.name, p.box, tuple(data.shape)) for p, data in part} for part in (pieces, reckoned[section]))
        assert left == right, f"{section}: {sorted(left ^ right, key=str)[:4]}"


def _facts(
    manifest: Manifest, data: tuple[bytes, bytes], batches: Sequence[tuple[str, Sequence[Any]]]
) -> dict[str, int]:
    tensors = [entry for section in (manifest.model, manifest.optimizer) for entry in section.values()]
    ranges = 0
    for _, batch in batches:
        ranges += 1 + sum(a.end != b.begin for a, b in itertools.pairwise(batch))
    return {
        "parameters": sum(entry.nbytes // 4 for entry in manifest.model.values()),
        "tensors": len(tensors),
        "chunks": sum(entry.chunk_count for entry in tensors),
        "files": len(manifest.files),
        "manifest_bytes": len(data[0]),
        "table_bytes": len(data[1]),
        "loading_rank_reads_bytes": sum(job.end - job.begin for _, batch in batches for job in batch),
        "loading_rank_reads_ranges": ranges,
        "loading_rank_reads_calls": sum(1 for _ in _batches(batches, BATCH_BYTES)),
        "loading_rank_reads_files": len({path for path, _ in batches}),
    }


if __name__ == "__main__":
    main()
