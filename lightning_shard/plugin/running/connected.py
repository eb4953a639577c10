"""The strategy's base class for ranks: connects them, reduces over them, and ends all of them if one fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shard import lightning_private
from lightning_shard.errors import ConfigurationError, ShardError
from lightning_shard.gloo import one_worker
from lightning_shard.layout import Layout, check_sizes
from lightning_shard.parallel.experts.exchange import gather
from lightning_shard.plugin import trainer_private
from lightning_shard.plugin.groups import Groups, set_timeout
from lightning_shard.plugin.running.environment import ComputingSettings
from lightning_shard.plugin.running.failure import FailureWatch
from lightning_shard.plugin.running.last_words import print_failed_saves, print_instead, restore_hook
from lightning_shard.plugin.running.launchers import ForkedRanks, check_number_of_ranks, launcher_of
from lightning_shard.plugin.running.preemption import Preemption
from lightning_shard.plugin.running.rendezvous import Rendezvous
from lightning_shard.plugin.steps import randomness


class ConnectedStrategy(ModelParallelStrategy):
    """Sets up a layout's mesh, process groups and seed, and watches for failures.

    Args:
        sizes: The axes' settings, as :meth:`Layout.resolve` takes them.
        process_group_backend, timeout: See :class:`HybridShardStrategy`.
    """

    def __init__(
        self, sizes: dict[str, Any], process_group_backend: str | None = None, timeout: timedelta | None = None
    ) -> None:
        super().__init__(
            data_parallel_size=sizes["data_parallel_size"],
            tensor_parallel_size=sizes["tensor_parallel_size"],
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        check_sizes(**sizes)
        self._sizes = sizes
        self._layout: Layout | None = None
        self._groups: Groups | None = None
        self._sends_both_ways = False  # whether values and gradients each go both to later and to earlier ranks
        self._expert_mesh: DeviceMesh | None = None
        self._seed = 0
        self._computing = ComputingSettings()
        self._watch: FailureWatch | None = None
        self._undo_guards: Callable[[], None] = lambda: None
        self._preemption = Preemption()
        lightning_private.choose_precision_by(self)

    def check_precision(self, precision: Any, accelerator: Any) -> None:
        """Refuse precisions that aren't supported, when a Trainer is made with this strategy."""
        trainer_private.refuse_precision(precision)
        if precision == "16-mixed" and accelerator == "cpu":
            raise ConfigurationError(
                "precision='16-mixed' isn't done on the CPU (Lightning would use bf16-mixed instead): use"
                " precision='bf16-mixed'."
            )

    @property
    def layout(self) -> Layout:
        """The sizes of the axes and this rank's coordinates; available once the Trainer is created."""
        if self._layout is None:
            raise RuntimeError("The layout is known once a Trainer was made with this strategy.")
        return self._layout

    @property
    def groups(self) -> Groups:
        assert self._groups is not None
        return self._groups

    def set_world_ranks(self) -> None:
        lightning_private.is_taken(self)
        super().set_world_ranks()
        # the world size is known here for the first time: sizes that don't fit are refused before processes start
        check_number_of_ranks(self, "Trainer")
        self._layout = Layout.resolve(self.world_size, self.global_rank, **self._sizes)

    def _configure_launcher(self) -> None:
        self._launcher = launcher_of(self, _SubprocessScriptLauncher, ForkedRanks)

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        assert self.lightning_module is not None
        ParallelStrategy.setup_environment(self)
        # Lightning's own loaders cause it, on each rank
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", module=r"lightning\.")
        self._setup_distributed()
        if self._groups is None:
            with one_worker():
                self._device_mesh = self.layout.mesh(self.root_device.type)
                if self.layout.expert_parallel_size > 1:
                    self._expert_mesh = self.layout.expert_mesh(self.root_device.type)
            for mesh in filter(None, (self._device_mesh, self._expert_mesh)):
                set_timeout(mesh, self._rendezvous().timeout)
            self._groups = Groups.make(self.layout, self._device_mesh, self._timeout, both_ways=self._sends_both_ways)
        if self.world_size > 1:
            self._computing.agree(self.groups.host, self.root_device)
        self._seed = randomness.agree(self.broadcast)
        if self.world_size > 1 and (self._watch is None or self._watch.stopped):
            restore_hook()
            self._watch = FailureWatch(self._rendezvous())
        self.lightning_module._device_mesh = self._device_mesh
        trainer = self.lightning_module.trainer
        self._preemption.take_over(trainer)
        trainer_private.run_within(trainer, self._ending_as_it_should)
        trainer_private.drop_repeated_predictions(trainer)

    def _setup_distributed(self) -> None:
        """As the parent's method, but with a store whose keys belong to this round of torchrun.

        The generators aren't reset to the seed of ``seed_everything``: one process's go on from run to run.
        """
        assert self.cluster_environment is not None
        self.set_world_ranks()
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

    def _rendezvous(self) -> Rendezvous:
        assert self.cluster_environment is not None
        return Rendezvous(
            self.cluster_environment.main_address,
            self.cluster_environment.main_port,
            self.global_rank,
            self.world_size,
            self._timeout or default_pg_timeout,
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.layout.data_rank}

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data-parallel ranks: all other ranks of a pipeline and a tensor group hold the same values.

        Does nothing before processes are connected, as in Lightning's other strategies.
        """
        if not isinstance(tensor, Tensor) or self._groups is None:
            return tensor
        tensor = _whole(tensor)
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())  # weights of a logged mean: Lightning rounds their mean down
        tensor = tensor.to(self.root_device)  # NCCL takes no host tensors
        return _sync_ddp_if_available(tensor, group or self.groups.data, reduce_op=reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        value = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(value)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data-parallel ranks, in their order: ``[data_parallel_size, *tensor.shape]``."""
        # LightningModule.all_gather passes the world if the user passes no group
        group = self.groups.data if group in (None, dist.group.WORLD) else group
        if sync_grads:
            return gather(_whole(tensor), group)
        return super().all_gather(_whole(tensor), group)

    def on_exception(self, exception: BaseException) -> None:
        self._report(exception)
        self._undo_guards()
        if self._watch is None:
            return
        failure = self._watch.failure_elsewhere(exception)
        if failure is not None:  # Lightning raises the exception that it has, so its message is replaced
            exception.args = (f"{failure}\n{exception}",)
        if (line := self._watch.brief(exception)) is not None:
            print_instead(exception, line)
        self._watch.leave(self.global_rank - self.local_rank)

    def _report(self, exception: BaseException) -> None:
        """Report the failure to the other ranks, which then stop."""
        if self._watch is not None:
            self._watch.report(exception)

    def _refusal(self, error: Exception) -> ShardError | None:
        """A better error, if a user's code failed because of the layout."""
        return None

    @contextmanager
    def _ending_as_it_should(self) -> Iterator[None]:
        """Raise on all ranks what ended the run; hooks may save on the exception if all ranks agree."""
        assert self.lightning_module is not None
        watch = self._watch
        with watch.interrupts.caught() if watch else nullcontext():
            try:
                with self._preemption.stopping():
                    yield
            except BaseException as error:
                raised = (self._refusal(error) if isinstance(error, Exception) else None) or error
                if watch is not None:
                    watch.fails()
                    self._report(raised)
                    raised = watch.failure_elsewhere(raised) or raised
                    self._undo_guards = print_failed_saves(self.lightning_module.trainer, watch.is_first_to_say)
                if raised is error:
                    raise
                raise raised from error

    def _saving(self) -> AbstractContextManager[None]:
        """Inside, the end of a batch is waited for without a limit after Ctrl+C."""
        return self._watch.interrupts.saving() if self._watch is not None else nullcontext()

    def teardown(self) -> None:
        self._computing.restore()
        super().teardown()
        if self._watch is not None:
            self._watch.stop()


def _whole(tensor: Any) -> Any:
    """A plain tensor of what is computed from a split weight or between split layers, such as a logged norm."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
