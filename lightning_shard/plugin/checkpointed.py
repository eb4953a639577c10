"""The half of the strategy that saves and restores: state by name, to and from a :class:`ShardedCheckpointIO`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch import Tensor

from lightning_shard.checkpoint import Pair, load_together
from lightning_shard.checkpoint.foreign.lightning_ckpt import TRANSFORMERS_KEY
from lightning_shard.errors import ConfigurationError, StateMismatchError
from lightning_shard.layout import Layout
from lightning_shard.parallel.data import reshard
from lightning_shard.plugin.agreement import check_replicas, same_on_data_ranks
from lightning_shard.plugin.assemble import Assembly
from lightning_shard.plugin.averaging import drop_replaced_schedulers
from lightning_shard.plugin.checkpoint_io import ShardedCheckpointIO, Site
from lightning_shard.plugin.groups import Groups
from lightning_shard.plugin.other_files import WEIGHTS_ALONE, name_numbered, with_prefix
from lightning_shard.plugin.pretrained import describe
from lightning_shard.plugin.sharded_values import lay_out
from lightning_shard.plugin.state import (
    load_module,
    load_optimizer,
    merge_stages,
    named_optimizer_state,
)

_LOADED_BY_NAME = {"state_dict", "optimizer_states", "optimizer_tensors"}


class CheckpointedStrategy(ModelParallelStrategy):
    """Saves this rank's part of the state under the module's own names, and restores it on any layout.

    The other half, which lays the module out, fills in what is declared here.
    """

    _layout: Layout | None = None
    _groups: Groups | None = None
    _assembly: Assembly | None = None
    _seed: int = 0
    _generators: dict[str, Tensor] | None = None
    """Of this rank, loaded and not yet put to use."""
    _names: dict[int, str]
    """``id(parameter)`` to name, of this rank's parameters."""

    @property
    def layout(self) -> Layout:
        """The sizes of the axes and this rank's place in them; known once the Trainer is made."""
        if self._layout is None:
            raise RuntimeError("The layout is known once a Trainer was made with this strategy.")
        return self._layout

    @property
    def groups(self) -> Groups:
        assert self._groups is not None
        return self._groups

    @property
    def checkpoint_io(self) -> ShardedCheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = ShardedCheckpointIO()
        assert isinstance(self._checkpoint_io, ShardedCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, ShardedCheckpointIO):
            raise ConfigurationError(
                f"checkpoint_io ({type(io).__name__}) must be a lightning_shard.ShardedCheckpointIO: sharded state is"
                " written by every rank."
            )
        self._checkpoint_io = io

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """This rank's part: DTensors for what is sharded, under the module's own names."""
        assert self.lightning_module is not None
        failing = sys.exc_info()[1]
        if isinstance(failing, Exception) and self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED:
            # A callback that saves on an exception, before the strategy is told: the other ranks won't come to this
            # save.
            self.on_exception(failing)
        state = self.lightning_module.state_dict()
        if self.layout.pipeline_rank == 0 or self._assembly is None:
            return state
        return {name: value for name, value in state.items() if name not in self._assembly.shared_names}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return named_optimizer_state(optimizer, self._names)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        assert self.lightning_module is not None
        check_replicas(checkpoint.get("optimizer_states", ()))
        parameters = {name for name, _ in self.lightning_module.named_parameters(remove_duplicate=False)}
        states: dict[str, Any] = {
            key: same_on_data_ranks(checkpoint[key], parameters, self.groups.data)
            for key in ("state_dict", "current_model_state")  # the second is the first's where that is an average
            if key in checkpoint
        }
        if self.is_global_zero:  # whose state is the one that is saved
            states[TRANSFORMERS_KEY] = describe(
                self.lightning_module, getattr(self.lightning_module.trainer, "datamodule", None)
            )
        self.checkpoint_io.save_checkpoint(
            {**checkpoint, **states, "lightning_shard": {"seed": self._seed}},
            self.broadcast(filepath),
            storage_options=storage_options,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        loaded = self.checkpoint_io.open_checkpoint(self.broadcast(checkpoint_path), together=True)
        self._seed = loaded.get("lightning_shard", {}).get("seed", self._seed)
        self._generators = loaded.pop("rank_state", None)
        module = self.lightning_module
        assert module is not None
        own = module.state_dict(keep_vars=True)
        elsewhere = set(self._names_of_other_stages()) - own.keys()
        live = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        others = {name: loaded[name] for name in loaded.keys() - _LOADED_BY_NAME}

        def pairs() -> list[Pair]:
            laid_out, found = lay_out(others, live, elsewhere)
            loaded.update(laid_out)
            return found

        load_together(pairs)
        return loaded

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        reshard(self.lightning_module)
        stage = self._assembly.stage if self._assembly else None
        names = self._names_of_other_stages()
        load_module(
            self.lightning_module,
            with_prefix(checkpoint["state_dict"], {*names, *self.lightning_module.state_dict()}),
            names,
            strict=strict,
            also=stage.foreign_buffers if stage else (),
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if checkpoint.get(WEIGHTS_ALONE):
            return
        tensors, states = checkpoint["optimizer_tensors"], checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise StateMismatchError(
                f"The checkpoint has the states of {len(states)} optimizers, and configure_optimizers made"
                f" {len(self.optimizers)}: make the same ones."
            )
        if any("numbered" in state for state in states):
            tensors, states = name_numbered(tensors, states, self._parameter_groups())
        for index, optimizer in enumerate(self.optimizers):
            load_optimizer(optimizer, index, self._names, tensors, states[index])
        assert self.lightning_module is not None
        drop_replaced_schedulers(self.lightning_module.trainer)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self.checkpoint_io.remove_checkpoint(filepath)

    def _parameter_groups(self) -> list[list[list[str]]]:
        """Names of all stages' parameters, by optimizer and group, in the order of ``configure_optimizers``."""
        own = [
            {"values": {}, "shared": {}, "param_groups": named_optimizer_state(optimizer, self._names)["param_groups"]}
            for optimizer in self.optimizers
        ]
        assert self._assembly is not None
        merged = merge_stages(self.groups.gather_over_stages(own), self._assembly.places)
        return [[group["params"] for group in optimizer["param_groups"]] for optimizer in merged]

    def _names_of_other_stages(self) -> list[str]:
        assert self.lightning_module is not None
        own = list(self.lightning_module.state_dict())
        return [name for names in self.groups.gather_over_stages(own) for name in names]

    def _connect_checkpoint_io(self, trainer: pl.Trainer) -> None:
        assert self._assembly is not None
        self.checkpoint_io.connect(
            Site(
                mesh=self.device_mesh[self.layout.stage_axes],
                layout=self.layout,
                device=self.root_device,
                gather_over_stages=self.groups.gather_over_stages,
                places=self._assembly.places,
                timeout=self._timeout,
            ),
            fitting=trainer.state.fn == TrainerFn.FITTING,
        )
