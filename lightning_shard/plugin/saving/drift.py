"""Replicas that differ when a run saves: one rank's is saved, and how far apart they are is measured and reported.

Ranks that hold the same part of a tensor (tensor ranks' unsplit weights, replicas of shards, buffers, tied weights on
several stages) compute it alike. But kernels that add in no fixed order round otherwise on each, and users' code may
change it on one rank. Training has gone on all the same, so a save doesn't refuse it.

Every save exchanges digests. Only where these differ, values are sent and subtracted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_shard import tree
from lightning_shard.arguments import few
from lightning_shard.checkpoint.memory import settle
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.saving.part import FINGERPRINT_BYTES, fingerprints
from lightning_shard.checkpoint.tensors import Frame, known_mesh, locate
from lightning_shard.errors import ShardError
from lightning_shard.layout import Layout
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.rank_compare import ByRank, Key, digest_of, exchanged, unequal
from lightning_shard.pipeline.stages.tied import Tie
from lightning_shard.sharding import laid_out, local_tensor
from lightning_shard.torch_private import BatchNorm
from lightning_shard.tree import as_bytes

Sections = Mapping[str, Mapping[str, Tensor]]
_ROUNDING = 1e-3
"""The largest difference that counts as rounding, relative to a tensor's largest element. In 32 bits a sum is rounded
by about 1e-7, and optimizers that divide by a gradient's size, such as Adam, enlarge that where gradients are small."""
_STEPS_OF_DTYPE = 4
"""In fewer bits, so many times the distance of 1 to the next number."""

_Group = tuple[bool, int, Any]
"""Who holds the same: whether several stages do, the first of the ranks, and a hash of all. Of stages, which compare
within each pipeline, the last is the tensor's name: a stage doesn't know which of its tensors another one holds."""
_Key = tuple[_Group, str]
"""A group, and section and name, joined by ``/``."""


class _Told(NamedTuple):
    """What the other ranks learn of a replica."""

    digest: bytes
    kind: tuple[torch.dtype, torch.Size]
    is_finite: bool


class Difference(NamedTuple):
    """Between the replicas of two ranks.

    Attributes:
        saved: The rank whose values are saved.
        relative: The largest difference of two elements, divided by the largest element; infinite if dtypes or shapes
            differ, or some element is a number on one of them only.
        is_rounding: Whether it can be of rounding alone.
    """

    name: str
    saved: int
    rank: int
    relative: float
    is_rounding: bool

    def __str__(self) -> str:
        size = f"by up to {self.relative:.2g} of its largest element"
        return f"{self.name.removeprefix('model/')!r} (rank {self.rank} from rank {self.saved}: {size})"


def on_several_stages(module: nn.Module, ties: Iterable[Tie]) -> dict[str, nn.Parameter]:
    """The parameters of this rank's stages that other ranks' hold too, by name."""
    names = [tie.names[0] for tie in ties]
    if names:
        reshard(module)
    return {name: module.get_parameter(name) for name in names}


def copies_of_stages(
    tied: Mapping[str, nn.Parameter], others: Mapping[str, Tensor], optimizers: Iterable[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """The tensors that several stages save, by section and name: tied ones, their optimizer states, and ``others``."""
    found: dict[str, Tensor] = {f"model/{name}": tensor for name, tensor in {**tied, **others}.items()}
    for index, optimizer in enumerate(optimizers):
        for name, parameter in tied.items():
            for path, value in tree.walk(optimizer.state.get(parameter, {})):
                if isinstance(value, Tensor):
                    found["/".join((f"optimizer/{index}", name, *path))] = value
    return found


class Drift:
    """What the saves of one run have found.

    Args:
        of_stages: The tensors that other stages hold too, by section and name.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        mesh: DeviceMesh,
        host: dist.ProcessGroup,
        of_stages: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._module = module
        self._layout = layout
        self._mesh = mesh
        self._ranks = Ranks.of(host)
        self._of_stages = of_stages
        self._has_told = False

    def settle(self, sections: Sections, on_several_stages: Collection[str], at: str) -> Sections:
        """The sections of a save, with the same values wherever ranks hold the same. A collective call over all ranks.

        Values are the lowest rank's, or those of the lowest that has no NaN or infinity. Of a tensor that stages hold
        with different values (``on_several_stages``, with their sections), only the last stage, whose ranks are the
        lowest, still has it. ``at`` is what warnings say of where and when it is saved.
        """
        if self._layout.world_size == 1:
            return sections
        tensors = {f"{section}/{name}": tensor for section in sections for name, tensor in sections[section].items()}
        copies = {**{name: tensors[name] for name in on_several_stages}, **self._of_stages()}
        own = self._digests(tensors, copies)
        digests: dict[_Group, Any] = {}
        for group, name in sorted(own):
            digests.setdefault(group, xxhash.xxh3_64()).update(name.encode() + own[group, name][1])
        apart = unequal(self._everyones({group: digest.digest() for group, digest in digests.items()}))
        if not apart:
            return sections
        # of stages in any pipeline, so that all ranks of a stage save the same
        names = {name for of_stages, _, name in apart if of_stages}
        settled, differences = self._exchange({k: own[k] for k in own if k[0] in apart or (k[0][0] and k[1] in names)})
        self._report(differences, at)
        return {
            section: {
                name: _like(tensor, settled.get(f"{section}/{name}"))
                for name, tensor in sections[section].items()
                if settled.get(f"{section}/{name}", tensor) is not None
            }
            for section in sections
        }

    def _digests(self, tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor]) -> dict[_Key, tuple[Tensor, bytes]]:
        """This rank's part of what other ranks hold too. What can't be saved is left to the save to refuse."""
        rank, stage = self._layout.rank, tuple(self._layout.neighbours(self._layout.stage_size))
        frame = Frame.of(known_mesh(self._mesh), stage, rank)
        found: dict[_Key, tuple[Tensor, bool]] = {}
        for name, tensor in tensors.items():
            with contextlib.suppress(ShardError):
                _, local, spread = locate(name, tensor, to_save=True)
                holders = frame.holders_of(name, spread)
                if len(holders) > 1:
                    found[(False, holders[0], hash(holders)), name] = local, isinstance(tensor, DTensor)
        for name, tensor in copies.items():
            group = (True, rank % self._layout.stage_size, name)
            found[group, name] = local_tensor(tensor), isinstance(tensor, DTensor)
        settle(local for local, _ in found.values())
        sampled = [key for key, (_, is_parameter) in found.items() if is_parameter]
        joined = fingerprints([found[key][0] for key in sampled])
        samples = {key: joined[at * FINGERPRINT_BYTES :][:FINGERPRINT_BYTES] for at, key in enumerate(sampled)}
        # others whole: a rank may have changed any part of a buffer
        return {key: (local, samples.get(key) or digest_of(local).encode()) for key, (local, _) in found.items()}

    def _exchange(self, own: Mapping[_Key, tuple[Tensor, bytes]]) -> tuple[dict[str, Tensor | None], list[Difference]]:
        """Send the values that are to be saved to the ranks that hold others.

        Returns:
            Local parts to save by name, None for what this stage leaves to a later one; and how far they are from this
            rank's.
        """
        told_here = {
            key: _Told(digest, _kind(local), bool(_wide(local).isfinite().all()))
            for key, (local, digest) in own.items()
        }
        everyone = self._everyones(told_here)
        rank = self._layout.rank
        settled: dict[str, Tensor | None] = {}
        differences: list[Difference] = []
        with self._ranks.talking():
            for key in sorted(own):  # all ranks in one order, so that no two wait for each other
                ((of_stages, _, _), name), (local, digest), told = key, own[key], everyone[key]
                source = min(told, key=lambda other: (not of_stages and not told[other].is_finite, other))
                if rank == source:
                    sent = as_bytes(local.resolve_conj().resolve_neg().cpu().contiguous())
                    for other, one in told.items():
                        if one.digest != digest and sent.numel():
                            dist.send(sent, other, group=self._ranks.group)
                    continue
                if digest != told[source].digest:
                    dtype, shape = told[source].kind
                    values = torch.empty(shape, dtype=dtype)
                    if values.numel():
                        dist.recv(as_bytes(values), source, group=self._ranks.group)
                    difference = Difference(name, source, rank, *measured(values, local))
                    if difference.relative and not self._is_each_data_ranks_own(difference):
                        differences.append(difference)
                    if not of_stages:
                        settled[name] = values
                if of_stages and told[source].kind == told[rank].kind:
                    settled[name] = None
        return settled, differences

    def _is_each_data_ranks_own(self, difference: Difference) -> bool:
        """Whether it is of statistics that each data rank takes of its own samples, in plain Lightning too."""
        of_ranks = {self._layout.at(rank).data_rank for rank in (difference.saved, difference.rank)}
        path, _, _ = difference.name.rpartition("/")[2].rpartition(".")
        owner: nn.Module | None = self._module
        for part in path.split(".") if path else ():
            owner = None if owner is None else owner._modules.get(part)
        return len(of_ranks) > 1 and isinstance(owner, (BatchNorm, Metric))

    def _everyones(self, own: Mapping[Key, Any]) -> ByRank[Key]:
        with self._ranks.talking():
            (found,) = exchanged(self._ranks.group, own)
        return found

    def _report(self, own: list[Difference], at: str) -> None:
        """Warn of differences at each save; of rounding once, as sums in no fixed order make it in every step."""
        found = self._ranks.gather(own)
        worst = {each.name: each for each in sorted(chain.from_iterable(found), key=lambda one: one.relative)}
        larger = [each for each in worst.values() if not each.is_rounding]
        if larger:
            rank_zero_warn(
                f"{at}: {few(larger, 5)} differed between ranks by more than rounding when they were saved, and rank"
                f" {', '.join(map(str, sorted({each.saved for each in larger})))}'s values were taken. Look for code"
                " that changes these on some ranks only."
            )
        elif worst and not self._has_told:
            self._has_told = True
            most = max(worst.values(), key=lambda each: each.relative)
            rank_zero_warn(
                f"{len(worst)} replicas differ between ranks by rounding, as where sums have no fixed order: most"
                f" {most}. One rank's are saved. A run reports this once."
            )


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _wide(tensor: Tensor) -> Tensor:
    """A tensor of real numbers of 32 bits or more."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not tensor.is_floating_point():
        return tensor.double()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def measured(saved: Tensor, own: Tensor) -> tuple[float, bool]:
    """How far a replica is from the one that is saved: ``relative`` and ``is_rounding`` of a :class:`Difference`."""
    if _kind(saved) != _kind(own):
        return math.inf, False
    mine, other = _wide(own.cpu()), _wide(saved)
    finite = other.isfinite()
    if not torch.equal(mine.isfinite(), finite):
        return math.inf, False
    mine, other = mine[finite], other[finite]
    if torch.equal(mine, other):
        return 0.0, True
    largest = float(other.abs().max())
    relative = float((mine - other).abs().max()) / largest if largest else math.inf
    has_rounding = own.is_floating_point() or own.is_complex()
    allowed = max(_ROUNDING, _STEPS_OF_DTYPE * torch.finfo(own.dtype).eps) if has_rounding else 0.0
    return relative, relative <= allowed


def _like(tensor: Tensor, local: Tensor | None) -> Tensor:
    """A tensor laid out as another one, with this local part; that one itself if there is none."""
    if local is None or not isinstance(tensor, DTensor):
        return tensor if local is None else local
    with torch.no_grad():
        return laid_out(local.to(tensor.to_local().device), tensor)
