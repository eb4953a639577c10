"""Replicas that differ when a run saves: one rank's is saved, and how far apart they are is measured and reported.

Ranks that hold the same part of a tensor (tensor ranks' unsplit weights, replicas of shards, buffers, tied weights on
several stages) compute it alike, but kernels that add in no fixed order round otherwise on each, and users' code may
change it on one rank. Training has gone on all the same, so a save doesn't refuse it.

Every save exchanges digests. Only where these differ, values are sent and subtracted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import xxhash
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric

from lightning_shard.checkpoint.memory import settle
from lightning_shard.checkpoint.saving.replicated import fingerprints
from lightning_shard.checkpoint.storable import check_storable
from lightning_shard.checkpoint.tensors import Frame, locate, place_of
from lightning_shard.errors import ShardError
from lightning_shard.layout import Layout
from lightning_shard.plugin.steps.checks.agreement import digest_of
from lightning_shard.sharding import local_tensor
from lightning_shard.tree import as_bytes

Sections = Mapping[str, Mapping[str, Tensor]]
_ROUNDING = 1e-3
"""The largest difference that counts as rounding, relative to a tensor's largest element. In 32 bits a sum is rounded
by about 1e-7, and optimizers that divide by a gradient's size, such as Adam, enlarge that where gradients are small."""
_STEPS_OF_DTYPE = 4
"""In fewer bits, so many times the distance of 1 to the next number."""
_NAMED = 5


class _Replica(NamedTuple):
    """What this rank holds, and the ranks that it is compared with.

    Attributes:
        group: An id of the ranks: of those that hold the same part of a stage's tensor; or, of what several stages
            hold, of this pipeline, with the name.
        name: Section and name, joined by ``/``.
        value: The local part; or a value of Python in an optimizer's state.
    """

    group: tuple[int, int | str]
    name: str
    value: Any
    digest: bytes

    @property
    def is_of_stages(self) -> bool:
        return isinstance(self.group[1], str)


class _Told(NamedTuple):
    """What the other ranks learn of a replica. Without a dtype it isn't a tensor."""

    digest: bytes
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    is_finite: bool


class Difference(NamedTuple):
    """Between the replicas of two ranks.

    Attributes:
        absolute: The largest difference of two elements.
        relative: The same, divided by the largest element.
        is_rounding: Whether it can be of rounding alone.
        why: What differs besides elements that can be subtracted.
    """

    name: str
    saved: int
    rank: int
    absolute: float
    relative: float
    is_rounding: bool
    why: str = ""

    def __str__(self) -> str:
        size = f"by up to {self.absolute:.2g}, {self.relative:.2g} of its largest element" if not self.why else self.why
        return f"{self.name.removeprefix('model/')!r} (rank {self.rank} from rank {self.saved}: {size})"


class Drift:
    """What the saves of one run have found.

    Args:
        mesh: The mesh of the ranks that hold this rank's stage.
        host: All ranks, host to host.
        of_stages: What several stages hold, by section and name: tensors, or values in optimizers' states.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layout: Layout,
        mesh: DeviceMesh,
        host: dist.ProcessGroup,
        of_stages: Callable[[], Mapping[str, Any]],
    ) -> None:
        self._module = module
        self._layout = layout
        self._mesh = mesh
        self._host = host
        self._of_stages = of_stages
        self._has_told = False
        self._larger: dict[str, Difference] = {}

    def settle(self, sections: Sections, on_several_stages: Collection[str], path: str) -> Sections:
        """The sections of a save, on each rank with the same values wherever ranks hold the same. A collective call.

        Values are the lowest rank's, or those of the lowest that has no NaN or infinity. Of a tensor that stages hold
        with different values, only the last stage, whose ranks are the lowest, still has it.

        Args:
            sections: By name; the tensors aren't changed.
            on_several_stages: Names, with their sections, that other stages have too.
            path: Where it is saved, for warnings.
        """
        if self._layout.world_size == 1:
            return sections
        own = [*self._replicas(sections), *self._copies(sections, on_several_stages)]
        digests: dict[Any, xxhash.xxh3_64] = {}
        for each in sorted(own, key=lambda each: each.name):
            digests.setdefault(each.group, xxhash.xxh3_64()).update(each.name.encode() + each.digest)
        seen: dict[Any, set[bytes]] = {}
        for told in self._everyones({group: digest.digest() for group, digest in digests.items()}):
            for group, digest in told.items():
                seen.setdefault(group, set()).add(digest)
        apart = {group for group, found in seen.items() if len(found) > 1}
        if not apart:
            return sections
        settled, differences = self._exchange([each for each in own if each.group in apart])
        self._report(differences, path)
        return {
            section: {
                name: _like(tensor, settled[key]) if (key := f"{section}/{name}") in settled else tensor
                for name, tensor in tensors.items()
                if settled.get(f"{section}/{name}", tensor) is not None
            }
            for section, tensors in sections.items()
        }

    def _replicas(self, sections: Sections) -> list[_Replica]:
        """Of tensors that other ranks of the stage hold too. What can't be saved is left to the save to refuse."""
        rank, stage = self._layout.rank, tuple(self._layout.neighbours(self._layout.stage_size))
        frame = Frame.of(place_of(self._mesh), stage, rank)
        sampled: list[_Replica] = []
        whole: list[_Replica] = []
        for section, tensors in sections.items():
            for name, tensor in tensors.items():
                with contextlib.suppress(ShardError):
                    check_storable(name, tensor)
                    located = locate(name, tensor)
                    holders = frame.holders_of(name, located.spread)
                    if len(holders) > 1:
                        each = _Replica((holders[0], hash(holders)), f"{section}/{name}", located.local, b"")
                        (sampled if isinstance(tensor, DTensor) else whole).append(each)
        settle(each.value for each in (*sampled, *whole))
        values = fingerprints([each.value for each in sampled])
        digests = [values[at : at + 8] for at in range(0, len(values), 8)]
        digests += [digest_of(each.value).encode() for each in whole]  # a rank may have changed any part of a buffer
        return [each._replace(digest=digest) for each, digest in zip((*sampled, *whole), digests, strict=True)]

    def _copies(self, sections: Sections, names: Collection[str]) -> Iterator[_Replica]:
        everything = {f"{section}/{name}": tensor for section in sections for name, tensor in sections[section].items()}
        first = min(next(ranks for ranks in self._layout.pipelines() if self._layout.rank in ranks))
        for name, value in {**{name: everything[name] for name in names}, **self._of_stages()}.items():
            local = local_tensor(value) if isinstance(value, Tensor) else value
            digest = fingerprints([local]) if isinstance(value, DTensor) else digest_of(local).encode()
            yield _Replica((first, name), name, local, digest)

    def _exchange(self, own: list[_Replica]) -> tuple[dict[str, Tensor | None], list[Difference]]:
        """Send the values that are to be saved to the ranks that hold others; returns these, and the differences.

        None stands for what this stage doesn't save.
        """
        rank, held = self._layout.rank, {(each.is_of_stages, each.group, each.name): each for each in own}
        everyone: dict[Any, dict[int, _Told]] = {}
        for other, told in enumerate(self._everyones({key: _told(each) for key, each in held.items()})):
            for key, one in told.items():
                everyone.setdefault(key, {})[other] = one
        apart_on_stages = {key[2] for key, told in everyone.items() if key[0] and len(set(told.values())) > 1}
        settled: dict[str, Tensor | None] = {}
        differences: list[Difference] = []
        # all ranks in one order, so that no two wait for each other
        for key in sorted(held, key=repr):
            each, told = held[key], everyone[key]
            source = min(told, key=lambda other: (not each.is_of_stages and not told[other].is_finite, other))
            is_alike = told[source][1:3] == told[rank][1:3]
            if rank != source and is_alike and each.is_of_stages and each.name in apart_on_stages:
                settled[each.name] = None
            others = [other for other in told if told[other].digest != told[source].digest]
            if rank == source and told[rank].dtype is not None:
                sent = as_bytes(each.value.resolve_conj().resolve_neg().cpu().contiguous())
                for other in others if sent.numel() else ():
                    dist.send(sent, other, group=self._host)
            elif rank in others:
                saved = self._received(source, told[source])
                difference = measured(each.name, source, rank, saved, each.value)
                if difference is not None and not self._is_each_data_ranks_own(difference):
                    differences.append(difference)
                if not each.is_of_stages:
                    settled[each.name] = saved
        return settled, differences

    def _received(self, source: int, told: _Told) -> Tensor | None:
        if told.dtype is None:
            return None
        values = torch.empty(told.shape, dtype=told.dtype)
        if values.nbytes:
            dist.recv(as_bytes(values), source, group=self._host)
        return values

    def _is_each_data_ranks_own(self, difference: Difference) -> bool:
        """Whether it is of statistics that each data rank takes of its own samples, in plain Lightning too."""
        ranks = (difference.saved, difference.rank)
        if len({self._layout.at(rank).data_rank for rank in ranks}) == 1:
            return False
        path, _, _ = difference.name.rpartition("/")[2].rpartition(".")
        owner: nn.Module | None = self._module
        for part in path.split(".") if path else ():
            owner = None if owner is None else owner._modules.get(part)
        return isinstance(owner, (_BatchNorm, Metric))

    def _everyones(self, value: dict[Any, Any]) -> list[dict[Any, Any]]:
        values: list[dict[Any, Any]] = [{}] * self._layout.world_size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def _report(self, own: list[Difference], path: str) -> None:
        parts: list[list[Difference]] = [[]] * self._layout.world_size
        dist.gather_object(own, parts if self._layout.rank == 0 else None, dst=0, group=self._host)
        worst: dict[str, Difference] = {}
        for each in (each for part in parts for each in part):
            known = worst.setdefault(each.name, each)
            worst[each.name] = max(known, each, key=lambda one: (not one.is_rounding, bool(one.why), one.relative))
        larger = {name: each for name, each in worst.items() if not each.is_rounding}
        rounding = [each for each in worst.values() if each.is_rounding]
        self._larger |= larger
        if larger:
            rank_zero_warn(
                f"{path}, step {self._module.trainer.global_step}: {_said(larger)} when they were saved. Look for code"
                " that changes these on some ranks only."
            )
        if rounding and not self._has_told:
            self._has_told = True
            most, count = max(rounding, key=lambda each: each.relative), len(rounding)
            rank_zero_warn(
                f"{count} {'replicas differ' if count > 1 else 'replica differs'} between ranks by rounding, as where"
                f" sums have no fixed order: most {most}. One rank's are saved. A run reports this once."
            )

    def report_at_end(self) -> None:
        """Where a run ends: warn of what its saves have found, but for rounding."""
        if self._larger:
            rank_zero_warn(f"In this run {_said(self._larger)} when they were saved.")
        self._larger = {}


def _said(found: Mapping[str, Difference]) -> str:
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    listed = ", ".join(map(str, [*found.values()][:_NAMED]))
    saved = ", ".join(map(str, sorted({each.saved for each in found.values()})))
    return f"{listed}{more} differed between ranks by more than rounding, and rank {saved}'s values were taken"


def _told(replica: _Replica) -> _Told:
    value = replica.value
    if not isinstance(value, Tensor):
        return _Told(replica.digest, None, (), is_finite=True)
    return _Told(replica.digest, value.dtype, tuple(value.shape), is_finite=bool(_wide(value).isfinite().all()))


def _wide(tensor: Tensor) -> Tensor:
    """A tensor of real numbers of 32 bits or more."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return tensor.double()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def measured(name: str, saved_rank: int, rank: int, saved: Tensor | None, own: Any) -> Difference | None:
    """How far this rank's replica is from the one that is saved; None if no value differs, though bits may."""

    difference = partial(Difference, name, saved_rank, rank, math.inf, math.inf, is_rounding=False)
    if saved is None or not isinstance(own, Tensor):
        return difference(why=f"{own!r:.40} here")
    if (saved.dtype, saved.shape) != (own.dtype, own.shape):
        return difference(why=f"{own.dtype} {tuple(own.shape)}, not {saved.dtype} {tuple(saved.shape)}")
    mine, other = _wide(own.cpu()), _wide(saved)
    finite = other.isfinite()
    if not torch.equal(mine.isfinite(), finite):
        return difference(why="NaN or infinite on one of them only")
    mine, other = mine[finite], other[finite]
    if torch.equal(mine, other):
        return None
    absolute, largest = float((mine - other).abs().max()), float(other.abs().max())
    relative = absolute / largest if largest else math.inf
    has_rounding = own.dtype.is_floating_point or own.dtype.is_complex
    allowed = max(_ROUNDING, _STEPS_OF_DTYPE * torch.finfo(own.dtype).eps) if has_rounding else 0.0
    return Difference(name, saved_rank, rank, absolute, relative, is_rounding=relative <= allowed)


def _like(tensor: Tensor, local: Tensor | None) -> Tensor:
    """A tensor laid out as another one, with this local part."""
    assert local is not None
    if not isinstance(tensor, DTensor):
        return local
    local = local.to(tensor.to_local().device)
    with torch.no_grad():
        return DTensor.from_local(
            local,
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
