"""The strategy ``hybrid_shard`` of Fabric: data × tensor × expert ranks for the modules of a loop that users write."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.errors import ConfigurationError, LayoutError, StepError
from lightning_shard.fabric.saving import Saving, load
from lightning_shard.gloo import one_worker
from lightning_shard.layout import Layout, check_sizes
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.parallel.batch_norm import broadcast_statistics
from lightning_shard.parallel.clip import clip_by_value, gradient_norm, scale_to_norm
from lightning_shard.parallel.experts.stacked import ExpertPlan
from lightning_shard.parallel.fsdp import dtensor_mixed
from lightning_shard.parallel.fsdp.shard import average_gradients, no_gradient_sync, reshard, scalar_parameters
from lightning_shard.parallel.tensor.plan import Plan
from lightning_shard.plugin.assembly.assemble import assemble
from lightning_shard.plugin.groups import Groups, set_timeout
from lightning_shard.plugin.optimizers import whole_tensors
from lightning_shard.plugin.optimizers.sharded import Built, prepare
from lightning_shard.plugin.running.environment import ComputingSettings
from lightning_shard.plugin.running.launchers import check_number_of_ranks, compute_alone, launcher_of
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO, sharded
from lightning_shard.plugin.settings import Settings
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.schedule_choice import candidates

_ONE_STAGE = (
    "A loop of Fabric calls the network itself, and a pipeline has to run it once for each microbatch, so"
    " pipeline_parallel_size must be 1 (it is {size}): use a Trainer (strategy=lightning_shard.HybridShardStrategy),"
    " or data, tensor and expert ranks."
)


class HybridShardStrategy(ModelParallelStrategy):
    """Fully sharded data, tensor and expert parallelism of the modules that ``fabric.setup`` gets.

    A batch is split over data ranks; ranks that hold parts of the same layers get the same batch, so their code must
    do the same. Each module is sharded in place and called as a whole; its blocks are gathered while they run.
    ``no_backward_sync``, clipping, ``init_module(empty_init=True)`` and both orders of making a module's optimizer
    are supported. Checkpoints are those of ``lightning_shard.checkpoint``: a Trainer's load here, and these there.

    Args:
        tensor_parallel_size, expert_parallel_size, data_parallel_size, data_parallel_replicas, pipeline_blocks,
        tensor_parallel_plan, expert_parallel_plan, activation_checkpointing, cpu_offload, compile_blocks,
        reshard_after_forward, process_group_backend, timeout: As for
            :class:`lightning_shard.HybridShardStrategy`.
        pipeline_parallel_size: 1. A pipeline needs a Trainer.
        checkpoint_io: A :class:`~lightning_shard.ShardedCheckpointIO`.
        save_distributed_checkpoint: ``False``: ``fabric.save`` writes one file, as Fabric's other strategies read it.
            It is put together in the memory of rank 0.

    Raises:
        ConfigurationError, LayoutError: Settings that can't work.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicas: int = 1,
        pipeline_blocks: str | list[str] | None = None,
        tensor_parallel_plan: Plan | None = None,
        expert_parallel_plan: ExpertPlan | None = None,
        activation_checkpointing: Recomputing = None,
        cpu_offload: bool = False,
        compile_blocks: bool | str = False,
        reshard_after_forward: bool | None = None,
        checkpoint_io: ShardedCheckpointIO | None = None,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        pipeline_parallel_size: int = 1,
    ) -> None:
        if pipeline_parallel_size != 1:
            raise LayoutError(_ONE_STAGE.format(size=pipeline_parallel_size))
        super().__init__(
            lambda module, _: module,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._sizes: dict[str, Any] = {
            "tensor_parallel_size": tensor_parallel_size,
            "data_parallel_size": data_parallel_size,
            "data_parallel_replicas": data_parallel_replicas,
            "expert_parallel_size": expert_parallel_size,
        }
        check_sizes(pipeline_parallel_size=1, **self._sizes)
        self._settings = Settings(
            "auto",
            pipeline_blocks,
            tensor_parallel_plan,
            expert_parallel_plan,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
            compile_blocks=compile_blocks,
            reshard_after_forward=reshard_after_forward,
        )
        self._settings.check_beside(pipeline=1, tensor=tensor_parallel_size, expert_parallel_size=expert_parallel_size)
        self._io = checkpoint_io or ShardedCheckpointIO()
        self._layout: Layout | None = None
        self._groups: Groups | None = None
        self._expert_mesh: DeviceMesh | None = None
        self._computing = ComputingSettings()
        self._seed = 0
        self._set_up: WeakKeyDictionary[nn.Module, Built] = WeakKeyDictionary()
        self._saving: Saving | None = None
        self._backward_sync_control = self  # type: ignore[assignment]
        self._holds_back: set[nn.Module] = set()

    @property
    def layout(self) -> Layout:
        """The sizes of the axes and this rank's coordinates; available after ``fabric.launch()``."""
        if self._layout is None:
            raise RuntimeError("The layout is known once fabric.launch() was called.")
        return self._layout

    @property
    def groups(self) -> Groups:
        assert self._groups is not None
        return self._groups

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return self._io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._io = sharded(io)

    # Ranks

    def _configure_launcher(self) -> None:
        self._launcher = launcher_of(self, _SubprocessScriptLauncher, _ForkedRanks)

    def _set_world_ranks(self) -> None:
        super()._set_world_ranks()
        check_number_of_ranks(self, "Fabric")

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", module=r"lightning\.")
        self._layout = Layout.resolve(self.world_size, self.global_rank, **self._sizes)
        with one_worker():  # the mesh may take the group that this makes
            self._setup_distributed()
            self._device_mesh = self.layout.mesh(self.root_device.type)
            if self.layout.expert_parallel_size > 1:
                self._expert_mesh = self.layout.expert_mesh(self.root_device.type)
        for mesh in filter(None, (self._device_mesh, self._expert_mesh)):
            set_timeout(mesh, self._timeout or default_pg_timeout)
        self._groups = Groups.make(self.layout, self._device_mesh, self._timeout)
        if self.world_size > 1:
            self._computing.agree(self.groups.host, self.root_device)
        # ranks that read the same batch must also draw the same numbers
        self._seed = randomness.agree(self.broadcast)
        atexit.register(self._io.teardown)  # Fabric has no end of its own

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.layout.data_parallel_size, "rank": self.layout.data_rank}

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over the data ranks: those that hold parts of the same layers have the same values."""
        if not isinstance(tensor, Tensor):
            return tensor
        return _sync_ddp_if_available(_whole(tensor), group or self.groups.data, reduce_op=reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather from the data ranks, in their order: ``[data_parallel_size, *tensor.shape]``."""
        return super().all_gather(_whole(tensor), group or self.groups.data, sync_grads)

    # Modules and optimizers

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        module = self.setup_module(module)
        self._prepare(module, optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module, in place; a collective call over all ranks. Its weights are rank 0's."""
        built = Built.of(module)
        assert self._device_mesh is not None
        assemble(
            module,
            self.layout,
            self._device_mesh,
            self._expert_mesh,
            self.root_device,
            randomness.derive(self._seed, "init", len(self._set_up)),
            self._settings,  # all-gathers in the parameters' dtype: parts may be called outside of autocast
            candidates("1F1B", 1, None),
            self.groups,
        )
        self._set_up[module] = built
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have an optimizer step this rank's shards. It may have been made before its module was sharded."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self._set_up:
            reshard(module)
            if any(id(parameter) in held for parameter in module.parameters()):
                self._prepare(module, [optimizer])
                return optimizer
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds parameters of no module that fabric.setup_module has sharded: set up the"
            " module first, and make the optimizer of its parameters."
        )

    def _prepare(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        reshard(module)
        prepare(optimizers, dict(module.named_parameters()), self._set_up[module], (), self.layout, self.groups)

    # Steps

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if isinstance(tensor, DTensor):
            raise StepError(
                "The loss is computed from parameters as they are between calls, DTensors of which each rank has a"
                " part, so its gradients would be lost: compute it from what the module returns."
            )
        super().backward(tensor, module, *args, **kwargs)
        for each in self._set_up:
            if each not in self._holds_back:
                average_gradients((p for p in scalar_parameters(each) if p.requires_grad), self.groups.gradient)

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """What Fabric's ``no_backward_sync`` calls: inside, backwards don't reduce gradients over the ranks."""
        return self._held(module, enabled)

    @contextmanager
    def _held(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        self._holds_back.add(module)
        try:
            with no_gradient_sync(module):
                yield
        finally:
            self._holds_back.discard(module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        try:
            with dtensor_mixed.step():
                return super().optimizer_step(optimizer, **kwargs)
        finally:
            whole_tensors.end()

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of the whole model's gradients; returns it, equal on all ranks."""
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        norm = gradient_norm(parameters, self._stage_mesh, self.root_device, float(norm_type))
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(
                f"The norm of order {norm_type} of the gradients is {float(norm)}, so they can't be clipped:"
                " pass error_if_nonfinite=False to scale them all the same."
            )
        scale_to_norm(parameters, float(max_norm), norm)
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self.precision.main_params(optimizer), float(clip_val))

    # Checkpoints

    @property
    def _stage_mesh(self) -> DeviceMesh:
        assert self._device_mesh is not None
        return self._device_mesh[self.layout.stage_axes]

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Mapping[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a sharded checkpoint; a collective call over all ranks.

        Modules and optimizers are written by every rank, under the modules' own names (with several modules,
        with their key in front); anything else is rank 0's, as for :func:`lightning_shard.checkpoint.save`.

        Args:
            filter: For a module's key, a function of a name and a tensor that says whether it is written.

        Raises:
            UnsupportedStateError: A value that the format can't hold, by its key.
            CheckpointError: It couldn't be written. What was at ``path`` before is still there.
        """
        for module in self._set_up:
            reshard(module)
            broadcast_statistics(module, self.groups.gradient)
        if self._saving is None:
            self._saving = Saving(self.layout, self._stage_mesh, self.groups, self.root_device, self._timeout)
        save = self._saving.save if self._save_distributed_checkpoint else self._saving.save_whole
        save(self._io, self.broadcast(path), state, filter or {}, storage_options)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Fill modules, optimizers and values from a checkpoint of any layout; a collective call over all ranks.

        ``path`` may be a sharded checkpoint, of Fabric or of a Trainer, or a file as Fabric or a Trainer writes it on
        one process. Of a Trainer's checkpoint the first module gets the model, and optimizers get the optimizers'
        states, in order.

        Returns:
            What ``state`` has no key for.

        Raises:
            StateMismatchError: With ``strict``: names differ, or it has nothing for a key. Shapes differ.
        """
        self._io.drain()
        for module in self._set_up:
            reshard(module)
        return load(self._io, self.broadcast(path), state, self.groups, strict=strict, weights_only=weights_only)


class _ForkedRanks(_MultiProcessingLauncher):
    """The ranks of a function that ``fabric.launch`` gets, as forks of this process."""

    def __init__(self, strategy: HybridShardStrategy) -> None:
        super().__init__(strategy, start_method="fork")

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        compute_alone(self._strategy)
        super()._wrapping_function(*args, **kwargs)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
