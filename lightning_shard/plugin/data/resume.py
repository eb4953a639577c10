"""Taking up an epoch in its middle, on any number of data ranks.

Lightning counts an epoch in batches of one rank; the data's place is a number of samples over all ranks. So on a resume
the loop's counters are set to what they would be had the epoch's first part been run on the present layout: then the
length of the epoch, ``trainer.num_training_batches``, fractions of it, limits and progress bars all stay true.
``global_step`` and the total counters keep counting what was really done.

Private parts of Lightning 2.6 used here: the counters (``fit_loop.epoch_progress``, ``epoch_loop.batch_progress``), the
``_combined_loader`` with its states, and the ``_data_fetcher``.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.combined_loader import _SUPPORTED_MODES, CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_shard.plugin.data.loader import sharded_sampler
from lightning_shard.plugin.data.sampler import ShardedSampler

__all__ = ["batches_trained", "reopen_epoch", "resume_data"]


def batches_trained(trainer: pl.Trainer) -> int:
    """How many batches of the present epoch were trained on, by the count that Lightning itself restarts from."""
    fit_loop = trainer.fit_loop
    epochs: Any = fit_loop.epoch_progress.current
    if epochs.ready > epochs.started:
        # the epoch has begun, and the batches are still counted for the one before
        return 0
    # `completed` lags behind in `on_train_batch_end`, where checkpoints are saved; `ready` runs ahead in the step
    batches: Any = fit_loop.epoch_loop.batch_progress.current
    return batches.processed


def reopen_epoch(fit_loop: dict[str, Any]) -> None:
    """In the saved state of a fit loop, have what was saved after the fit go on where it was.

    Lightning counts an epoch as completed when ``max_steps`` or ``should_stop`` ends it, so that what is saved after
    the fit would go on with the next epoch, in which as many batches as were done would be missing. So would those of
    an epoch that was done to its end.
    """
    places = fit_loop.get("state_dict", {}).get("combined_loader") or []
    epochs, batches = fit_loop.get("epoch_progress"), fit_loop.get("epoch_loop.batch_progress", {})
    if epochs is None or not batches.get("current", {}).get("processed"):
        return
    done = epochs["current"]["completed"]
    if batches.get("is_last_batch"):
        if all(count == done for count in epochs["current"].values()):
            # the epoch is over, and the next one would begin behind the batches of this one, and end with it
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False
        return
    if any(isinstance(place, dict) and place.get("epoch") == done - 1 and place.get("position") for place in places):
        for counters in (epochs["current"], epochs["total"]):
            counters["processed"] -= 1
            counters["completed"] -= 1


def resume_data(trainer: pl.Trainer) -> None:
    """After a checkpoint was loaded: go to its place in the data, and count the epoch's batches from there.

    To be called in the strategy's ``on_train_start``: the loops and the loaders are set up by then, whichever came
    first (``trainer.estimated_stepping_batches`` asks for the loaders before the loops are restored), and the epoch's
    counters are not yet used.
    """
    fit_loop = trainer.fit_loop
    combined = fit_loop._combined_loader
    if not fit_loop.is_resuming or combined is None:
        return
    _accumulate_as_scheduled(trainer)
    samplers = [sampler for loader in combined.flattened if (sampler := sharded_sampler(loader)) is not None]
    if not samplers:
        return
    _load_states(trainer, combined)
    if fit_loop.restarting:
        _count_by_this_layout(trainer, combined)
    epochs: Any = fit_loop.epoch_progress
    if fit_loop.restarted_mid_epoch and epochs.current.processed == epochs.current.started:
        # saved after an epoch's last batch, which Lightning has counted as the epoch's end just now. It would train the
        # next epoch uncounted, without the hook of its begin: a checkpoint of that epoch's middle can't be resumed from
        fit_loop.reset_restart_stage()
    if fit_loop.restarted_on_epoch_end:
        # saved in `on_train_epoch_end` of a run with max_steps: Lightning ends that epoch once more, counting it twice
        for counters in (epochs.current, epochs.total):
            counters.processed -= 1
    for sampler in samplers:
        sampler.begin(epochs.current.processed, batches_trained(trainer))
    assert fit_loop._data_fetcher is not None
    # the iterator that the loop has made is of another place, and its workers may have fetched from there
    iter(fit_loop._data_fetcher)
    val_loop = fit_loop.epoch_loop.val_loop
    if val_loop.restarted_mid_evaluation:
        # Lightning would go on counting from there, but begin with the first batch: run it as a whole
        val_loop.batch_progress.current.reset()


def _accumulate_as_scheduled(trainer: pl.Trainer) -> None:
    """In mid-epoch: Lightning leaves out the hook of an epoch's begin, in which the callback sets it."""
    epochs: Any = trainer.fit_loop.epoch_progress
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(epochs.current.processed)


def _load_states(trainer: pl.Trainer, combined: CombinedLoader) -> None:
    """What Lightning has not loaded: it does so only when it sets up the loaders after the loops were restored."""
    fit_loop = trainer.fit_loop
    if fit_loop.restarting:
        fit_loop._load_combined_loader_states()
    else:
        # at the end of an epoch nothing is to be continued, but for the seed of the orders of the following ones
        stateful = [loader for loader in combined.flattened if isinstance(loader, _Stateful)]
        for loader, state in zip(stateful, fit_loop._combined_loader_states_to_load):
            if (sampler := sharded_sampler(loader)) is not None:
                sampler.load_state_dict(state)


def _count_by_this_layout(trainer: pl.Trainer, combined: CombinedLoader) -> None:
    """Set the epoch's counters to what the part that was done would have been on this layout."""
    fit_loop = trainer.fit_loop
    progress: Any = fit_loop.epoch_loop.batch_progress
    done = progress.current.processed
    sampler = _sampler_that_ends_the_epoch(combined)
    if sampler is None or done == 0:
        return
    if not sampler.is_loaded:
        rank_zero_warn(
            "The checkpoint does not hold its place in the data: taking it to be of the same number of data-parallel"
            f" ranks and batch size as now, {done} batches are skipped."
        )
        sampler.start = sampler.data_size * sampler.batch_size * done
        return
    if sampler.start == 0:
        # saved between two epochs, where the counters are still those of the first
        batches: float = 0
        progress.is_last_batch = False
    elif progress.is_last_batch:
        batches = fit_loop.max_batches
    else:
        batches = sampler.batches_until(sampler.start)
        if batches >= fit_loop.max_batches:
            # more was done than Trainer(limit_train_batches=…) allows on this layout: no batch of this epoch is left
            batches = fit_loop.max_batches
            sampler.start = len(sampler.order)  # type: ignore[arg-type]
    if batches != float("inf"):
        _shift(progress.current, int(batches) - done)


def _sampler_that_ends_the_epoch(combined: CombinedLoader) -> ShardedSampler | None:
    """Of several loaders, the one whose end is the epoch's: the longest, or with ``min_size`` the shortest."""
    lengths = [_length(loader) for loader in combined.flattened]
    end = _SUPPORTED_MODES[combined._mode]["fn"](lengths)  # type: ignore[arg-type]
    return sharded_sampler(combined.flattened[lengths.index(end)])


def _length(loader: object) -> float:
    try:
        return len(loader)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return float("inf")


def _shift(counters: Any, batches: int) -> None:
    """Keep the counters' differences: Lightning tells from them where in the loop the checkpoint was saved."""
    for name in ("ready", "started", "processed", "completed"):
        setattr(counters, name, getattr(counters, name) + batches)
