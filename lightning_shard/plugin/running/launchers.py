"""How a Trainer's ranks start: by running the script again, or, where there is no script, as forks.

A notebook, ``python -c`` and ``python - < script`` have no file that another process could run, so ranks are forks of
the process that calls ``fit``. They end with the call. What it left, the weights and the logged metrics, is brought
back to the first process, as ``strategy="ddp_notebook"`` does it.

A forked process can't compute with several threads on the CPU if the process that it was forked from has: its pool of
threads is gone, and it would wait for it for ever (libgomp). So forked ranks compute with one thread each.

All ranks of a run compute with as many threads: results of the same operation differ by rounding between 1 and 2, so
replicas of a weight would drift apart. Lightning's launcher sets the number on rank 0 only, and torchrun sets it to 1.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.multiprocessing import _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn

import __main__
from lightning_shard import checkpoint as ckpt
from lightning_shard import processors
from lightning_shard.errors import ConfigurationError, LayoutError
from lightning_shard.parallel.rank_compare import everyones
from lightning_shard.processors import Available

_OMP = "OMP_NUM_THREADS"
_VARIABLES = (_OMP, "MKL_NUM_THREADS")


class ComputingSettings:
    """This process's number of threads. Made before processes are launched: Lightning's launcher sets it on rank 0."""

    def __init__(self) -> None:
        self._before = torch.get_num_threads()
        self._is_in_environment = any(name in os.environ for name in _VARIABLES)
        self._chosen: int | None = None
        """The number of threads that the user has set, as the run began."""
        self._is_running = False

    def agree(self, group: dist.ProcessGroup) -> None:
        """Set the number of threads alike on all ranks; a collective call over them, host to host.

        Each rank gets its share of the machine's processors, rounded down; the smallest share counts. A number that
        users have set stays, and is also set on ranks on which none is set.
        """
        if not self._is_running:  # else a run within a run, such as the learning rate finder's
            self._chosen, self._is_running = self._chosen_now(), True
        available, chosen = zip(*everyones((Available.here(), self._chosen), group))
        number = processors.shares(available)
        processors.agree_on(number)
        torch.set_num_threads(number_of_threads(chosen, number)[dist.get_rank(group)])
        if not self._is_in_environment:
            os.environ.pop(_OMP, None)  # Lightning's launcher has set it, on one rank

    def _chosen_now(self) -> int | None:
        """The number of threads that the user has set; None if there is none."""
        number = torch.get_num_threads()
        if not self._is_in_environment and os.environ.get(_OMP) == str(number):
            number = self._before  # Lightning's launcher has set this one
        is_chosen = self._is_in_environment or number not in processors.threads_by_default()
        return number if is_chosen else None

    def restore(self) -> None:
        """Set what was set before the run."""
        if self._is_running:
            torch.set_num_threads(self._before if self._chosen is None else self._chosen)
            processors.agree_on(None)
            self._is_running = False


def number_of_threads(chosen: Sequence[int | None], share: int) -> list[int]:
    """Each rank's number of threads: what is chosen there, or the one number that is chosen anywhere, or the share."""
    choices = {number for number in chosen if number is not None}
    default = choices.pop() if len(choices) == 1 else share
    return [default if number is None else number for number in chosen]


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


def launcher_of(strategy: Any, by_script: Callable[..., Any], forked: Callable[[Any], Any]) -> Any:
    """The launcher, of the two classes; None if something else has started the ranks, or one rank has no script."""
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


class Forked:
    """What Lightning's launchers have in addition where ranks are forks: each computes with one thread."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, start_method="fork")  # type: ignore[call-arg]
        self._strategy = strategy

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        os.environ[_OMP] = "1"
        torch.set_num_threads(1)
        self._strategy._computing = ComputingSettings()
        super()._wrapping_function(*args, **kwargs)  # type: ignore[misc]


class ForkedRanks(Forked, _MultiProcessingLauncher):
    """The ranks of a Trainer's fit or evaluation, as forks of this process."""

    def _collect_rank_zero_results(self, trainer: pl.Trainer, results: Any) -> _WorkerOutput | None:
        strategy, path = self._strategy, None
        if trainer.state.fn == TrainerFn.FITTING:
            path = strategy.broadcast(tempfile.mkdtemp())
            mesh = strategy.device_mesh[strategy.layout.stage_axes]
            ckpt.save(strategy.lightning_module_state_dict(), path, mesh=mesh, group=strategy.groups.host, fsync=False)
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
