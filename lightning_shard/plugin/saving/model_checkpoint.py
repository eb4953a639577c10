"""Extends Lightning's ModelCheckpoint to checkpoints that are directories, on the local disk or on any store.

In these cases Lightning 2.6 does the following, which is replaced here:

- It creates filesystems without storage options, and takes ``file://`` for the name of a folder.
- It searches for ``last`` by paths that it normalises like local ones, and asks a store when a directory was modified,
  which object stores don't know. It takes every existing path for a checkpoint, even one without a manifest.
- On an exception it saves over a checkpoint of the same name.
- Resumed in the middle of gradient accumulation, it saves again after the first batch, at the step that was resumed
  from. A resume from that would lack the gradients of that batch.
- On remote stores it removes every checkpoint that leaves the top k, even the one that the run was resumed from.

Private in Lightning 2.6, used or overridden: ``_find_last_checkpoints``, ``_should_remove_checkpoint``,
``_save_checkpoint``, ``_save_last_checkpoint``, ``_monitor_candidates``,
``_get_metric_interpolated_filepath_name``, ``_should_save_on_exception``, ``_enable_version_counter``, ``_fs``,
``_last_checkpoint_saved``, ``_last_global_step_saved``, ``_every_n_train_steps``; since this class has the same name,
also ``__resolve_ckpt_dir``; and what ``_CheckpointConnector._parse_ckpt_path`` asks about the paths that it gets from
``_find_last_checkpoints`` (see :class:`_FoundPath`).
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import lightning.pytorch as pl
from fsspec.utils import get_protocol
from lightning.pytorch import callbacks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import WarningCache, rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.catalog import commits, is_file, names_in
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.store import as_path, as_text, local_path, open_filesystem
from lightning_shard.errors import ConfigurationError
from lightning_shard.plugin.saving.checkpoint_io import SEVERAL_RANKS, ShardedCheckpointIO
from lightning_shard.plugin.saving.checkpointed import CheckpointedStrategy

T = TypeVar("T")

_warnings = WarningCache()


class ModelCheckpoint(callbacks.ModelCheckpoint):
    """Lightning's callback of this name, with the same arguments, for checkpoints that are directories.

    ``dirpath`` (or if it is None, the Trainer's ``default_root_dir``) may be in any store that fsspec knows, such as
    ``s3://bucket/run``. The store's options are those of the strategy's :class:`ShardedCheckpointIO`, on top of
    fsspec's own configuration. With ``ckpt_path="last"`` a run resumes from the newest committed checkpoint of that
    name, also in a new process. A directory without a manifest, as an interrupted save leaves it, isn't a checkpoint:
    it is neither found nor in the way. The checkpoint that a run was resumed from is never removed, nor is any outside
    of ``dirpath``.

    With strategies that write a checkpoint to one file, this is Lightning's own callback.

    Raises:
        ConfigurationError: A URL that was converted to a ``pathlib.Path``; at the start of a run, ``save_last="link"``;
            of a fit, several ranks with a strategy that saves on one of them.
    """

    @wraps(callbacks.ModelCheckpoint.__init__)  # type: ignore[misc]
    def __init__(self, dirpath: str | os.PathLike[str] | None = None, *args: Any, **kwargs: Any) -> None:
        # Lightning would create a filesystem for the path at once, for which some stores need options
        super().__init__(None, *args, **kwargs)
        self.dirpath = _normalised(dirpath) if dirpath else None
        self._resumed_from: str | None = None
        self._step_resumed_from: int | None = None
        self.last_is_resumed_from = False
        """Whether this run was started with ``ckpt_path="last"``, and so will be when it is started again."""
        self._finds_last = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        io = _sharded_io(trainer)
        if io is None:
            super().setup(trainer, pl_module, stage)
            return
        saves_on_one_rank = trainer.world_size > 1 and not isinstance(trainer.strategy, CheckpointedStrategy)
        if stage == TrainerFn.FITTING and saves_on_one_rank:
            raise ConfigurationError(SEVERAL_RANKS)  # here, so that every rank raises, not only the one that saves
        _refuse_link(self)
        self.dirpath = dirpath = trainer.strategy.broadcast(_normalised(self.__resolve_ckpt_dir(trainer)))
        if self.last_is_resumed_from:
            self._check_that_all_found_last(io)
        self._fs, _ = open_filesystem(dirpath, io.storage_options)
        if stage == TrainerFn.FITTING:  # a store that refuses the keys does so before training
            _on_first_rank(trainer, lambda: self._tell_if_not_empty(dirpath, io))

    def _tell_if_not_empty(self, dirpath: str, io: ShardedCheckpointIO) -> None:
        if self.save_top_k != 0 and names_in(dirpath, io.storage_options):
            rank_zero_warn(f"Checkpoint directory {dirpath} exists and is not empty.")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if _sharded_io(trainer) is not None:
            self._resumed_from = self._place(str(trainer.ckpt_path)) if trainer.ckpt_path else None
            self._step_resumed_from = trainer.global_step if trainer.ckpt_path else None

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._every_n_train_steps < 1 or trainer.global_step != self._step_resumed_from:
            super().on_train_batch_end(trainer, *args, **kwargs)

    def file_exists(self, filepath: str | Path, trainer: pl.Trainer) -> bool:
        """Whether a checkpoint is at the path, or a single file, which can't be saved over; the same on every rank."""
        io = _sharded_io(trainer)
        if io is None:
            return super().file_exists(filepath, trainer)
        path = os.fspath(filepath)
        if path == self._last_checkpoint_saved:
            return True  # it may still be written in the background, without a manifest
        return _on_first_rank(trainer, lambda: self._is_taken(path, io))

    def _is_taken(self, path: str, io: ShardedCheckpointIO) -> bool:
        """The same for this rank alone; also true while another callback's save to this path is running."""
        under_way = io.under_way  # read first: a save that ends in between is found below
        on_its_way = bool(under_way) and self._place(path) == self._place(under_way)
        return on_its_way or ckpt.exists(path, storage_options=io.storage_options) or is_file(path, io.storage_options)

    def _get_metric_interpolated_filepath_name(
        self, monitor_candidates: dict[str, Tensor], trainer: pl.Trainer, del_filepath: str | None = None
    ) -> str:
        """Rank 0's name on all ranks: they may have logged different values, or see different names as taken."""
        io = _sharded_io(trainer)
        if io is None:
            return super()._get_metric_interpolated_filepath_name(monitor_candidates, trainer, del_filepath)
        return _on_first_rank(trainer, lambda: self._free_path(monitor_candidates, io, del_filepath))

    def _free_path(self, values: dict[str, Tensor], io: ShardedCheckpointIO, but: str | None = None) -> str:
        """A path for this callback at which nothing is, except ``but``, which may be replaced."""
        path, version = self.format_checkpoint_name(values), self.STARTING_VERSION
        while self._enable_version_counter and path != but and self._is_taken(path, io):
            path, version = self.format_checkpoint_name(values, ver=version), version + 1
        return path

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """As Lightning's, which would save over a checkpoint of the same name; that may be the best one."""
        io = _sharded_io(trainer)
        if io is None or not self._should_save_on_exception(trainer):
            super().on_exception(trainer, pl_module, exception)
            return
        values = self._monitor_candidates(trainer)
        # on rank 0, whose path counts, without a collective: the other ranks may not come
        path = self._free_path(values, io) if trainer.is_global_zero else ""
        self._save_checkpoint(trainer, path)
        self._save_last_checkpoint(trainer, values)
        rank_zero_info(f"Saved {path} since a {type(exception).__name__} was raised.")

    def _find_last_checkpoints(self, trainer: pl.Trainer) -> set[str]:
        """The newest committed checkpoint, if any. Every rank searches by itself: they aren't connected yet."""
        self.last_is_resumed_from = True
        dirpath = _normalised(self.__resolve_ckpt_dir(trainer))
        io = _sharded_io(trainer)
        if io is None:
            self._fs, _ = open_filesystem(dirpath)
            return super()._find_last_checkpoints(trainer)
        # a name such as "{epoch}-last" stands for many
        pattern = ".*".join(re.escape(part) for part in re.split(r"\{.*?\}", self.CHECKPOINT_NAME_LAST))
        pattern = rf"{pattern}(?:{re.escape(self.CHECKPOINT_JOIN_CHAR)}v(\d+))?{re.escape(self.FILE_EXTENSION)}"
        versions: dict[str, int] = {}

        def is_last(name: str) -> bool:
            if last := re.fullmatch(pattern, name):
                versions[name] = int(last[1] or 0)
            return last is not None

        def order(commit: tuple[datetime, str]) -> tuple[datetime, int]:
            # stores report times in seconds: of two in the same second, the higher version is the later one
            return commit[0], versions[commit[1]]

        found = max(commits(dirpath, io.storage_options, is_last, all_known=True), key=order, default=None)
        if io.local is not None:
            found = io.local.newest(dirpath, found[1] if found else None, is_last, order) or found
        self._finds_last = found is not None
        if found is None:
            return set()
        committed, name = found
        return {_FoundPath(posixpath.join(dirpath, name), committed)}

    def _check_that_all_found_last(self, io: ShardedCheckpointIO) -> None:
        """Refuse a last checkpoint that some ranks only see: the others would begin anew, and all would wait."""
        found, missed = Ranks.of().any(self._finds_last, not self._finds_last)
        if not (found and missed):
            return
        if io.local is not None:
            raise ConfigurationError(
                f'ckpt_path="last" finds a checkpoint on the local disks of some machines only ({io.local.root}), and'
                f" none in {self.dirpath}: the run ended before its first one was carried there, and a machine has gone"
                " since. To begin anew, remove that folder on all machines."
            )
        raise ConfigurationError(
            f'ckpt_path="last" finds a checkpoint in {self.dirpath} on some ranks only: each machine has a folder of'
            " its own there (use one that all see), or it was still being written when they looked (start again)."
        )

    def _should_remove_checkpoint(self, trainer: pl.Trainer, previous: str, current: str) -> bool:
        if _sharded_io(trainer) is None:
            return super()._should_remove_checkpoint(trainer, previous, current)
        if previous == current or self._place(previous) == self._resumed_from:
            return False
        return bool(previous) and self._place(previous).startswith(self._place(str(self.dirpath)).rstrip("/") + "/")

    def _place(self, path: str) -> str:
        """One canonical path for all spellings of a location."""
        path = str(self._fs._strip_protocol(as_path(path)))
        return os.path.realpath(path) if _is_local(str(self.dirpath)) else path


class _FoundPath(str):
    """The path of a checkpoint that was found, with the time of its commit.

    Lightning asks about it again, of a filesystem that it creates from ``str(path)`` without storage options: whether
    the path exists, then when it was modified. Until then ``str(path)`` yields a URL of a filesystem that answers from
    this object.
    """

    committed: datetime
    asked: bool

    def __new__(cls, path: str, committed: datetime) -> _FoundPath:
        found = super().__new__(cls, path)
        found.committed = committed
        found.asked = False
        return found

    def __getnewargs__(self) -> tuple[str, datetime]:  # type: ignore[override]
        return super().__str__(), self.committed

    def __str__(self) -> str:
        return super().__str__() if self.asked else f"{_Answers.protocol}://"


class _Answers(fsspec.AbstractFileSystem):
    """Answers Lightning's questions about a :class:`_FoundPath` from what is known of it."""

    protocol = "lightning-shard-found"

    def exists(self, path: _FoundPath, **_: Any) -> bool:
        return True

    def modified(self, path: _FoundPath) -> datetime:
        path.asked = True
        return path.committed


fsspec.register_implementation(_Answers.protocol, _Answers, clobber=True)


def take_over_stock_callbacks(trainer: pl.Trainer) -> None:
    """Replace Lightning's own ModelCheckpoints that save to a remote store, or in the background, by this module's.

    There Lightning's lose checkpoints. They consider a name free while a save to it is running, or while a cached
    listing lacks it, so that the second save overwrites the first. And on stores they remove what another run has
    saved. To be called before callbacks' setup.

    Raises:
        ConfigurationError: One is of a user's class, which can't be changed.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return
    logged = trainer.loggers[0].save_dir if trainer.loggers else None
    for callback in trainer.checkpoint_callbacks:
        if not isinstance(callback, callbacks.ModelCheckpoint) or isinstance(callback, ModelCheckpoint):
            continue
        _refuse_link(callback)
        dirpath = str(callback.dirpath or logged or trainer.default_root_dir)
        is_local, io = _is_local(dirpath), trainer.strategy.checkpoint_io
        if is_local and not (isinstance(io, ShardedCheckpointIO) and io.asynchronous):
            continue
        where, kind = "in the background" if is_local else f"to {get_protocol(dirpath)}://", type(callback)
        if kind is not callbacks.ModelCheckpoint:
            raise ConfigurationError(
                f"{kind.__qualname__} is derived from lightning.pytorch's ModelCheckpoint and saves {where}, where"
                " that may save over the best checkpoint: derive it from lightning_shard.ModelCheckpoint, which takes"
                " the same arguments."
            )
        trainer.callbacks[trainer.callbacks.index(callback)] = _take_over(callback)  # type: ignore[attr-defined]
        if not is_local:
            _warnings.warn(
                f"lightning.pytorch's ModelCheckpoint (which a Trainer also makes by itself) saves {where} here, and is"
                " made a lightning_shard.ModelCheckpoint. But it has looked for ckpt_path='last' before, and doesn't"
                " find it there: use lightning_shard.ModelCheckpoint, which takes the same arguments."
            )


def _take_over(callback: callbacks.ModelCheckpoint) -> ModelCheckpoint:
    """This module's callback with the state of another one, which goes on having the same attributes."""
    made = ModelCheckpoint()
    vars(callback).update({name: value for name, value in vars(made).items() if name not in vars(callback)})
    made.__dict__ = vars(callback)
    if made.dirpath:
        made.dirpath = _normalised(made.dirpath)
    return made


def save_as_last(trainer: pl.Trainer) -> str | None:
    """Save now what ``ckpt_path="last"`` will find, unless it is from this step already. A collective call.

    Returns:
        Its path; None if no ModelCheckpoint saves the whole state.
    """
    whole = [
        callback
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, callbacks.ModelCheckpoint) and not callback.save_weights_only
    ]
    if not whole or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    callback = next((one for one in whole if one.save_last), whole[0])
    if not callback.save_last or callback._last_global_step_saved != trainer.global_step:
        values = callback._monitor_candidates(trainer)
        configured = callback.save_last
        try:
            callback.save_last = configured or True
            callback._save_last_checkpoint(trainer, values)
        finally:
            callback.save_last = configured
    return callback.last_model_path


def save_for_requeue(trainer: pl.Trainer) -> str | None:
    """Save now what the run will resume from when SLURM restarts it; returns its path. A collective call.

    A run that was started with ``ckpt_path="last"`` finds ModelCheckpoint's. Without a ``ckpt_path``, Lightning
    searches for ``hpc_ckpt_<n>.ckpt`` in ``default_root_dir``, and takes any of that name for complete. So on the local
    disk it gets that name only once it is complete.
    """
    if any(isinstance(one, ModelCheckpoint) and one.last_is_resumed_from for one in trainer.checkpoint_callbacks):
        return save_as_last(trainer)
    io = _sharded_io(trainer)
    assert io is not None
    root = _normalised(trainer.default_root_dir)

    def next_path() -> str:
        names = names_in(root, io.storage_options)
        taken = [int(found[1]) for name in names if (found := re.fullmatch(r"hpc_ckpt_(\d+)\.ckpt", name))]
        return posixpath.join(root, f"hpc_ckpt_{max(taken, default=0) + 1}.ckpt")

    path = _on_first_rank(trainer, next_path)
    if not _is_local(path):
        trainer.save_checkpoint(path)
        return path
    written = posixpath.join(root, ".hpc_saving")
    trainer.save_checkpoint(written)
    io.wait()
    _on_first_rank(trainer, lambda: os.rename(written, path))
    return path


def _refuse_link(callback: callbacks.ModelCheckpoint) -> None:
    if callback.save_last == "link":
        raise ConfigurationError(
            'save_last="link" isn\'t supported: a link dangles while its checkpoint is written in the background, or'
            " removed. Use save_last=True."
        )


def _sharded_io(trainer: pl.Trainer) -> ShardedCheckpointIO | None:
    """The strategy's ShardedCheckpointIO; None if the strategy writes checkpoints of another kind."""
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, ShardedCheckpointIO) else None


def _on_first_rank(trainer: pl.Trainer, look: Callable[[], T]) -> T:
    """Run ``look`` on rank 0 only, as it queries or changes the store; returns its result, or raises, on every rank."""
    result: Any = None
    with ckpt.all_or_none():
        if trainer.is_global_zero:
            result = look()
    return trainer.strategy.broadcast(result)


def _is_local(path: str) -> bool:
    return local_path(path) is not None


def _normalised(path: str | os.PathLike[str]) -> str:
    """One spelling for each directory, since Lightning compares paths: as it does for local paths, for all of them."""
    if isinstance(path, Path) and re.match(r"[A-Za-z][\w+.-]+:/", str(path)):
        raise ConfigurationError(f"dirpath ({path!r}) was a URL before it was made a Path: pass it as a str.")
    text = as_text(path, "dirpath")
    if (local := local_path(text)) is not None:
        return os.path.realpath(os.path.expanduser(local))
    scheme, separator, rest = text.partition("://")
    return f"{scheme}{separator}{rest.rstrip('/')}"
