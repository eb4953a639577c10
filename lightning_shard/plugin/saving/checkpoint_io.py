"""Reads and writes Lightning's checkpoints in this package's format: the CheckpointIO plugin."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.checkpoint.foreign.lightning_ckpt import (
    EXTRA_STATE,
    OPTIMIZER_TENSORS,
    RANK_STATE,
    TRANSFORMERS_KEY,
    put_together,
    set_aside,
)
from lightning_shard.checkpoint.optimizers.named import flatten_optimizer_states, merge_stages
from lightning_shard.checkpoint.optimizers.restored import stored_states
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.sharded_values import lay_out, lift, merge_over_stages
from lightning_shard.checkpoint.store import absolute, as_path, forget_listings
from lightning_shard.checkpoint.tiers import LocalTier
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.plugin.saving.beside_tensors import leave_out_of, name_types
from lightning_shard.plugin.saving.drift import Drift
from lightning_shard.plugin.steps import randomness

if TYPE_CHECKING:
    from lightning_shard.plugin.groups import Groups

SEVERAL_RANKS = (
    "ShardedCheckpointIO saves on every rank, and only HybridShardStrategy calls it so where there are several: use"
    " strategy='hybrid_shard'."
)

WEIGHTS_ALONE = "lightning_shard_weights_alone"
"""A key in what is loaded from a file that no Trainer saved: a missing optimizer state is expected then."""


@dataclass(frozen=True)
class Site:
    """What saving needs to know of a strategy's rank.

    Attributes:
        mesh: The mesh of the ranks that hold this rank's stage.
        order_of: Each parameter's position in the optimizer of a number, as one process would make it.
        drift: Settles replicas that differ.
    """

    mesh: DeviceMesh
    layout: Layout
    device: torch.device
    groups: Groups
    order_of: Callable[[int], Mapping[str, int]]
    timeout: timedelta | None
    drift: Drift


class ShardedCheckpointIO(CheckpointIO):
    """Writes a directory of per-rank safetensors files with a manifest, and reads it back on any layout.

    Args:
        storage_options: For the fsspec filesystem of the path. They may hold secrets, which no text of this object
            shows. A pickle of it holds them, since processes that Lightning spawns need them.
        asynchronous: Training continues once the tensors are copied to the CPU; they are written in the background.
            Takes memory for one copy of a rank's part. A save waits for the previous one. A failed write raises in the
            next save, or at the end of the fit. Outside of a fit, saves are written before they return.
        local: A folder on a fast disk: one shared by all ranks, or each machine's own. A save is committed there first,
            then carried to its path, in the background if saves are ``asynchronous``; the next save waits for that. The
            two newest copies stay there, and those that weren't carried. A copy that can't be carried raises as a
            failed save. A resume reads the local copy if it is complete, and as new as the one at the path or newer;
            otherwise the one at the path. It logs which, and first carries what isn't at the path. To start a run from
            scratch in a folder that was used, remove both copies.
        fsync: Sync files and folders to disk before the checkpoint counts; ``False`` for scratch.
        digests: Write a digest of every block, checked on load.
        share_reads: When loading, let one rank read what several ranks need, and pass it on to the others. None: if the
            store is reached through a network, as object stores are; worth trying on file systems that many machines
            mount.
        exclude_frozen: Leave out parameters that don't train and still have their initial values, as when a large
            frozen model is fine-tuned: whoever builds the module again has them. The checkpoint records which, and
            their content. It is refused by a module with other values, unless there is a ``base``.
        base: A checkpoint, safetensors file or transformers folder that holds the frozen parameters. They are compared
            with it at the first save, and loaded from it where the module has others.
    """

    def __init__(
        self,
        storage_options: Mapping[str, Any] | None = None,
        asynchronous: bool = False,
        *,
        local: str | os.PathLike[str] | None = None,
        fsync: bool = True,
        digests: bool = True,
        share_reads: bool | None = None,
        exclude_frozen: bool = False,
        base: str | os.PathLike[str] | None = None,
    ) -> None:
        self.exclude_frozen = exclude_frozen
        self.base = None if base is None else as_path(base)
        self.asynchronous = asynchronous
        self._storage_options = dict(storage_options or {})
        if local is not None and not digests:
            raise ConfigurationError(
                f"local ({as_path(local)}) needs digests=True, to verify that a local copy is complete, and digests"
                " is False: remove digests=False, or local."
            )
        self.local = None if local is None else LocalTier.at(local, self._storage_options)
        """Where local copies are kept, on disks nearer than the checkpoints' paths."""
        self.fsync = fsync
        self._digests = digests
        self._share_reads = share_reads
        self._site: Site | None = None
        self._saver: ckpt.AsyncSaver | None = None
        self._last_path = ""

    @property
    def storage_options(self) -> dict[str, Any]:
        """For the filesystem of checkpoints' paths, credentials included: don't log them."""
        return dict(self._storage_options)

    def connect(self, site: Site, *, fitting: bool) -> None:
        """Called by the strategy at setup; a collective call over all ranks.

        The saver's process group is made here, where all ranks are alive: made at the first save, it would wait for a
        rank that died in between until the timeout.
        """
        self._site = site
        if self.asynchronous and fitting and self._saver is None:
            self._saver = ckpt.AsyncSaver(timeout=site.timeout)

    @property
    def under_way(self) -> str:
        """The path of the save that this rank is writing in the background; empty if there is none."""
        return self._last_path if self._saver is not None and not self._saver.done() else ""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint; a collective call over all ranks if a strategy is connected.

        Raises:
            UnsupportedStateError: A value that JSON with tags can't hold; names its key and the remedy.
            CheckpointError: It couldn't be written. The checkpoint that was at ``path`` before is still there.
        """
        if self._site is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigurationError(SEVERAL_RANKS)
        if self._site is None and self.exclude_frozen:
            raise ConfigurationError("exclude_frozen needs strategy='hybrid_shard', which knows what doesn't train.")
        rest = dict(checkpoint) if self._site is not None else set_aside(checkpoint)
        state = rest.pop("state_dict", {})
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        named = "optimizer_states" in rest and self._site is not None
        optimizer, described = flatten_optimizer_states(rest.pop("optimizer_states")) if named else ({}, None)
        site = self._site
        if site is not None:
            extra = {name: value for part in site.groups.gather_over_stages(extra) for name, value in part.items()}
            if described is not None:
                described = merge_stages(site.groups.gather_over_stages(described), site.order_of)
        name_types(rest)
        leave_out_of(rest)
        rest, sharded = lift(rest, "state", with_siblings=True)
        elsewhere: set[str] = set()
        if site is not None:
            rest, of_stages = merge_over_stages(rest, site.groups.gather_over_stages)
            own = of_stages.pop(site.layout.pipeline_rank)
            elsewhere = own & set().union(*of_stages)
        if described is not None:
            rest["optimizer_states"] = described
        if extra:
            rest[EXTRA_STATE] = extra
        path = absolute(path)
        sections: Any = {"model": tensors, "optimizer": {**optimizer, **sharded}}
        if site is not None:
            at = f"{path}, step {rest['global_step']}" if "global_step" in rest else path
            sections = site.drift.settle(sections, [f"optimizer/{name}" for name in elsewhere], at)
        arguments: dict[str, Any] = {
            "optimizer": sections["optimizer"],
            "trainer_state": rest,
            "rank_state": randomness.capture(site.device) if site else None,
            "mesh": site.mesh if site else None,
            "layout": site.layout.sizes if site else None,
            "storage_options": {**self._storage_options, **(storage_options or {})},
            "fsync": self.fsync,
            "digests": self._digests,
            "own_disks": self.local is not None,
        }
        first, carry = path, None
        if self.local is not None:
            tier = LocalTier(self.local.root, arguments.pop("storage_options"))
            first, carry = tier.copy_of(path), partial(tier.carry, path, fsync=self.fsync)
        if self._saver is not None:
            self._saver.save(sections["model"], first, afterwards=carry, **arguments)
            self._last_path = path
        else:
            # over gloo: with NCCL alone, rank 0 would have to join what all ranks wrote
            ckpt.save(sections["model"], first, group=site.groups.host if site else None, **arguments)
            if carry is not None:
                carry(Ranks.of())
            if site is None:
                forget_listings(path, self._storage_options)  # Lightning's callbacks list which names are taken

    def wait(self) -> None:
        """Wait until a save in the background is committed; a collective call.

        Raises:
            CheckpointError: It failed.
        """
        if self._saver is not None:
            self._saver.wait()

    def drain(self) -> None:
        """The same for this rank alone."""
        if self._saver is not None:
            self._saver.drain()

    def open_checkpoint(self, path: Any, *, together: bool = False, whole: bool = False) -> dict[str, Any]:
        """Open Lightning's checkpoint, a ``.ckpt``, or a file of weights alone, with lazy tensors.

        Args:
            together: On all ranks, of which rank 0 reads the manifest; a collective call.
            whole: Include frozen parameters that were left out, from their source.

        Returns:
            Lightning's dict. ``"state_dict"`` holds :class:`~lightning_shard.checkpoint.StoredTensor`,
            ``"optimizer_tensors"`` those of ``"optimizer_states"``; ``"rank_state"`` this rank's generators, if the
            same layout saved them.
        """
        on_all_ranks = ckpt.all_or_none if together else contextlib.nullcontext
        with on_all_ranks():
            self.drain()
        source, options = str(path), self._storage_options
        if self.local is not None:
            found = self.local.source(source, Ranks.of() if together else Ranks(), fsync=self.fsync)
            say = rank_zero_warn if found.worse else rank_zero_info
            say(f"Reading the checkpoint {found.path}: {found.why}.")
            source, options = found.path, {} if found.local else options
        read = ckpt.read_together if together else ckpt.read
        stored = read(source, storage_options=options)
        if self._share_reads is not None:
            stored.share_reads = self._share_reads
        with on_all_ranks():
            return self._opened(complete(stored, self.base, storage_options=self._storage_options) if whole else stored)

    def _opened(self, stored: ckpt.Checkpoint) -> dict[str, Any]:
        loaded = stored.trainer_state()
        if not isinstance(loaded, dict) or "pytorch-lightning_version" not in loaded:
            # another program's, as a .ckpt of plain Lightning, a safetensors file or a transformers folder, or no
            # Trainer's: training starts with its weights, at step 0
            states = stored_states(stored)
            return {
                WEIGHTS_ALONE: True,
                "pytorch-lightning_version": pl.__version__,
                "state_dict": dict(stored),
                "epoch": 0,
                "global_step": 0,
                "optimizer_states": states or [],
                OPTIMIZER_TENSORS: dict(stored.optimizer) if states else {},
                "lr_schedulers": [],
            }
        loaded.pop(TRANSFORMERS_KEY, None)
        loaded["state_dict"] = {**stored, **loaded.pop(EXTRA_STATE, {})}
        loaded[OPTIMIZER_TENSORS] = dict(stored.optimizer)
        if self._site is not None and stored.manifest.layout == self._site.layout.sizes:
            loaded[RANK_STATE] = stored.rank_state(self._site.layout.rank)
        return loaded

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the whole checkpoint into memory, as strategies that load on one process expect it, and as ``gather``
        writes it to a ``.ckpt``: optimizer states by parameters' numbers."""
        loaded = self.open_checkpoint(path, whole=True)
        loaded.pop(RANK_STATE, None)
        state_dict, tensors = loaded.pop("state_dict"), loaded.pop(OPTIMIZER_TENSORS)
        rest, pairs = lay_out(loaded, {}, ())
        referred = {stored.name for stored, _ in pairs}
        optimizer = {name: stored for name, stored in tensors.items() if name not in referred}
        (model, optimizer), more = lay_out((state_dict, optimizer), {}, ())
        ckpt.load_tensors([*pairs, *more])
        return put_together(model, optimizer, rest)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, after a running save and only if that succeeds, as it may replace this one.

        Of the copies on machines' local disks, only this machine's is removed. The others go once two newer ones exist.
        """

        path = absolute(path)

        def remove() -> None:
            if self.local is not None:
                self.local.remove(path)
            ckpt.remove(path, storage_options=self._storage_options)

        self.after_save(remove)

    def after_save(self, action: Callable[[], None]) -> None:
        """Run an action after the running save, if that succeeds; now if there is none. On this rank alone."""
        if self._saver is not None:
            self._saver.then(action)
        else:
            action()

    def teardown(self) -> None:
        """End a fit or an evaluation: completes a running save."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


def sharded(io: object) -> ShardedCheckpointIO:
    """A strategy's ``checkpoint_io``, as it is set; others are refused."""
    if not isinstance(io, ShardedCheckpointIO):
        raise ConfigurationError(
            f"checkpoint_io ({type(io).__name__}) must be a lightning_shard.ShardedCheckpointIO: sharded state is"
            " written by every rank."
        )
    return io
