"""The strategy ``hybrid_shard``: trains an unmodified LightningModule over pipeline, data, tensor and expert ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from torch import Tensor

from lightning_shard import lightning_private
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.errors import ConfigurationError
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.parallel.batch_norm import broadcast_statistics, synchronize
from lightning_shard.parallel.experts.stacked import ExpertPlan
from lightning_shard.parallel.fsdp import as_tensors
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.parallel.tensor.plan import Plan
from lightning_shard.pipeline.placement import Placement
from lightning_shard.pipeline.schedules.recorded import StopWatch
from lightning_shard.plugin.assembly.parameters import gather_parameters
from lightning_shard.plugin.assembly.prepared import PreparedStrategy
from lightning_shard.plugin.data.loader import iterates_collectively, shard_dataloader
from lightning_shard.plugin.data.resume import batches_trained, resume_data, run_epoch_start
from lightning_shard.plugin.optimizers import whole_tensors
from lightning_shard.plugin.reporting.memory import HeldMemory, held_memory
from lightning_shard.plugin.saving.averaging import postpone_copies
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO
from lightning_shard.plugin.saving.own_loading import replace_lazy
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.checks.stage_parameters import by_parts, guard_of
from lightning_shard.plugin.steps.look_ahead import BatchesAhead, runs_in_order
from lightning_shard.plugin.steps.loss_weight import loss_of
from lightning_shard.plugin.steps.pipelined import PipelinedSteps
from lightning_shard.plugin.steps.single_stage import SingleStageSteps
from lightning_shard.sharding import local_tensor


class HybridShardStrategy(PreparedStrategy):
    """Fully sharded data, tensor and pipeline parallelism in any combination, for an unmodified LightningModule.

    Args:
        pipeline_parallel_size: Number of ranks in a pipeline, over which the network's blocks are cut into stages.
        tensor_parallel_size: Number of ranks over which single layers are split.
        expert_parallel_size: Number of data-parallel ranks over which the experts of mixtures are distributed. Divides
            ``data_parallel_size / data_parallel_replicas``.
        data_parallel_size: Number of ranks over which the data is distributed; ``"auto"``: all remaining ranks.
        data_parallel_replicas: Parameters are sharded over ``data_parallel_size / data_parallel_replicas`` ranks, and
            replicated over this many such groups (HSDP).
        microbatches: Number of microbatches into which a pipeline splits a batch. Default: twice the number of stages.
        schedule: ``"1F1B"``, ``"Eager1F1B"`` (mostly faster where stages differ, with about twice the activations),
            ``"GPipe"``; with several stages on each rank ``"Interleaved1F1B"``, ``"InterleavedZeroBubble"``,
            ``"ZBVZeroBubble"``, ``"DualPipeV"``, of which the last three split backwards in two parts; the path of a
            CSV file as torch's schedules write it; or ``"auto"``: the one that is fastest in a simulation of the
            stages' counted costs, unless its gain isn't worth its other costs. The choice is logged.
        placement: How blocks are assigned to stages: ``"auto"`` (by cost), ``"even"``, or counts such as
            ``[3, 5, 5, 3]``.
        pipeline_blocks: The name of the list of repeated blocks, such as ``"model.layers"``, or names of several lists
            and modules in running order, each as often as it runs. Default: found automatically.
        loss_weight: A function of a batch that returns the weight of its loss, such as its number of non-padding
            tokens: then a mean over tokens becomes the mean over the whole global batch. Default: all parts count
            equally. Pass the same number as ``batch_size`` when logging.
        tensor_parallel_plan: Patterns of module names to styles, such as ``{"layers.*.attn.q": "colwise"}``. Default:
            the model's own, where it is a transformers model.
        expert_parallel_plan: Patterns of the names of modules of experts, or lists of them, such as
            ``{"layers.*.moe.experts": "experts"}``. Default: the model's own, where it is a transformers model.
        activation_checkpointing: Recompute activations in the backward instead of keeping them: ``True`` in every
            block, ``n`` in every n-th, ``"selective"`` in every block all but matrix products and attention.
        cpu_offload: Keep parameters, gradients and optimizer states in host memory.
        compile_blocks: Run each block's forward through ``torch.compile``. A string names the backend.
        reduce_each_microbatch: Reduce gradients over the data ranks in each backward, so that only shards of them are
            kept. Otherwise only the last backward before an optimizer step does, which communicates less.
        reshard_after_forward: Free a block's gathered parameters after its forward, and gather them again for the
            backward. Default: ``True`` with one pipeline stage; ``False`` with several. With manual optimization:
            always.
        checkpoint_io: A :class:`ShardedCheckpointIO`.
        process_group_backend: Default: ``"nccl"`` on CUDA, ``"gloo"`` on the CPU.
        timeout: The timeout of collective operations.
        context_parallel_size: Number of ranks over which each sequence is split within blocks, whose attention must be
            ``scaled_dot_product_attention``. Sequence lengths are multiples of twice this size. With data ranks only.
        rehearse: After the first batch of each kind of step, run two microbatches again, one by one and as one, and
            refuse or warn of what microbatches change (sentence 12 of the contract). Of pipeline stages.

    Raises:
        ConfigurationError: Settings that can't work, raised as early as that can be known.
    """

    def __init__(
        self,
        pipeline_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        data_parallel_size: int | Literal["auto"] = "auto",
        data_parallel_replicas: int = 1,
        microbatches: int | None = None,
        schedule: str | os.PathLike[str] = "1F1B",
        placement: Literal["auto", "even"] | Sequence[int] = "auto",
        pipeline_blocks: str | Sequence[str] | None = None,
        tensor_parallel_plan: Plan | None = None,
        expert_parallel_plan: ExpertPlan | None = None,
        loss_weight: Callable[[Any], Any] | None = None,
        activation_checkpointing: Recomputing = None,
        cpu_offload: bool = False,
        compile_blocks: bool | str = False,
        reduce_each_microbatch: bool = False,
        reshard_after_forward: bool | None = None,
        checkpoint_io: ShardedCheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        context_parallel_size: int = 1,
        rehearse: bool = True,
    ) -> None:
        super().__init__(dict(locals()))  # all arguments, by name
        if checkpoint_io is not None:
            self.checkpoint_io = checkpoint_io
        self._samples: bool | None = None
        self._loaders: list[object] = []  # those processed so far of the ones that were asked for together
        self._seed_of_evaluation = 0
        self._in_groups: list[int] | None = None  # how many parameters optimizers' groups have had, when last checked
        self._ahead: BatchesAhead | None = None

    # Public access

    @property
    def placement(self) -> Placement | None:
        """The assignment of blocks to stages, with bytes and costs; ``str()`` is a table.

        ``None`` before the first fit or evaluation has begun.
        """
        return self._assembly.placement if self._assembly else None

    @by_parts
    def held_memory(self) -> HeldMemory:
        """Report the memory in use on each rank's device, by kind; ``str()`` is a table.

        A collective call over all ranks, to be made between steps.

        Raises:
            ConfigurationError: No fit or evaluation has begun.
        """
        module, known = self.lightning_module, self._assembly
        if module is None or known is None:
            raise ConfigurationError("held_memory() needs a fit or an evaluation that has begun: call it in a hook.")
        reshard(module)
        stages = [stage.index for stage in known.stages] if known.stages is not None else [0]
        return held_memory(module, self.optimizers, self.layout, stages, self.root_device, self.groups.host)

    @by_parts
    def local_shard(self) -> dict[str, Tensor]:
        """This rank's shards of the parameters, by name; they alias the parameters' memory."""
        reshard(self._module)
        return {name: local_tensor(parameter) for name, parameter in self._module.named_parameters()}

    @by_parts
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return full parameters by name on rank 0's CPU; empty on other ranks. A collective call over all ranks."""
        reshard(self._module)
        return gather_parameters(self._module, self.layout, self._groups, self.root_device)

    @by_parts
    def synchronize_gradients(self) -> None:
        """Reduce the gradients accumulated under :meth:`block_backward_sync`; a collective call over the stage.

        Only for loops that run their own backwards (manual optimization): otherwise the strategy does it.
        """
        self._gradients.synchronize()

    def watch_actions(self, watch: StopWatch | None) -> str | None:
        """Call ``watch`` for each action of pipelined training steps on this rank, until another callable is set.

        Returns:
            The schedule's name; ``None`` with one stage, which has no actions.
        """
        return self._steps.watch(watch) if isinstance(self._steps, PipelinedSteps) else None

    # Data, and the end of a run

    def setup_environment(self) -> None:
        super().setup_environment()
        # imported here: next to a class with the name of Lightning's own, LightningCLI couldn't tell which is meant
        from lightning_shard.plugin.saving.model_checkpoint import take_over_stock_callbacks

        trainer = self._module.trainer
        if (guard := guard_of(self._module)) is not None:  # an earlier run's
            guard.release()
        postpone_copies(trainer.callbacks)  # type: ignore[attr-defined]
        if self._samples is None:
            self._samples = lightning_private.take_over_sampling(trainer)
        take_over_stock_callbacks(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        if not self._samples:
            return dataloader
        trainer = self._module.trainer
        self._loaders.append(dataloader)
        return shard_dataloader(
            dataloader,
            data_rank=self.layout.data_rank,
            data_size=self.layout.data_parallel_size,
            seed=self._seed,
            train=trainer.training,
            batches_trained=partial(batches_trained, trainer),
            epoch=lambda: trainer.current_epoch,
            beside=self._loaders[:-1],
            ranks=Ranks.of(self.groups.host),
        )

    def barrier(self, name: str | None = None) -> None:
        super().barrier(name)
        if name is not None and name.endswith("_dataloader()"):  # Lightning has asked for loaders; it processes each
            self._loaders = []

    def teardown(self) -> None:
        if self.model is not None:
            synchronize(self.model, None)
        self._of_run.close()
        super().teardown()
        if self._guard is not None:
            self._guard.guard(is_after_run=True)

    # Steps

    def on_train_start(self) -> None:
        resume_data(self._module.trainer)
        run_epoch_start(self._module.trainer)
        lightning_private.find_rates_by_all_data(self._module.trainer)
        if self._gave_lazy:  # after all loading hooks, while the checkpoint still exists
            self._gave_lazy = False
            replace_lazy(self._module, *self._module.trainer.callbacks)  # type: ignore[attr-defined]
        self._in_groups = None
        if self._generators is not None:
            randomness.restore(self._generators, self.root_device)
            self._generators = None
        self._guard_hooks(shows_all=False)
        self._steps.begin("training_step")

    def on_train_end(self) -> None:
        self._guard_hooks()
        self._join_copies()
        self.checkpoint_io.wait()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        in_groups = [len(group["params"]) for each in self.optimizers for group in each.param_groups]
        if batch_idx == 0 or in_groups != self._in_groups:  # after the start hooks of the run, the epoch and the batch
            self._in_groups = in_groups
            self._assembly.check_parameters(self._module, self.groups)
        if batch_idx == 0:
            self._metrics.find(self._module)
        if not isinstance(self._steps, PipelinedSteps):
            return
        lightning_private.skip_backward(self.lightning_module.trainer)  # type: ignore[union-attr]
        if batch_idx == 0:  # callbacks, and users' hooks, freeze and unfreeze where an epoch begins
            before, self._trains = self._trains, self._what_trains()
            if self._trains != before:
                self._steps.reset_crossings()
            self._steps.look_again("training_step")

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.lightning_module
        draw = randomness.derive(self._seed, "train", lightning_private.batches_started(module.trainer))
        self._gradients.begin_step()
        with as_tensors.step(), self._first_checks.at("training_step", args[0] if args else None) as shown:
            if isinstance(self._steps, PipelinedSteps):
                lightning_private.zero_gradients(module.trainer, self.optimizers[0])
                output = self._steps.train(draw, *args, **kwargs)
                loss = loss_of(output) / module.trainer.accumulate_grad_batches
                self.precision_plugin.pre_backward(loss, module)
                self.precision_plugin.post_backward(loss, module)
            else:
                output = self._steps.train(self.precision_plugin, draw, *args, **kwargs)
            shown.output = output
        return output

    def backward(self, closure_loss: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The backward of a step that isn't pipelined. The user's loss tensor itself isn't changed."""
        assert isinstance(self._steps, SingleStageSteps)
        with as_tensors.step():
            return super().backward(self._steps.begin_backward(closure_loss), *args, **kwargs)

    @by_parts
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with as_tensors.step():
                result = super().optimizer_step(*args, **kwargs)
        finally:
            whole_tensors.end()
        self._first_checks.after_update()
        return result

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self._evaluate("predict_step", args, kwargs)

    def _evaluate(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:

        def draw(arguments: tuple[Any, ...]) -> int:
            return randomness.derive(self._seed_of_evaluation, method, *arguments[1:])

        if args[1:2] == (0,):
            self._metrics.find(self._module)
        with as_tensors.step(), self._first_checks.at(method, args[0] if args else None) as shown:
            if isinstance(self._steps, PipelinedSteps):
                upcoming = self._ahead.upcoming() if self._ahead is not None else ()
                shown.output = self._steps.evaluate(method, draw, upcoming, *args, **kwargs)
            else:
                shown.output = self._steps.evaluate(method, draw(args), *args, **kwargs)
        return shown.output

    def block_backward_sync(self) -> Any:
        """Inside, backwards accumulate gradients without reducing them over the data-parallel ranks."""
        return self._gradients.held()

    def on_validation_start(self) -> None:
        self._begin_evaluation("validation_step")

    def on_test_start(self) -> None:
        self._begin_evaluation("test_step")

    def on_predict_start(self) -> None:
        self._begin_evaluation("predict_step")
        if not self.layout.is_first_of_data_rank:
            lightning_private.write_no_predictions(self._module.trainer)

    def _begin_evaluation(self, method: str) -> None:
        """Let stages run batches ahead, unless user code could notice; all ranks of a pipeline decide alike."""
        self._ahead = None
        module = self._module
        trainer = module.trainer
        self._seed_of_evaluation = randomness.derive(self._seed, lightning_private.batches_started(trainer))
        loop = lightning_private.evaluating(trainer)
        # only a backward frees gathered parameters: before the hooks of the end, which may restore weights that start
        # hooks swapped out, and after them, since they may have called the module
        lightning_private.around_end_hooks(loop, partial(reshard, module))
        broadcast_statistics(module, self.groups.gradient)
        self._join_copies()
        self._steps.begin(method)
        if self.layout.pipeline_parallel_size == 1:
            return
        ahead = None
        in_order = runs_in_order(trainer, module, method) or any(
            map(iterates_collectively, lightning_private.dataloaders(loop))
        )
        if not any(self.groups.gather_over_stages(in_order)):
            ahead = BatchesAhead.install(loop, method, self._prepare)
        self._ahead = ahead

    def _prepare(self, batch: Any, dataloader_idx: int) -> Any:
        """Prepare a batch as Lightning does where no hook overrides it; idempotent."""
        return self.batch_to_device(self.precision_plugin.convert_input(batch), dataloader_idx=dataloader_idx)

    def on_predict_end(self) -> None:
        lightning_private.write_predictions_again(self._module.trainer)
