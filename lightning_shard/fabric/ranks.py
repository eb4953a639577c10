"""The base class of Fabric's strategy for ranks: starts and connects them, and ends all of them if one fails in a call.

A loop of Fabric's has no end that a strategy is told of: what lasts as long as the ranks do ends with the process.
"""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies import ModelParallelStrategy, ParallelStrategy
from lightning.fabric.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_shard.layout import Layout
from lightning_shard.plugin.running.failure import FailureWatch
from lightning_shard.plugin.running.laid_out import LaidOut
from lightning_shard.plugin.running.launchers import Forked, check_number_of_ranks, launcher_of


class FabricRanks(LaidOut, ModelParallelStrategy):
    """The ranks of a layout, for Fabric."""

    _known_after = "fabric.launch() was called"

    def _configure_launcher(self) -> None:
        self._launcher = launcher_of(self, _SubprocessScriptLauncher, _ForkedRanks)

    def _set_world_ranks(self) -> None:
        super()._set_world_ranks()
        check_number_of_ranks(self, "Fabric")

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", module=r"lightning\.")
        self._set_world_ranks()
        self._layout = Layout.resolve(self.world_size, self.global_rank, **self._sizes)
        self._connect()
        self._make_groups()  # ranks that read the same batch must also draw the same numbers

    def _begin_watch(self) -> None:
        before = self._watch
        super()._begin_watch()
        if self._watch is not None and self._watch is not before:
            self._watch.is_in_run = False
            atexit.register(self._watch.stop)

    @contextmanager
    def _ending_together(self) -> Iterator[None]:
        """Inside, which is a collective call, a failure on this rank ends the ranks that wait for it.

        Raises:
            RankFailure: Another rank failed first; it names that rank and its error.
        """
        if self.world_size == 1:
            yield
            return
        self._begin_watch()
        watch = self._watch
        assert isinstance(watch, FailureWatch)
        watch.is_in_run = True
        try:
            yield
        except BaseException as error:
            watch.report(error)
            failure = watch.failure_elsewhere(error)
            watch.leave(self.global_rank - self.local_rank)
            if failure is None:
                raise
            raise failure from error
        finally:
            watch.is_in_run = False

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduce(tensor, group, reduce_op)


class _ForkedRanks(Forked, _MultiProcessingLauncher):
    """The ranks of a function that ``fabric.launch`` gets, as forks of this process."""
