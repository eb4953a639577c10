"""What the strategies of a Trainer and of Fabric share: the ranks of a layout, their groups, and values over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard.layout import SIZES, Layout, check_sizes
from lightning_shard.parallel.collectives import gather
from lightning_shard.pipeline.schedules.schedule import Schedule
from lightning_shard.plugin.groups import Groups, set_timeout
from lightning_shard.plugin.running.failure import FailureWatch
from lightning_shard.plugin.running.launchers import ComputingSettings
from lightning_shard.plugin.running.rendezvous import Rendezvous
from lightning_shard.plugin.settings import Settings, check_kinds
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.schedule_choice import candidates
from lightning_shard.torch_private import one_worker


class LaidOut:
    """A layout's ranks, for a class of Lightning's that connects them: the class after this one in the order.

    It has many attributes: a strategy's settings, and what they become when the ranks are known.
    """

    _known_after: str
    _settings: Settings
    _schedules: Sequence[Schedule]
    _reduces_each: bool
    _loss_weight: Callable[[Any], Any] | None
    _process_group_backend: Any
    _timeout: Any

    def _take(self, given: Mapping[str, Any]) -> None:
        """Take a strategy's arguments, by name, and check them against each other."""
        self._sizes = {name: given[name] for name in SIZES if name in given}
        check_sizes(**self._sizes)
        self._settings = Settings(**{each.name: given[each.name] for each in fields(Settings) if each.name in given})
        self._loss_weight, self._reduces_each = given["loss_weight"], given["reduce_each_microbatch"]
        check_kinds(loss_weight=self._loss_weight, reduce_each_microbatch=self._reduces_each, timeout=given["timeout"])
        self._settings.check_beside(self._sizes)
        ranks, placement = self._sizes["pipeline_parallel_size"], self._settings.placement
        self._schedules = candidates(given["schedule"], ranks, given["microbatches"], placement)
        self._layout: Layout | None = None
        self._groups: Groups | None = None
        self._expert_mesh: DeviceMesh | None = None
        self._seed = 0
        self._computing = ComputingSettings()
        self._watch: FailureWatch | None = None

    @property
    def layout(self) -> Layout:
        """The sizes of the axes and this rank's coordinates; available once ranks are known."""
        if self._layout is None:
            raise RuntimeError(f"The layout is known once {self._known_after}.")
        return self._layout

    @property
    def groups(self) -> Groups:
        assert self._groups is not None
        return self._groups

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.layout.data_rank}

    def _rendezvous(self: Any) -> Rendezvous:
        environment, timeout = self.cluster_environment, self._timeout or default_pg_timeout
        return Rendezvous(environment.main_address, environment.main_port, self.global_rank, self.world_size, timeout)

    def _connect(self: Any) -> None:
        """Connect to the store, whose keys belong to this round of torchrun, and make the process group.

        The generators aren't reset to the seed of ``seed_everything``: one process's go on from run to run.
        """
        self._process_group_backend = self._get_process_group_backend()
        if dist.is_initialized():
            return
        rendezvous = self._rendezvous()
        options: dict[str, Any] = {"timeout": rendezvous.timeout}
        if "nccl" in self._process_group_backend:  # with a device_id, gloo's groups can't be split (torch 2.11)
            options["device_id"] = self.root_device
        if rendezvous.is_kept_by_an_agent:
            options["store"] = rendezvous.connect()
        with one_worker():  # a mesh of one axis takes this group
            _init_dist_connection(self.cluster_environment, self._process_group_backend, **options)

    def _make_groups(self: Any) -> None:
        """Make the meshes and groups, once, and agree on numbers of threads; a collective call over all ranks."""
        if self._groups is None:
            with one_worker():
                self._device_mesh = self.layout.mesh(self.root_device.type)
                if self.layout.expert_parallel_size > 1:
                    self._expert_mesh = self.layout.expert_mesh(self.root_device.type)
            for mesh in filter(None, (self._device_mesh, self._expert_mesh)):
                set_timeout(mesh, self._rendezvous().timeout)
            # whether values and gradients each go both to later and to earlier ranks
            both_ways = any(each.stages > self.layout.pipeline_parallel_size for each in self._schedules)
            self._groups = Groups.make(self.layout, self._device_mesh, self._timeout, both_ways=both_ways)
        if self.world_size > 1:
            self._computing.agree(self.groups.host)
        self._seed = randomness.agree(self.broadcast)
        self._begin_watch()

    def _begin_watch(self: Any) -> None:
        """Watch for failures, from the start and after one that a program has caught."""
        if self.world_size > 1 and (self._watch is None or self._watch.stopped.is_set()):
            self._watch = FailureWatch(self._rendezvous())

    def reduce(self: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data ranks: all other ranks of a pipeline and a tensor group hold the same values.

        Does nothing before processes are connected, as in Lightning's other strategies.
        """
        if not isinstance(tensor, Tensor) or self._groups is None:
            return tensor
        tensor = _whole(tensor)
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())  # weights of a logged mean: Lightning rounds their mean down
        tensor = tensor.to(self.root_device)  # NCCL takes no host tensors
        return _sync_ddp_if_available(tensor, group or self.groups.data, reduce_op=reduce_op)

    def all_gather(self: Any, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data ranks, in their order: ``[data_parallel_size, *tensor.shape]``."""
        # LightningModule.all_gather passes the world if the user passes no group
        group = self.groups.data if group in (None, dist.group.WORLD) else group
        if sync_grads:
            return gather(group, _whole(tensor))[0]
        return super().all_gather(_whole(tensor), group)  # type: ignore[misc,no-any-return]


def _whole(tensor: Any) -> Any:
    """A plain tensor of what is computed from a split weight or between split layers, such as a logged norm."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
