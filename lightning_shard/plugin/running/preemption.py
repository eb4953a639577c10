"""A machine that is about to be taken away: all ranks save one checkpoint together, after the same step.

SIGTERM is what spot machines, Kubernetes, torchrun's agent and SLURM send before they kill; SLURM can be told to send
SIGUSR1 (Lightning's ``requeue_signal``) some time before. It may reach some of the ranks only, each at another moment.

Lightning 2.6 acts at once, in the signal's handler, on the ranks that it reached: it broadcasts there, or saves there,
in the middle of a step or of another save, where the other ranks are somewhere else. Here a handler notes the signal,
no more. After each optimizer step the ranks ask each other whether one has been noted, instead of Lightning's own
broadcast at each batch. So a save that is under way ends first, all ranks save the same step, and all stop.

In the same exchange they ask for ``trainer.should_stop``. What sets it may run on one rank only: a step, of which the
last stage alone sees the loss, or a callback that looks at a rank's own numbers. The others would wait for it for ever.
And whether data ranks had gradients of the same parameters.

Private parts of Lightning 2.6 replaced or used: ``trainer._signal_connector`` with its ``_sigterm_notifier_fn``,
``_slurm_sigusr_handler_fn`` and ``received_sigterm``; ``epoch_loop._broadcast_sigterm_tensor``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.plugin import trainer_private
from lightning_shard.plugin.steps.checks.agreement import SameGradients, SameSettings

__all__ = ["AgreedSIGTERM", "Preemption"]


class AgreedSIGTERM(SIGTERMException):
    """Ends the fit on all ranks after the same step, when they have saved: none need be told that another stops."""


class Preemption(callbacks.Callback):
    """The strategy's own callback, behind all others: what was noted is acted upon when they have done their part."""

    def __init__(self) -> None:
        self._sigterm = False
        self._requeue = False
        self._stop = False
        self._agreed = False

    def take_over(self, trainer: pl.Trainer) -> None:
        """Replace what Lightning would do, before it registers its handlers; once for each fit or evaluation."""
        self._sigterm = self._requeue = self._stop = self._agreed = False
        connector: Any = trainer._signal_connector

        def note_sigterm(*_: Any) -> None:
            self._sigterm = True
            if trainer.state.fn != TrainerFn.FITTING:
                # Nothing to save. The loop ends between two batches; the other ranks are told as of any failure.
                connector.received_sigterm = True

        def note_requeue(*_: Any) -> None:
            self._requeue = True

        connector._sigterm_notifier_fn = note_sigterm
        connector._slurm_sigusr_handler_fn = note_requeue
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        trainer.callbacks[:] = [*(known for known in trainer.callbacks if known is not self), self]  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop |= trainer.should_stop
        if trainer_private.is_accumulating(trainer):
            trainer.should_stop = False  # until the others hear of it; and gradients aren't saved
            return
        layout = trainer.strategy.layout  # type: ignore[attr-defined]
        asked: list[SameGradients | SameSettings] = []
        if layout.stage_size > 1:  # else nobody else has any of this stage's
            asked = [SameGradients(trainer.lightning_module, layout), SameSettings(trainer.optimizers, layout)]
        sigterm, requeue, *heard = self._exchange(trainer, *chain.from_iterable(each.said for each in asked))
        for each in asked:
            each.check(heard[: len(each.said)])
            del heard[: len(each.said)]
        if sigterm or requeue:
            self._act(trainer, sigterm, requeue)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop |= trainer.should_stop
        if trainer.state.fn == TrainerFn.FITTING:
            self._exchange(trainer)

    def _exchange(self, trainer: pl.Trainer, *more: bool) -> list[bool]:
        """Whether SIGTERM, the requeue signal, and what more is asked, are so on any rank; a collective call of all."""
        ranks = Ranks.of(trainer.strategy.groups.host)  # type: ignore[attr-defined]
        trainer.should_stop, *heard = ranks.any(self._stop, self._sigterm, self._requeue, *more)
        self._stop = False
        return heard

    def _act(self, trainer: pl.Trainer, sigterm: bool, requeue: bool) -> None:
        self._requeue = False
        from lightning_shard.plugin.saving.model_checkpoint import save_as_last, save_for_requeue  # see strategy.py

        saved = save_for_requeue(trainer) if requeue else save_as_last(trainer)
        trainer.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]
        names = " and ".join(name for name, sent in (("SIGTERM", sigterm), ("the requeue signal", requeue)) if sent)
        if saved is None:
            rank_zero_warn(
                f"{names} came, and nothing is saved: there is no ModelCheckpoint that saves the whole state."
            )
        else:
            rank_zero_info(f"{names} came: step {trainer.global_step} is saved at {saved}.")
        if requeue and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
            _requeue_job()
        # Lightning's loops look at this when the step has ended, with all its hooks and logs
        trainer._signal_connector.received_sigterm = self._agreed = sigterm

    @contextmanager
    def stopping(self, trainer: pl.Trainer) -> Iterator[None]:
        """What the loops raise then becomes an error that says what it is, with the exit code of a process so ended."""
        try:
            yield
        except SIGTERMException:
            if not self._agreed:
                raise
            raise AgreedSIGTERM(_exit_code(trainer)) from None


def _exit_code(trainer: pl.Trainer) -> int:
    """As of a process that SIGTERM has ended, so that nobody takes the job for done."""
    environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
    if isinstance(environment, LightningEnvironment) and environment.local_rank() > 0:
        return 0  # Lightning's launcher kills its own process when one that it has started fails
    return 128 + signal.SIGTERM


def _requeue_job() -> None:
    job = os.environ["SLURM_JOB_ID"]
    if array := os.environ.get("SLURM_ARRAY_JOB_ID"):
        job = f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
        problem = done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        rank_zero_warn(f"The job {job} was not requeued, training goes on: scontrol requeue: {problem}")
    else:
        rank_zero_info(f"The job {job} is requeued.")
