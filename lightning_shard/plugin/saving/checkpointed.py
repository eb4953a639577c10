"""The strategy's base class for saving and restoring: state by name, through a :class:`ShardedCheckpointIO`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.profiler import record_function

from lightning_shard import lightning_private
from lightning_shard.checkpoint import Pair, StoredTensor, load_together
from lightning_shard.checkpoint.excluded import excluded_of
from lightning_shard.checkpoint.foreign.lightning_ckpt import OWN, RANK_STATE, TRANSFORMERS_KEY, put_back, set_aside
from lightning_shard.checkpoint.names import as_compiled, prefix_of, renamed_keys
from lightning_shard.checkpoint.optimizers.named import listed_in, merge_stages, name_numbered, named_optimizer_state
from lightning_shard.checkpoint.optimizers.restored import Plan, asked_as, described, plan_optimizers, renamed
from lightning_shard.checkpoint.sharded_values import lay_out
from lightning_shard.checkpoint.store import as_path
from lightning_shard.errors import CheckpointError, StateMismatchError
from lightning_shard.parallel.fsdp.shard import reshard
from lightning_shard.plugin.assembly.assemble import Assembly
from lightning_shard.plugin.data.resume import reopen_epoch
from lightning_shard.plugin.optimizers.finetuning import add_unfrozen_groups, finetuning_callbacks, whole_groups
from lightning_shard.plugin.running.connected import ConnectedStrategy
from lightning_shard.plugin.running.failure import say
from lightning_shard.plugin.saving.averaging import by_stages
from lightning_shard.plugin.saving.beside_tensors import describe
from lightning_shard.plugin.saving.checkpoint_io import WEIGHTS_ALONE, ShardedCheckpointIO, Site, sharded
from lightning_shard.plugin.saving.drift import Drift, copies_of_stages, on_several_stages
from lightning_shard.plugin.saving.frozen import Frozen
from lightning_shard.plugin.saving.own_loading import (
    as_lazy,
    as_stored,
    edits_checkpoints,
    load_module,
    loads_itself,
    replace_lazy,
)
from lightning_shard.plugin.saving.uploads import upload_folders
from lightning_shard.plugin.steps.checks.agreement import check_copies
from lightning_shard.plugin.steps.checks.stage_parameters import by_parts
from lightning_shard.plugin.steps.first_step import FirstStepChecks

_LOADED_BY_NAME = {"state_dict", "current_model_state", "optimizer_states", "optimizer_tensors"}
"""The second is the module's state where the first is an average."""


UNTIL_SETUP: Any = None
"""The value of attributes that a run's setup makes."""


class CheckpointedStrategy(ConnectedStrategy):
    """Saves this rank's part of the state under the module's own names, and restores it on any layout.

    Subclasses set what is saved: the assembly, and the names of the parameters that optimizers hold.
    """

    # not after all of it: setup restores when the module is laid out, before there are optimizers
    restore_checkpoint_after_setup = False
    lightning_restore_optimizer = True

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._assembly: Assembly = UNTIL_SETUP
        self._first_checks: FirstStepChecks = UNTIL_SETUP
        self._names: dict[int, str] = {}
        """``id(parameter)`` to name, of this rank's parameters, which are those that its optimizers hold."""
        self._given: list[dict[str, int]] = []
        """For each optimizer, the positions of all stages' parameters when it was made."""
        self._generators: dict[str, Tensor] | None = None
        """This rank's generator states, loaded and not restored yet."""
        self._loaded_from = ""
        """The path of the checkpoint that was loaded last."""
        self._gave_lazy = False
        """Whether hooks were given lazy tensors of a checkpoint."""
        self._left_out: Frozen | None = None
        self._apart: Mapping[str, Tensor] = {}
        """What all stages hold and code has changed to different values, as found by the last save."""
        self._restore: lightning_private.PostponedRestoring = UNTIL_SETUP

    def setup_environment(self) -> None:
        super().setup_environment()
        self._restore = lightning_private.PostponedRestoring(self._module.trainer)

    @property
    def checkpoint_io(self) -> ShardedCheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ShardedCheckpointIO()
        assert isinstance(self._checkpoint_io, ShardedCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = sharded(io)

    def _report(self, exception: BaseException) -> None:
        # before the failure is reported, which stops the other ranks: a save in the background needs them
        try:
            self.checkpoint_io.drain()
        except Exception as error:
            exception.add_note(f"The save that was under way failed too: {error}")
        super()._report(exception)

    def teardown(self) -> None:
        try:
            self.checkpoint_io.teardown()
        finally:
            super().teardown()

    @by_parts
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part of the state dict: DTensors for what is sharded, under the module's own names."""
        self._agree_to_save()  # here: a save calls this first
        self._apart = self._join_copies(tolerates=True)
        state = self._module.state_dict()
        others = self._saved_by_other_stages()
        return {name: value for name, value in state.items() if name not in others}

    def _agree_to_save(self) -> None:
        """Before a save by ranks that handle an exception. They may all come; no collective may be called before.

        Raises:
            CheckpointError: On all ranks that save: some rank doesn't, or is at another step.
        """
        trainer = self._module.trainer
        if self._watch is None or trainer.state.status != TrainerStatus.INTERRUPTED:
            return
        failing = sys.exc_info()[1]
        if failing is not None:
            self._report(failing)
        if failing is not None and self._assembly is None:
            say("Nothing was saved on this exception: the run had not begun.")
            self.on_exception(failing)
            raise failing
        batches = lightning_private.batches_started(trainer)
        if why := self._watch.agree_to_save(f"in batch {batches}, after step {trainer.global_step}"):
            saved = [getattr(each, "_last_checkpoint_saved", "") for each in trainer.checkpoint_callbacks]
            last = next(filter(None, saved), "")
            raise CheckpointError(
                f"Nothing was saved on this exception: {why}."
                + (f" The run's last checkpoint is {last}." if last else "")
            )

    @by_parts
    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return named_optimizer_state(optimizer, self._names, self._saved_by_other_stages())

    @record_function("save")
    @by_parts
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        shapes = {name: tuple(p.shape) for name, p in self._module.named_parameters(remove_duplicate=False)}
        states: dict[str, Any] = {}
        if finetuning_callbacks(self._module.trainer) and "optimizer_states" in checkpoint:
            whole_groups(checkpoint, self._module.trainer, self._parameter_groups())
        if self.layout.pipeline_parallel_size > 1:
            checkpoint = by_stages(checkpoint, shapes, self.groups, self.device_mesh[self.layout.stage_axes])
        checkpoint = set_aside(checkpoint)
        own: dict[str, Any] = {**checkpoint.get(OWN, {}), "seed": self._seed}
        if self.checkpoint_io.exclude_frozen:
            states["state_dict"], own["excluded"] = self._frozen().leave_out(checkpoint["state_dict"])
        if self.is_global_zero:  # whose state is saved
            states[TRANSFORMERS_KEY] = describe(self._module, getattr(self._module.trainer, "datamodule", None))
        with self._saving():
            self.checkpoint_io.save_checkpoint(
                {**checkpoint, **states, OWN: own},
                self.broadcast(filepath),
                storage_options=storage_options,
            )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._loaded_from = as_path(self.broadcast(checkpoint_path))
        loaded = self.checkpoint_io.open_checkpoint(self._loaded_from, together=True)
        module = self._module
        if module.trainer.state.fn == TrainerFn.FITTING:  # an evaluation isn't resumed
            self._seed = loaded.get(OWN, {}).get("seed", self._seed)
        self._generators = loaded.pop(RANK_STATE, None)
        own = module.state_dict(keep_vars=True)
        elsewhere = set(self._names_of_other_stages()) - own.keys()
        if compiled := as_compiled(loaded["state_dict"], elsewhere | own.keys()):
            of_optimizers = {key: loaded[key] for key in loaded.keys() & {"optimizer_states", "optimizer_tensors"}}
            loaded = renamed_keys(loaded, compiled) | of_optimizers
        live = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        self._gave_lazy = edits_checkpoints(module)
        others = {name: loaded[name] for name in loaded.keys() - _LOADED_BY_NAME}

        def pairs() -> list[Pair]:
            laid_out, found = lay_out(others, live, elsewhere)
            loaded.update(laid_out)
            return found

        load_together(pairs)
        # then the other state is an average, of frozen parameters too
        if isinstance(loaded.get("current_model_state"), Mapping):
            _complete_average(loaded)
            loaded["current_model_state"] = as_lazy(loaded["current_model_state"])
        reopen_epoch(loaded.get("loops", {}).get("fit_loop", {}))
        put_back(loaded)
        if self._gave_lazy:
            loaded["state_dict"] = as_lazy(loaded["state_dict"])
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        replace_lazy(self._module)
        reshard(self._module)
        stages = self._assembly.stages if self._assembly else None
        names = self._names_of_other_stages()
        stored = as_stored(checkpoint["state_dict"])
        prefix = prefix_of(stored, {*names, *self._module.state_dict()})
        stored = {prefix + name: value for name, value in stored.items()}
        excluded = excluded_of(checkpoint, stored)
        if excluded is not None:
            stored = self._frozen().complete(stored, excluded)
        missing, _ = load_module(
            self._module,
            stored,
            names,
            strict=strict,
            also=stages.foreign_buffers if stages else (),
            left_out=excluded["tensors"] if excluded is not None else (),
            by_own_code=any(self.groups.gather_over_stages(loads_itself(self._module))),
        )
        if excluded is not None:
            self._frozen().check(excluded)
        elif checkpoint.get(WEIGHTS_ALONE) and self.checkpoint_io.exclude_frozen:
            own = self._module.state_dict()
            as_stored_there = {
                name
                for name, value in stored.items()
                if isinstance(value, StoredTensor) and name in own and value.dtype == own[name].dtype
            }
            self._frozen().begin_with(self._loaded_from, without={*missing, *(own.keys() - as_stored_there)})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        tensors, states = checkpoint["optimizer_tensors"], checkpoint["optimizer_states"]
        if not states:  # e.g. saved by a Trainer that only evaluated, or dropped by on_load_checkpoint
            if not checkpoint.get(WEIGHTS_ALONE):
                rank_zero_warn(
                    "The checkpoint has no optimizer state: optimizers start from scratch, as in plain Lightning."
                )
            return
        # where a run is restored after its setup, as by the learning rate finder
        add_unfrozen_groups(self._module.trainer, self._module, self.optimizers)
        if len(states) != len(self.optimizers):
            raise StateMismatchError(
                f"The checkpoint has the states of {len(states)} optimizers, but configure_optimizers returned"
                f" {len(self.optimizers)}: return the same optimizers as in the run that saved."
            )
        states = [described(index, state) for index, state in enumerate(states)]
        places = self._assembly.places
        listed = [name for names in listed_in(state for state in states if not state.get("numbered")) for name in names]
        prefix = prefix_of(listed, set(places)) if checkpoint.get(WEIGHTS_ALONE) else ""
        if prefix or (compiled := as_compiled(listed, places)):
            rename = {"": prefix} if prefix else {name: compiled.get(name, name) for name in listed}.get
            tensors, states = renamed(tensors, states, None, rename)
        everywhere = self._parameter_groups()
        tensors, states = name_numbered(tensors, states, everywhere)
        asked = {asked_as(i, name) for i, groups in enumerate(everywhere) for group in groups for name in group}
        plans: list[Plan] = []

        def pairs() -> list[Pair]:
            plans.extend(plan_optimizers(self.optimizers, self._names, tensors, states, asked))
            return [pair for plan in plans for pair in plan.pairs]

        load_together(pairs, cast=True)  # to what each plan's tensors are
        for plan in plans:
            plan.finish()

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def _join_copies(self, *, tolerates: bool = False) -> Mapping[str, Tensor]:
        """Join copies on several stages; returns what can't be joined, if it tolerates that. Collective over them."""
        apart = {} if self._first_checks is None else self._first_checks.join_copies(tolerates=tolerates)
        for text in apart.values():
            rank_zero_warn(f"{text} Until then, the last stage's copy is saved.")
        state = self._module.state_dict() if apart else {}
        return {name: state[name] for name in apart}

    def _check_saved(self) -> None:
        """After the first step: refuse optimizers whose state no save could hold. A collective call over all ranks."""
        if self.layout.world_size > 1:
            names = self._names if self._module.trainer.checkpoint_callbacks else {}
            check_copies(self._tied(), self.optimizers, names, self.layout, self.groups.host)

    def _tied(self) -> dict[str, nn.Parameter]:
        """This stage's parameters that other stages hold too."""
        ties = self._assembly.ties if self._assembly is not None else ()
        return on_several_stages(self._module, ties)

    def _copies(self) -> dict[str, Tensor]:
        """The tensors of this stage that other stages hold too, but for copies that were joined."""
        return copies_of_stages(self._tied(), self._apart, self.optimizers)

    def _saved_by_other_stages(self) -> Collection[str]:
        """State-dict names that this rank holds too, but another one saves."""
        return () if self._assembly is None else self._assembly.saved_elsewhere

    def _frozen(self) -> Frozen:
        """The module's frozen parameters; the first call records their initial values."""
        if self._left_out is None:
            io = self.checkpoint_io
            mesh = self.device_mesh[self.layout.stage_axes]
            self._left_out = Frozen(self._module, mesh, io.base, io.storage_options)
        return self._left_out

    def _parameter_groups(self) -> list[list[list[str]]]:
        """Names of all stages' parameters, by optimizer and group, in the order of ``configure_optimizers``."""
        own: list[dict[str, Any]] = []
        others = self._saved_by_other_stages()
        for optimizer in self.optimizers:
            named = [[self._names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            groups = [{"params": [name for name in names if name not in others]} for names in named]
            own.append({"values": {}, "param_groups": groups})
        merged = merge_stages(self.groups.gather_over_stages(own), self._order_in_optimizer)
        return [[group["params"] for group in optimizer["param_groups"]] for optimizer in merged]

    def _order_in_optimizer(self, index: int) -> Mapping[str, int]:
        """All stages' parameters, as ``configure_optimizers`` gave them to it, and behind them those added later."""
        given = self._given[index] if index < len(self._given) else {}
        return {name: len(given) + place for name, place in self._assembly.places.items()} | given

    def _names_of_other_stages(self) -> list[str]:
        own = list(self._module.state_dict())
        return [name for names in self.groups.gather_over_stages(own) for name in names]

    def _connect_checkpoint_io(self, trainer: pl.Trainer) -> None:
        mesh = self.device_mesh[self.layout.stage_axes]
        self.checkpoint_io.connect(
            Site(
                mesh=mesh,
                layout=self.layout,
                device=self.root_device,
                groups=self.groups,
                order_of=self._order_in_optimizer,
                timeout=self._timeout,
                drift=Drift(self._module, self.layout, mesh, self.groups.host, self._copies),
            ),
            fitting=trainer.state.fn == TrainerFn.FITTING,
        )
        if trainer.state.fn == TrainerFn.FITTING:
            upload_folders(trainer, self.checkpoint_io)
        self._left_out = None
        if self.checkpoint_io.exclude_frozen:
            self._frozen()


def _complete_average(loaded: dict[str, Any]) -> None:
    """Give the average of a module's state the frozen parameters that were left out of it, from the module's own."""
    average, module = loaded["state_dict"], loaded["current_model_state"]
    if (excluded := excluded_of(loaded, average)) is not None:
        names = (name for name in excluded["tensors"] if name in module)  # others are other stages'
        loaded["state_dict"] = {name: module[name] for name in names} | dict(average)
        loaded[OWN] = {key: each for key, each in loaded[OWN].items() if key != "excluded"}
