"""Handles preemption: when a machine is about to be taken away, all ranks save one checkpoint after the same step.

Spot machines, Kubernetes, torchrun's agent and SLURM send SIGTERM before they kill. SLURM can be told to send SIGUSR1
(Lightning's ``requeue_signal``) some time earlier. A signal may reach only some of the ranks, each at another moment.

Lightning 2.6 acts at once, within the signal's handler, on the ranks that it reached. Here the handler only sets a
flag, and the ranks exchange their flags after each optimizer step. So a running save finishes first, all ranks save the
same step, and all stop.

The same exchange covers Ctrl+C (``interrupts.py``), and ``trainer.should_stop``, which may be set on one rank only, as
by a step's loss on the last stage: the others would wait for that rank forever. Where the module's hooks, which run
after all callbacks, may set it, it is exchanged once more after these. The exchange also checks that data ranks had
gradients of the same parameters, and that their optimizers have equal settings.

Private in Lightning 2.6, replaced or used: ``trainer._signal_connector`` with its ``_sigterm_notifier_fn``,
``_slurm_sigusr_handler_fn`` and ``received_sigterm``; ``epoch_loop._broadcast_sigterm_tensor``.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shard import lightning_private
from lightning_shard.plugin.steps.checks.agreement import SameUpdate
from lightning_shard.plugin.steps.loop import is_overridden


class Preemption(callbacks.Callback):
    """The strategy's own callback. It comes after all others, and acts on the flags once they have run."""

    def __init__(self) -> None:
        self._sigterm = False
        self._requeue = False
        self._stop = False
        self._agreed = False
        self._validated = False  # since the last batch

    def take_over(self, trainer: pl.Trainer) -> None:
        """Replace Lightning's handlers before it registers them; once for each fit or evaluation."""
        self._sigterm = self._requeue = self._stop = self._agreed = False
        connector: Any = trainer._signal_connector

        def note_sigterm(*_: Any) -> None:
            self._sigterm = True
            if trainer.state.fn != TrainerFn.FITTING:
                # nothing to save: the loop ends between two batches, which is reported to other ranks like any failure
                connector.received_sigterm = True

        def note_requeue(*_: Any) -> None:
            self._requeue = True

        connector._sigterm_notifier_fn = note_sigterm
        connector._slurm_sigusr_handler_fn = note_requeue
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        trainer.callbacks[:] = [*(known for known in trainer.callbacks if known is not self), self]  # type: ignore[attr-defined]
        lightning_private.around_hooks_of_fit(
            trainer,
            partial(self._after_batch, trainer),
            partial(self._after_validation, trainer),
            partial(self._agree_to_stop, trainer, "on_train_epoch_end"),
        )

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._passes(trainer)
        self._stop |= trainer.should_stop
        if lightning_private.is_accumulating(trainer):
            trainer.should_stop = False  # until the exchange tells the others; accumulated gradients aren't saved
            return
        layout = trainer.strategy.layout  # type: ignore[attr-defined]
        same = SameUpdate(trainer.lightning_module, trainer.optimizers, layout) if layout.world_size > 1 else None
        sigterm, requeue, *largest = self._exchange(trainer, *(same.numbers if same is not None else ()))
        if same is not None:
            same.check(largest)
        if sigterm or requeue:
            self._act(trainer, bool(sigterm), bool(requeue))

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._passes(trainer)
        watch = trainer.strategy._watch  # type: ignore[attr-defined]
        if trainer.state.fn != TrainerFn.FITTING and watch is not None and watch.interrupts.asked_at is not None:
            raise KeyboardInterrupt  # nothing to save: others learn of it as of any failure

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _passes(self, trainer: pl.Trainer) -> None:
        if (watch := trainer.strategy._watch) is not None:  # type: ignore[attr-defined]
            watch.interrupts.passes()

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._stop |= trainer.should_stop
        if trainer.state.fn == TrainerFn.FITTING:
            self._exchange(trainer)
            self._validated = True

    def _after_batch(self, trainer: pl.Trainer) -> None:
        if not lightning_private.is_accumulating(trainer):
            self._agree_to_stop(trainer, "on_train_batch_end")
        else:
            self._stop |= trainer.should_stop
            trainer.should_stop = False

    def _after_validation(self, trainer: pl.Trainer) -> None:
        if self._validated:
            self._validated = False
            self._agree_to_stop(trainer, "on_validation_epoch_end", "on_validation_end")

    def _agree_to_stop(self, trainer: pl.Trainer, *hooks: str) -> None:
        """Exchange the stop flag, if the module has any of these hooks, which may have set it. Collective."""
        if any(is_overridden(trainer.lightning_module, hook, pl.LightningModule) for hook in hooks):
            self._stop |= trainer.should_stop
            (trainer.should_stop,) = trainer.strategy.groups.any(self._stop)  # type: ignore[attr-defined]
            self._stop = False

    def _exchange(self, trainer: pl.Trainer, *more: int) -> list[int]:
        """The largest of all ranks' flags of SIGTERM and requeue, and of ``more`` numbers. A collective call.

        Raises:
            KeyboardInterrupt: On all ranks, after Ctrl+C on some.
        """
        watch, groups = trainer.strategy._watch, trainer.strategy.groups  # type: ignore[attr-defined]
        interrupted = watch is not None and watch.interrupts.asked_at is not None
        should_stop, interrupted, *largest = groups.largest(
            self._stop, interrupted, self._sigterm, self._requeue, *more
        )
        trainer.should_stop, self._stop = bool(should_stop), False
        if interrupted:
            watch.interrupts.has_left = True
            raise KeyboardInterrupt
        return largest

    def _act(self, trainer: pl.Trainer, sigterm: bool, requeue: bool) -> None:
        self._requeue = False
        from lightning_shard.plugin.saving.model_checkpoint import save_as_last, save_for_requeue  # see strategy.py

        saved = save_for_requeue(trainer) if requeue else save_as_last(trainer)
        trainer.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]
        names = " and ".join(name for name, sent in (("SIGTERM", sigterm), ("the requeue signal", requeue)) if sent)
        if saved is None:
            rank_zero_warn(
                f"Received {names}, but nothing was saved: there is no ModelCheckpoint that saves the full state."
            )
        else:
            rank_zero_info(f"Received {names}: step {trainer.global_step} is saved at {saved}.")
        if requeue and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.save()
            _requeue_job()
        # Lightning's loops check this at the end of the step, after all its hooks and logs
        trainer._signal_connector.received_sigterm = self._agreed = sigterm

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Give the loops' SIGTERMException the exit code of a terminated process, if all ranks end at the same step."""
        try:
            yield
        except SIGTERMException as stop:
            if self._agreed:
                stop.code = 128 + signal.SIGTERM
            raise


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
