"""Creates the process groups that a run needs beside those of the device mesh.

Private: ``_set_pg_timeout`` (torch 2.11 to 2.13; ``set_timeout`` since 2.14), since groups of a mesh are made with
torch's default time-outs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import PIPELINE_AXIS, Layout
from lightning_shard.parallel.rank_compare import everyones
from lightning_shard.pipeline.runtime.channel import Ways
from lightning_shard.plugin.broadcast import Broadcaster

_set_timeout: Any = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout


@dataclass(frozen=True)
class Groups:
    """This rank's process groups.

    Attributes:
        pipeline: The ranks of this rank's pipeline, the last stage's first.
        forward, backward: The same ranks, for values and for gradients.
        control: The same ranks, host to host: control messages wait for no device and no activations.
        data: The ranks that hold the same part of the model and read other data.
        context: The ranks that hold the parts of this rank's sequences.
        gradient: Data and context ranks together: all that hold the same part of the model.
        peers: The same ranks, host to host.
        host: All ranks, host to host.
        broadcaster: Broadcasts the last stage's values over the pipeline.
    """

    pipeline: dist.ProcessGroup
    forward: Ways
    backward: Ways
    control: dist.ProcessGroup
    data: dist.ProcessGroup
    context: dist.ProcessGroup
    gradient: dist.ProcessGroup
    peers: dist.ProcessGroup
    host: dist.ProcessGroup
    broadcaster: Broadcaster

    @classmethod
    def make(cls, layout: Layout, mesh: DeviceMesh, timeout: timedelta | None, *, both_ways: bool = False) -> Groups:
        """Create the groups; a collective call over all ranks.

        Args:
            both_ways: Whether values and gradients each go both to later and to earlier ranks, as they do where ranks
                hold several stages.
        """
        is_on_gpus = layout.world_size > 1 and mesh.device_type == "cuda"
        if is_on_gpus and "cuda:gloo" in dist.get_backend_config(dist.group.WORLD):
            # with torch 2.11 it can't send CUDA tensors, and its collectives may end the process
            raise ConfigurationError(
                "process_group_backend is gloo, which doesn't support what parallel training needs on CUDA devices,"
                " such as sending CUDA tensors: leave it out, or use nccl."
            )
        pipeline = control = mesh[PIPELINE_AXIS].get_group()
        forward = backward = Ways(pipeline, pipeline)
        if layout.pipeline_parallel_size > 1:
            pipelines = layout.groups("stage")

            def ways() -> Ways:
                made = [_of_axis(pipelines, timeout) for _ in range(1 + both_ways)]
                return Ways(made[0], made[-1])

            forward, backward = ways(), ways()
            pipeline = forward.later
            control = _own_of(pipelines, timeout, backend="gloo")
        if len(layout.data_axes) == 1:
            gradient = mesh[layout.data_axes[0]].get_group()
        else:
            gradient = _of_axis(layout.groups("data", "context"), timeout)
        data = context = gradient
        if layout.context_parallel_size > 1:
            data = _of_axis(layout.groups("data"), timeout)
            context = _of_axis(layout.groups("context"), timeout)
        world: Any = dist.group.WORLD
        host, peers = world, gradient
        if layout.world_size > 1 and "cpu:" not in dist.get_backend_config(world):
            host = dist.new_group(backend="gloo", timeout=timeout)
            if layout.pipeline_parallel_size > 1:
                peers = _own_of(layout.groups("data", "context"), timeout, backend="gloo")
        broadcaster = Broadcaster(control, pipeline)
        return cls(pipeline, forward, backward, control, data, context, gradient, peers, host, broadcaster)

    def gather_over_stages(self, value: Any) -> list[Any]:
        """All-gather a value over the pipeline; returns every stage's, in stage order. A collective call."""
        return everyones(value, self.control)[::-1]

    def any(self, *flags: bool) -> list[bool]:
        """For each flag, whether it is true on any rank; a collective call of all ranks."""
        return [bool(value) for value in self.largest(*flags)]

    def largest(self, *numbers: int) -> list[int]:
        """The largest of all ranks' numbers in each place; a collective call of all ranks."""
        return _largest(numbers, self.host)

    def of_any_peer(self, flag: bool) -> bool:
        """Whether a flag is true on any rank that holds the same part of the model; a collective call of these."""
        return bool(_largest([flag], self.peers)[0])

    def of_all_peers(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is true on all ranks that hold the same part of the model; a collective call."""
        return [not fails for fails in _largest([not flag for flag in flags], self.peers)]

    def from_first_rank(self, value: Any) -> Any:
        """Broadcast rank 0's value to all ranks; a collective call."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host)
        return values[0]

    def broadcast_from_last_stage(self, value: Any, device: torch.device) -> Any:
        """Broadcast the last stage's value, its tensors on each rank's device; a collective call over the pipeline."""
        return self.broadcaster.broadcast(value, device)


def _largest(numbers: Sequence[int], group: dist.ProcessGroup) -> list[int]:
    if dist.get_world_size(group) == 1:
        return list(numbers)
    values = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values.tolist()


def set_timeout(mesh: DeviceMesh, timeout: timedelta) -> None:
    """Have the collectives of a mesh's groups fail after this time."""
    for group in mesh.get_all_groups():
        _set_timeout(timeout, group)


def _of_axis(groups: list[list[int]], timeout: timedelta | None) -> Any:
    """This rank's group among the disjoint groups of one axis; a collective call over all ranks.

    On NCCL the world's communicator is split once for all groups, as torch's own meshes do; on other backends each
    group is created by its own ranks.
    """
    world: Any = dist.group.WORLD
    if "cuda:nccl" in dist.get_backend_config(world) and getattr(world, "bound_device_id", None) is not None:
        return dist.split_group(split_ranks=groups, timeout=timeout)
    return _own_of(groups, timeout)


def _own_of(groups: list[list[int]], timeout: timedelta | None, backend: str | None = None) -> Any:
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return dist.new_group(own, timeout=timeout, backend=backend, use_local_synchronization=True)
