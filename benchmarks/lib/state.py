"""What is saved and loaded: the parameters of a GPT and AdamW's state of them, as DTensors of a chosen layout.

A value follows from the tensor's name and the element's place alone, so that any rank of any layout can say what it
should hold.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

MOMENTS = ("exp_avg", "exp_avg_sq")
PERIOD = 4093
"""Of the values along rows and columns; sums of two are exact in float32."""

STEP = 16
"""Elements, a cache line, between the beginnings of overlapping tensors."""

Shapes = dict[str, tuple[int, ...]]
Elements = Callable[[str, list[int], list[int]], Tensor]
"""Of a tensor's name and a box's offsets and sizes."""


def gpt_shapes(total_bytes: int) -> Shapes:
    """Parameters that take, in float32 and with both of AdamW's moments, ``total_bytes`` or little more."""
    width = next((w for w in (1024, 512, 256) if total_bytes >= 2 * _state_bytes(_block("", w))), 64)
    blocks = -(-total_bytes // _state_bytes(_block("", width)))
    shapes: Shapes = {}
    for number in range(blocks):
        shapes |= _block(f"model.layers.{number}.", width)
    return shapes


def _block(prefix: str, width: int) -> Shapes:
    return {
        f"{prefix}norm_1.weight": (width,),
        f"{prefix}attention.qkv.weight": (3 * width, width),
        f"{prefix}attention.output.weight": (width, width),
        f"{prefix}norm_2.weight": (width,),
        f"{prefix}mlp.up.weight": (4 * width, width),
        f"{prefix}mlp.down.weight": (width, 4 * width),
    }


def _state_bytes(shapes: Shapes) -> int:
    return sum(4 * (1 + len(MOMENTS)) * torch.Size(shape).numel() for shape in shapes.values())


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh, and which dim of a matrix each of its axes cuts, None if none; of vectors it is the first."""

    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]

    def placements(self, ndim: int) -> list[Placement]:
        return [Replicate() if dim is None else Shard(dim if ndim > 1 else 0) for dim in self.dims]


def rows(ranks: int) -> Layout:
    """As FSDP shards."""
    return Layout((ranks,), (0,))


def columns(ranks: int) -> Layout:
    return Layout((ranks,), (1,))


def grid(ranks: int) -> Layout:
    """Data ranks × 2 tensor ranks, which cut rows and columns."""
    return Layout((ranks // 2, 2), (0, 1))


def replicas(ranks: int) -> Layout:
    """Two replicas of rows: as FSDP with hybrid sharding."""
    return Layout((2, ranks // 2), (None, 0))


@dataclass
class State:
    """This rank's part of the model's and the optimizer's tensors, by name."""

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]

    @classmethod
    def of(cls, shapes: Shapes, layout: Layout, elements: Elements | None = None) -> State:
        """A collective call. ``elements`` makes a box of a tensor; default: :func:`values`."""
        mesh = init_device_mesh("cpu", layout.sizes)
        state = cls({}, {})

        def tensor(name: str, shape: tuple[int, ...]) -> DTensor:
            placements = layout.placements(len(shape))
            offsets, sizes = [0] * len(shape), list(shape)
            for placement, parts, index in zip(placements, layout.sizes, mesh.get_coordinate() or ()):
                if not isinstance(placement, Shard):
                    continue
                assert sizes[placement.dim] % parts == 0, f"{shape} on {layout}: uneven"
                sizes[placement.dim] //= parts
                offsets[placement.dim] += index * sizes[placement.dim]
            local = (elements or values)(name, offsets, sizes)
            stride = torch.empty(shape, device="meta").stride()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

        for name, shape in shapes.items():
            state.model[name] = tensor(name, shape)
            for moment in MOMENTS:
                state.optimizer[f"{name}.{moment}"] = tensor(f"{name}.{moment}", shape)
            state.optimizer[f"{name}.step"] = torch.tensor(float(zlib.crc32(name.encode()) % PERIOD))
        return state

    @property
    def tree(self) -> dict[str, dict[str, Tensor]]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def flat(self) -> dict[str, Tensor]:
        return {**self.model, **self.optimizer}

    def local(self) -> dict[str, Tensor]:
        """Plain tensors that share the memory."""
        return {name: t.to_local() if isinstance(t, DTensor) else t for name, t in self.flat.items()}

    @property
    def local_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.local().values())

    def clear(self) -> None:
        for tensor in self.local().values():
            tensor.zero_()

    def differences(self, right: State) -> list[str]:
        """The names of the tensors whose local parts aren't those of ``right``."""
        other = right.local()
        return [name for name, tensor in self.local().items() if not torch.equal(tensor, other[name])]


def values(name: str, offsets: list[int], sizes: list[int]) -> Tensor:
    """The elements of a box of a tensor."""
    along = list(_along(name, offsets, sizes))
    return along[0].clone() if len(along) == 1 else along[0][:, None] + along[1][None, :]


def overlapping(shapes: Shapes) -> Elements:
    """Tensors that all lie in one memory, each beginning elsewhere: a state that is larger than it takes."""
    most = max(torch.Size(shape).numel() for shape in shapes.values())
    everything = values("overlapping", [0], [most + STEP * len(shapes) * (1 + len(MOMENTS))])
    starts = itertools.count(0, STEP)

    def elements(name: str, offsets: list[int], sizes: list[int]) -> Tensor:
        start = next(starts)
        return everything[start : start + torch.Size(sizes).numel()].view(sizes)

    return elements


def _along(name: str, offsets: list[int], sizes: list[int]) -> Iterator[Tensor]:
    seed = zlib.crc32(name.encode())
    for factor, offset, size in zip((37, 11), offsets, sizes):
        yield ((torch.arange(offset, offset + size) * factor + seed) % PERIOD).float()
