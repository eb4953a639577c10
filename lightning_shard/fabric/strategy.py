"""The strategy ``hybrid_shard`` of Fabric: data × tensor × expert ranks for the modules of a loop that users write."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.fabric.wrappers import is_wrapped
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard import tree
from lightning_shard.errors import ConfigurationError, StepError
from lightning_shard.fabric.pipelined import BACKWARD, FabricLoop, LossFunction, Pipelined
from lightning_shard.fabric.ranks import FabricRanks
from lightning_shard.fabric.saving import States
from lightning_shard.lightning_private import within_fabrics_backward
from lightning_shard.parallel.activation_checkpointing import Recomputing
from lightning_shard.parallel.batch_norm import broadcast_statistics
from lightning_shard.parallel.clip import clip_by_value, gradient_norm, scale_to_norm
from lightning_shard.parallel.experts.stacked import ExpertPlan
from lightning_shard.parallel.fsdp import as_tensors
from lightning_shard.parallel.fsdp.shard import average_gradients, no_gradient_sync, reshard, scalar_parameters
from lightning_shard.parallel.tensor.plan import Plan
from lightning_shard.plugin.assembly.assemble import Assembly, assemble
from lightning_shard.plugin.assembly.prepared import make_steps
from lightning_shard.plugin.limits import refuse_network
from lightning_shard.plugin.optimizers import whole_tensors
from lightning_shard.plugin.optimizers.sharded import Built, prepare
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO, sharded
from lightning_shard.plugin.saving.drift import on_several_stages
from lightning_shard.plugin.steps import randomness
from lightning_shard.plugin.steps.checks.agreement import check_copies
from lightning_shard.plugin.steps.loss_weight import LossWeights, agree_on_overflows, loss_of, weighted_for_backward
from lightning_shard.torch_private import allowing_empty_optimizers


class HybridShardStrategy(FabricRanks):
    """Fully sharded data, tensor, expert and pipeline parallelism of the modules that ``fabric.setup`` gets.

    A batch is split over data ranks; ranks that hold parts of the same layers get the same batch, so their code must
    do the same. Each module is sharded in place; its blocks are gathered while they run. ``no_backward_sync``,
    clipping, ``init_module(empty_init=True)`` and both orders of making a module's optimizer are supported.
    Checkpoints are those of ``lightning_shard.checkpoint``: a Trainer's load here, and these there.

    With one stage a module is called as a whole, or by `training_step` and `evaluation_step`. With several
    pipeline stages it is called by these only.

    Arguments that aren't named here are those of `lightning_shard.HybridShardStrategy`.

    Args:
        loss_weight: As there; for `training_step`.
        checkpoint_io: A `lightning_shard.ShardedCheckpointIO`.
        save_distributed_checkpoint: ``False``: ``fabric.save`` writes one file, as Fabric's other strategies read it.
            It is put together in the memory of rank 0.

    Raises:
        ConfigurationError, LayoutError: Settings that can't work.
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
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        rehearse: bool = True,
    ) -> None:
        given = dict(locals())  # all arguments, by name
        super().__init__(
            lambda module, _: module,
            data_parallel_size=data_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._take(given)
        self._io = checkpoint_io or ShardedCheckpointIO()
        self._set_up: WeakKeyDictionary[nn.Module, Built] = WeakKeyDictionary()
        self._pipelined: WeakKeyDictionary[nn.Module, Pipelined] = WeakKeyDictionary()
        self._owners: WeakKeyDictionary[Optimizer, nn.Module] = WeakKeyDictionary()
        self._states: States | None = None
        self._backward_sync_control = self  # type: ignore[assignment]
        self._holds_back: set[nn.Module] = set()
        self._between_setups = ExitStack()
        finalize(self, self._between_setups.close)

    @property
    def checkpoint_io(self) -> CheckpointIO:
        return self._io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._io = sharded(io)

    def setup_environment(self) -> None:
        super().setup_environment()
        atexit.register(self._io.teardown)

    # Modules and optimizers

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        module = self.setup_module(module)
        self._prepare(module, optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a module, in place; a collective call over all ranks. Its weights are rank 0's."""
        built, stages = Built.of(module), self.layout.pipeline_parallel_size
        assert self._device_mesh is not None
        if stages > 1:
            refuse_network(module, self.layout, self._schedules[0].microbatches, fits=True)
        known = assemble(
            module,
            self.layout,
            self._device_mesh,
            self._expert_mesh,
            self.root_device,
            randomness.derive(self._seed, "init", len(self._set_up)),
            self._settings,  # all-gathers in the parameters' dtype: parts may be called outside of autocast
            self._schedules,
            self.groups,
        )
        self._set_up[module] = built
        if stages > 1:
            self._pipelined[module] = self._made_steps(module, known)
            self._between_setups.enter_context(allowing_empty_optimizers())
        return module

    def _made_steps(self, module: nn.Module, known: Assembly) -> Pipelined:
        assert self._device_mesh is not None
        rank_zero_info(f"{self.layout}\n{known.placement}")
        loop = FabricLoop(self.precision)
        steps = make_steps(
            module,
            known,
            loop,
            self.groups,
            self._device_mesh,
            self.root_device,
            self._loss_weight,
            partial(self._check_saved, module, known),
            reduces_each=self._reduces_each,
            syncs_batch_norm=False,
        )
        # fabric.seed_everything may be called after the launch
        seed = self.broadcast(os.environ.get("PL_GLOBAL_SEED", self._seed))
        return Pipelined(module, known, loop, steps, self.groups, randomness.derive(seed, len(self._set_up)))

    def _check_saved(self, module: nn.Module, known: Assembly) -> None:
        """After the first step: refuse optimizers whose state no save could hold. A collective call over all ranks."""
        reshard(module)
        own = [optimizer for optimizer, owner in self._owners.items() if owner is module]
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        check_copies(on_several_stages(module, known.ties), own, names, self.layout, self.groups.host)

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Have an optimizer step this rank's shards. It may have been made before its module was sharded."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for module in self._set_up:
            reshard(module)
            is_own = any(id(parameter) in held for parameter in module.parameters())
            if any(self.groups.gather_over_stages(is_own)):
                self._prepare(module, [optimizer])
                return optimizer
        raise ConfigurationError(
            f"{type(optimizer).__name__} holds parameters of no module that fabric.setup_module has sharded: set up the"
            " module first, and make the optimizer of its parameters."
        )

    def _prepare(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        reshard(module)
        self._between_setups.close()
        pipelined = self._pipelined.get(module)
        tied = {name for tie in pipelined.known.ties for name in tie.names} if pipelined is not None else ()
        parameters = dict(module.named_parameters())
        given = prepare(optimizers, parameters, self._set_up[module], tied, self.layout, self.groups)
        for optimizer, positions in zip(optimizers, given):
            self._owners[optimizer] = module
            if pipelined is not None:
                pipelined.add(optimizer, positions)
        if (scaler := getattr(self.precision, "scaler", None)) is not None:
            agree_on_overflows(scaler, optimizers)

    # Steps

    def training_step(self, loss_fn: LossFunction, model: nn.Module, batch: Any) -> Any:
        """Run a training step, forward and backward, on any layout; a collective call over all ranks.

        On pipeline stages the batch is split into microbatches, as for a Trainer's ``training_step``, and what the
        contract says of that holds for ``loss_fn``. Gradients are added to those that there
        are. Within ``fabric.no_backward_sync(model)`` they aren't reduced over the data ranks, which the last step
        before ``optimizer.step()`` has to do.

        Args:
            loss_fn: Called as ``loss_fn(model, microbatch)``. It calls the model once, and returns the loss, a mean
                over samples, ``[]``, or a dict with the loss as ``"loss"``. It keeps nothing outside of the model, and
                divides the loss by the number of steps whose gradients are accumulated.
            model: As ``fabric.setup`` or ``fabric.setup_module`` has returned it.
            batch: This data rank's: tensors in any nesting of dicts, lists and tuples, with a sample in each row. The
                same on all ranks of a pipeline.

        Returns:
            What ``loss_fn`` gives for the batch, without graphs, on all stages: losses as means over microbatches,
            other tensors with their rows joined. ``fabric.all_reduce(loss)`` is the mean over data ranks.

        Raises:
            BatchError: The batch doesn't divide into microbatches; or ranks of a pipeline have others.
            StepError: ``loss_fn`` does what can't be right on stages.
            RankFailure: Another rank failed; it names that rank and its error.
        """
        module = self._module_of(model)
        with self._ending_together():
            if (pipelined := self._pipelined.get(module)) is not None:
                return pipelined.train(loss_fn, model, batch, accumulates=module in self._holds_back)
            result = loss_fn(model, batch)
            [weight] = LossWeights(self._loss_weight, self.groups.data, self.root_device).of([batch])
            with within_fabrics_backward():
                self.backward(weighted_for_backward(loss_of(result), weight.of_gradient), module)
            return tree.detached(result)

    def evaluation_step(self, loss_fn: LossFunction, model: nn.Module, batch: Any) -> Any:
        """Run ``loss_fn(model, batch)`` without gradients, on any layout; a collective call over all ranks.

        It may return anything with a row for each sample, too.

        Args:
            loss_fn: As for `training_step`.
            model: The same. ``model.eval()`` is left to the caller.
            batch: The same; one that doesn't divide into the microbatches is split into fewer.

        Returns:
            As `training_step`.

        Raises:
            BatchError, StepError: As `training_step`.
        """
        pipelined = self._pipelined.get(self._module_of(model))
        with self._ending_together(), torch.no_grad():
            return loss_fn(model, batch) if pipelined is None else pipelined.evaluate(loss_fn, model, batch)

    def _module_of(self, model: Any) -> nn.Module:
        self._between_setups.close()
        module = model.module if is_wrapped(model) else model
        if module not in self._set_up:
            raise ConfigurationError(
                f"The model, a {type(module).__name__}, isn't one that fabric.setup or fabric.setup_module has"
                " returned: pass that."
            )
        if self.layout.pipeline_parallel_size > 1 and any(
            isinstance(part, OptimizedModule) for part in model.children()
        ):
            raise ConfigurationError(
                "torch.compile of a network doesn't go with pipeline_parallel_size"
                f"={self.layout.pipeline_parallel_size}: leave it out, and use compile_blocks=True."
            )
        return module  # type: ignore[no-any-return]

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        if self.layout.pipeline_parallel_size > 1:
            raise StepError(BACKWARD, breaks=4)
        if isinstance(tensor, DTensor):
            raise StepError(
                "The loss is computed from parameters as they are between calls, DTensors of which each rank has a"
                " part, so its gradients would be lost: compute it from what the module returns.",
                breaks=9,
            )
        super().backward(tensor, module, *args, **kwargs)
        for each in self._set_up:
            if each not in self._holds_back:
                average_gradients((p for p in scalar_parameters(each) if p.requires_grad), self.groups.gradient)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """What Fabric's ``no_backward_sync`` calls: inside, backwards don't reduce gradients over the ranks."""
        if not enabled:
            yield
            return
        self._holds_back.add(module)
        try:
            # a pipelined step decides for each microbatch
            with nullcontext() if module in self._pipelined else no_gradient_sync(module):
                yield
        finally:
            self._holds_back.discard(module)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        owner = self._owners.get(optimizer)
        pipelined = None if owner is None else self._pipelined.get(owner)
        if pipelined is not None:
            pipelined.begin_update()
        with self._ending_together():
            try:
                with as_tensors.step():
                    result = super().optimizer_step(optimizer, **kwargs)
            finally:
                whole_tensors.end()
            if pipelined is not None:
                pipelined.first_checks.after_update()
        return result

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
        states = self._made_states()
        save = states.save if self._save_distributed_checkpoint else states.save_whole
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
        path = self.broadcast(path)
        return self._made_states().load(self._io, path, state, strict=strict, weights_only=weights_only)

    def _made_states(self) -> States:
        if self._states is None:
            self._states = States(
                self.layout, self._stage_mesh, self.groups, self.root_device, self._timeout, self._pipelined
            )
        return self._states
