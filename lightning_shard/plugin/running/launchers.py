"""Chooses how a Trainer's ranks start: by running the script again, or, where there is no script, as forks.

A notebook, ``python -c`` and ``python - < script`` have no file that another process could run, so ranks are forks of
the process that calls ``fit``. They end with the call. What it left, the weights and the logged metrics, is brought
back to the first process, as ``strategy="ddp_notebook"`` does it.

A forked process can't compute with several threads on the CPU if the process that it was forked from has: its pool of
threads is gone, and it would wait for it for ever (libgomp). So forked ranks compute with one thread each.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn

import __main__
from lightning_shard import checkpoint as ckpt
from lightning_shard.errors import ConfigurationError, LayoutError
from lightning_shard.plugin.running.environment import ComputingSettings

if TYPE_CHECKING:
    from lightning_shard.plugin.saving.checkpointed import CheckpointedStrategy


_STARTED_BY = {
    "TorchElastic": "torchrun's --nproc-per-node × --nnodes, WORLD_SIZE",
    "SLURM": "--ntasks-per-node × --nodes, SLURM_NTASKS",
}
"""What sets the number of ranks, by Lightning's name of the environment."""


def check_number_of_ranks(strategy: Any, maker: str) -> None:
    """Compare the number of ranks that a script asks for with that of whatever has started them (torchrun, SLURM, …).

    Lightning takes the latter, and never looks at ``devices`` then.

    Args:
        strategy: Of a Trainer or a Fabric, once it knows its environment.
        maker: The name of the class that was given ``devices``.

    Raises:
        LayoutError: They differ.
    """
    devices, nodes, started = strategy.num_processes, strategy.num_nodes, strategy.world_size
    if started != devices * nodes:
        fits = f"devices={started // nodes}" if started % nodes == 0 else "devices and num_nodes of that product"
        launcher = type(strategy.cluster_environment).__name__.removesuffix("Environment")
        raise LayoutError(
            f"{maker}(devices={devices}, num_nodes={nodes}) has {devices * nodes} ranks, and {started} were started"
            f" ({_STARTED_BY.get(launcher, launcher)}): use {fits}, or start {devices} processes on each of {nodes}"
            f" machine{'s' * (nodes > 1)}."
        )


def has_script() -> bool:
    """Whether another process could run what this one does."""
    return not _IS_INTERACTIVE and (__main__.__spec__ is not None or os.path.isfile(sys.argv[0]))


def compute_alone(strategy: Any) -> None:
    """Have this process, a fork, compute with one thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    strategy._computing = ComputingSettings()


def launcher_of(strategy: Any, by_script: Callable[..., Any], forked: Callable[[Any], Any]) -> Any:
    """The launcher, of the two classes; None if something else has started the ranks, or one rank has no script.

    Raises:
        ConfigurationError: There is no script, and other machines would need one.
    """
    environment = strategy.cluster_environment
    assert environment is not None
    if environment.creates_processes_externally:
        return None
    ranks, machines = strategy.num_processes, strategy.num_nodes
    if has_script():
        return by_script(environment, ranks, machines)
    if machines > 1:
        raise ConfigurationError(
            f"num_nodes={machines} needs a script that each machine runs, and this process has none (a notebook,"
            " python -c, or a script from standard input): write it to a file."
        )
    return forked(strategy) if ranks > 1 else None


class ForkedRanks(_MultiProcessingLauncher):
    """The ranks of a Trainer's fit or evaluation, as forks of this process."""

    def __init__(self, strategy: CheckpointedStrategy) -> None:
        super().__init__(strategy, start_method="fork")
        self._strategy: CheckpointedStrategy = strategy

    def _wrapping_function(self, process_idx: int, *args: Any, **kwargs: Any) -> None:
        compute_alone(self._strategy)
        super()._wrapping_function(process_idx, *args, **kwargs)

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        strategy, path = self._strategy, None
        if trainer.state.fn == TrainerFn.FITTING:
            path = strategy.broadcast(tempfile.mkdtemp())
            mesh = strategy.device_mesh[strategy.layout.stage_axes]
            ckpt.save(strategy.own_state_dict(), path, mesh=mesh, group=strategy.groups.host, fsync=False)
        if strategy.global_rank != 0:
            return None
        best = getattr(trainer.checkpoint_callback, "best_model_path", None)
        return _WorkerOutput(best, path, trainer.state, results, self.get_extra_results(trainer))

    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: pl.Trainer) -> None:
        path = worker_output.weights_path
        super()._recover_results_in_main_process(worker_output._replace(weights_path=None), trainer)
        if path is not None:
            # not strict: parts may have been added or removed on the ranks
            trainer.lightning_module.load_state_dict(ckpt.load(path, group=None), strict=False)
            ckpt.remove(path)
