"""Resumes an epoch in its middle, on any number of data ranks.

Lightning counts an epoch in batches of one rank. The place in the data is a number of samples over all ranks. So a
resume sets the loops' counters as if the first part of the epoch had run on the present layout. Then the length of the
epoch, ``trainer.num_training_batches``, fractions of it, limits and progress bars all stay correct. ``global_step`` and
the total counters continue to count what was really done.

Private in Lightning 2.6, used here: the counters (``fit_loop.epoch_progress``, ``epoch_loop.batch_progress``), the
``_combined_loader`` with its states, the ``_data_fetcher``, and ``StochasticWeightAveraging._scheduler_state``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.plugin.data.loader import sharded_sampler
from lightning_shard.plugin.data.sampler import ShardedSampler, length_of


def batches_trained(trainer: pl.Trainer) -> int:
    """How many batches of the current epoch were trained on, by the counter from which Lightning itself restarts."""
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress.current
    if epochs.ready > epochs.started:
        # the epoch has begun, but the batch counters are still the previous epoch's
        return 0
    # `completed` lags behind in `on_train_batch_end`, where checkpoints are saved; `ready` runs ahead in the step
    batches: Any = fit_loop.epoch_loop.batch_progress.current
    return batches.processed


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """Change a fit loop's state that was saved after the fit, so that it resumes where the fit stopped.

    Lightning counts an epoch as completed when ``max_steps`` or ``should_stop`` ends it. A checkpoint saved after the
    fit would resume with the next epoch and skip as many of its batches as were done. The same happens after an epoch
    that ran to its end.
    """
    places = fit_loop.get("state_dict", {}).get("combined_loader") or []
    epochs, batches = fit_loop.get("epoch_progress"), fit_loop.get("epoch_loop.batch_progress", {})
    if epochs is None or not batches.get("current", {}).get("processed"):
        return
    done = epochs["current"]["completed"]
    if batches.get("is_last_batch"):
        if all(count == done for count in epochs["current"].values()):
            # the epoch is over; the next one would start after as many batches as this one had, and end at once
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False
        return
    if any(isinstance(place, dict) and place.get("epoch") == done - 1 and place.get("position") for place in places):
        for counters in (epochs["current"], epochs["total"]):
            counters["processed"] -= 1
            counters["completed"] -= 1


def resume_data(trainer: pl.Trainer) -> None:
    """After a checkpoint was loaded: go to its place in the data, and count the epoch's batches from there.

    To be called in the strategy's ``on_train_start``. By then both the loops and the loaders are set up, in whichever
    order (``trainer.estimated_stepping_batches`` requests the loaders before the loops are restored), and the epoch's
    counters haven't been used yet.
    """
    fit_loop = trainer.fit_loop
    combined = fit_loop._combined_loader
    if not fit_loop.is_resuming or combined is None:
        return
    is_late = fit_loop.restarting and bool(fit_loop._combined_loader_states_to_load)
    _load_states(trainer, combined)
    samplers = [sampler for loader in combined.flattened if (sampler := sharded_sampler(loader)) is not None]
    if not samplers:
        if is_late:  # for loaders with a state of their own: their iterators are of before it was loaded
            iter(fit_loop._data_fetcher)  # type: ignore[arg-type]
        return
    if fit_loop.restarting:
        _count_by_this_layout(trainer, combined)
    epochs: Any = fit_loop.epoch_progress
    if fit_loop.restarted_mid_epoch and epochs.current.processed == epochs.current.started:
        # saved after an epoch's last batch, which Lightning has just counted as the epoch's end. It would train the
        # next epoch without counting it and without its start hook, and a checkpoint in its middle couldn't be resumed
        fit_loop.reset_restart_stage()
    if fit_loop.restarted_on_epoch_end:
        # saved in `on_train_epoch_end` of a run with max_steps: Lightning ends that epoch again, and counts it twice
        for counters in (epochs.current, epochs.total):
            counters.processed -= 1
    for sampler in samplers:
        sampler.begin(epochs.current.processed, batches_trained(trainer))
    assert fit_loop._data_fetcher is not None
    # the loop's iterator starts at another place, and its workers may have prefetched from there
    iter(fit_loop._data_fetcher)
    val_loop = fit_loop.epoch_loop.val_loop
    if val_loop.restarted_mid_evaluation:
        # Lightning would continue the count, but begin with the first batch: so the whole evaluation runs again
        val_loop.batch_progress.current.reset()


def run_epoch_start(trainer: pl.Trainer) -> None:
    """In mid-epoch, where Lightning skips these hooks: accumulate as scheduled, and begin SWA again."""
    if not trainer.fit_loop.restarted_mid_epoch:
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        averages = isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None
        if isinstance(callback, GradientAccumulationScheduler) or (
            averages and callback.swa_start <= trainer.current_epoch <= callback.swa_end
        ):
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, rate in zip(groups, rates, strict=True):  # creating SWA's scheduler takes a step
        group["lr"] = rate


def _load_states(trainer: pl.Trainer, combined: CombinedLoader) -> None:
    """Load loader states if Lightning hasn't: it only does if it sets up loaders after the loops were restored."""
    fit_loop = trainer.fit_loop
    if fit_loop.restarting:
        fit_loop._load_combined_loader_states()
    else:
        # at the end of an epoch there is no place to restore, only the seed for the orders of later epochs
        stateful = [loader for loader in combined.flattened if isinstance(loader, _Stateful)]
        for loader, state in zip(stateful, fit_loop._combined_loader_states_to_load):
            if (sampler := sharded_sampler(loader)) is not None:
                sampler.load_state_dict(state)


def _count_by_this_layout(trainer: pl.Trainer, combined: CombinedLoader) -> None:
    """Set the epoch's counters to what the finished part would have counted on this layout."""
    fit_loop = trainer.fit_loop
    progress: Any = fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    sampler = _sampler_that_ends_the_epoch(combined)
    if sampler is None or done == 0:
        return
    if not sampler.is_loaded and not fit_loop.restarted_on_epoch_start:  # else there is no part to skip
        epochs: Any = fit_loop.epoch_progress.current
        if epochs.started > epochs.processed:  # else that epoch is over
            rank_zero_warn(
                "The checkpoint doesn't store the position in the data. Assuming the same number of data-parallel ranks"
                f" and the same batch size as now, {done} batches are skipped."
            )
        for each in filter(None, map(sharded_sampler, combined.flattened)):
            each.skip(epochs.started - 1, done)
        return
    if sampler.start == 0:
        # saved between two epochs, when the batch counters are still those of the first
        batches: float = 0
        progress.is_last_batch = False
    elif progress.is_last_batch and done == progress.current.ready:  # not saved before it was trained on
        batches = fit_loop.max_batches
    else:
        batches = sampler.batches_until(sampler.start)
        if batches >= fit_loop.max_batches:
            # Trainer(limit_train_batches=…) allows fewer batches than were done: none of this epoch is left
            batches = fit_loop.max_batches
            sampler.start = len(sampler.order)  # type: ignore[arg-type]
    if batches != float("inf"):
        _shift(progress.current, int(batches) - done)


def _sampler_that_ends_the_epoch(combined: CombinedLoader) -> ShardedSampler | None:
    """The sampler of the loader whose end is the epoch's: of several the longest, or with ``min_size`` the shortest."""
    lengths = [float("inf") if (own := length_of(loader)) is None else own for loader in combined.flattened]
    end = _SUPPORTED_MODES[combined._mode]["fn"](lengths)  # type: ignore[arg-type]
    return sharded_sampler(combined.flattened[lengths.index(end)])


def _shift(counters: Any, batches: int) -> None:
    """Add to all counters; their differences tell Lightning where in the loop the checkpoint was saved."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(counters, name, getattr(counters, name) + batches)
