"""The strategy's base class for ranks: connects them, reduces over them, and ends all of them if one fails."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_shard import lightning_private
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.plugin.data.loader import drop_repeated
from lightning_shard.plugin.running.failure import printing_failed_saves
from lightning_shard.plugin.running.laid_out import LaidOut
from lightning_shard.plugin.running.launchers import ForkedRanks, check_number_of_ranks, launcher_of
from lightning_shard.plugin.running.preemption import Preemption
from lightning_shard.plugin.steps.redirect import note_sharded, sharded_refusal


class ConnectedStrategy(LaidOut, ModelParallelStrategy):
    """Sets up a layout's mesh, process groups and seed, and watches for failures."""

    _known_after = "a Trainer was made with this strategy"

    def __init__(self, given: Mapping[str, Any]) -> None:
        names = ("data_parallel_size", "tensor_parallel_size", "process_group_backend", "timeout")
        super().__init__(**{name: given[name] for name in names})
        self._take(given)
        self._printing_failed_saves = ExitStack()
        self._preemption = Preemption()
        lightning_private.choose_precision_by(self)

    @property
    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def check_precision(self, precision: Any, accelerator: Any) -> None:
        """Refuse precisions that aren't supported, when a Trainer is made with this strategy."""
        lightning_private.refuse_precision(precision)
        if precision == "16-mixed" and accelerator == "cpu":
            raise ConfigurationError(
                "precision='16-mixed' isn't done on the CPU (Lightning would use bf16-mixed instead): use"
                " precision='bf16-mixed'."
            )

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
        ParallelStrategy.setup_environment(self)
        # Lightning's own loaders cause it, on each rank
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", module=r"lightning\.")
        self.set_world_ranks()
        self._connect()
        self._make_groups()
        self._module._device_mesh = self._device_mesh
        trainer = self._module.trainer
        self._preemption.take_over(trainer)
        lightning_private.run_within(trainer, self._ending_as_it_should)
        lightning_private.drop_predictions(trainer, drop_repeated)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        value = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(value)

    def on_exception(self, exception: BaseException) -> None:
        self._report(exception)
        self._printing_failed_saves.close()
        if self._watch is None:
            return
        failure = self._watch.failure_elsewhere(exception)
        if failure is not None:  # Lightning raises the exception that it has, so its message is replaced
            exception.args = (f"{failure}\n{exception}",)
        self._watch.leave(self.global_rank - self.local_rank)

    def _report(self, exception: BaseException) -> None:
        """Report the failure to the other ranks, which then stop."""
        note_sharded(exception)
        if self._watch is not None:
            self._watch.report(exception)

    @contextmanager
    def _ending_as_it_should(self) -> Iterator[None]:
        """Raise on all ranks what ended the run; hooks may save on the exception if all ranks agree."""
        watch = self._watch
        with watch.interrupts.caught() if watch else nullcontext():
            try:
                with self._preemption.stopping():
                    yield
            except BaseException as error:
                raised = (sharded_refusal(error) if isinstance(error, Exception) else None) or error
                if watch is not None:
                    watch.fails()
                    self._report(raised)
                    raised = watch.failure_elsewhere(raised) or raised
                    printing = printing_failed_saves(self._module.trainer, watch.say_once)
                    self._printing_failed_saves.enter_context(printing)
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
