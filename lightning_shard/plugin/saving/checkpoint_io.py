"""Lightning's checkpoints in this package's format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.excluded import complete
from lightning_shard.checkpoint.foreign.lightning_ckpt import TRANSFORMERS_KEY
from lightning_shard.checkpoint.optimizers.named import flatten_optimizer_states, merge_stages
from lightning_shard.checkpoint.ranks import Ranks
from lightning_shard.checkpoint.sharded_values import lay_out, lift, merge_over_stages
from lightning_shard.checkpoint.store import LocalStore, absolute, as_path, forget_listings, open_store
from lightning_shard.checkpoint.tiers import LocalTier
from lightning_shard.errors import ConfigurationError
from lightning_shard.layout import Layout
from lightning_shard.plugin.saving.other_files import WEIGHTS_ALONE, weights_alone
from lightning_shard.plugin.steps import randomness

SEVERAL_RANKS = (
    "ShardedCheckpointIO saves on every rank, and only HybridShardStrategy calls it so where there are several: use"
    " strategy='hybrid_shard'."
)


@dataclass(frozen=True)
class Site:
    """Where a strategy's rank stands, as far as saving needs to know.

    Attributes:
        mesh: The mesh of the ranks that hold this rank's stage.
        gather_over_stages: Every stage's value; collective over the pipeline.
        places: Each parameter's place in the whole module.
        timeout: Of collective operations.
        host: All ranks, over gloo: nccl alone would have the first rank join what all wrote.
    """

    mesh: DeviceMesh
    layout: Layout
    device: torch.device
    gather_over_stages: Callable[[Any], list[Any]]
    places: Mapping[str, int]
    timeout: timedelta | None = None
    host: Any = None


class ShardedCheckpointIO(CheckpointIO):
    """Writes a directory of per-rank safetensors files with a manifest, and reads it back on any layout.

    Args:
        storage_options: For the fsspec filesystem of the path. They may hold secrets, which no text of this object
            shows; a pickle of it holds them, since processes that Lightning spawns need them.
        asynchronous: Let training go on once the tensors have been copied to the CPU, and write them in the background;
            takes memory for one copy of a rank's part. A save waits for the one before it; what goes wrong is raised
            by the next save, or at the end of the fit. Outside of a fit, saves are written before they return.
        local: A folder of a fast disk: one for all ranks, or each machine's own. A save is committed there first, then
            carried to its path, in the background where saves are ``asynchronous``; the next save waits for that. The
            two newest stay there, and those that weren't carried. What can't be carried is raised as a failed save. A
            resume takes the local copy where it is whole, and newer or the same, else what is at the path, and says
            which; what isn't at the path is carried there first. Who begins a run anew in a folder that was used
            removes both.
        fsync: Sync files and folders to disk before the checkpoint counts; ``False`` for scratch.
        digests: Write a digest of every block, checked on load.
        share_reads: What several ranks need alike when a checkpoint is loaded, one of them reads and passes on to the
            others. None: if the store is reached through a network, as object stores are; worth trying on file systems
            that many machines mount.
        exclude_frozen: Leave out parameters that don't train and are still what they were at the start, as for
            fine-tuning a large frozen model: whoever builds the module anew has them. The checkpoint says which and
            with what content; it is refused where the module has others, and there is no ``base``.
        base: A checkpoint, safetensors file or transformers folder that holds the frozen parameters; they are compared
            with it at the first save, and taken from it where the module has others.
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
        self._asynchronous = asynchronous
        self._storage_options = dict(storage_options or {})
        if local is not None and not digests:
            raise ConfigurationError(
                f"local ({as_path(local)}) needs digests, by which it is known that a copy is whole, and digests is"
                " False: leave that out, or local."
            )
        self.local = None if local is None else LocalTier.at(local, self._storage_options)
        """Where the copies are that lie nearer than the checkpoints' own paths."""
        self._fsync = fsync
        self._digests = digests
        self._share_reads = share_reads
        self._site: Site | None = None
        self._fitting = False
        self._saver: ckpt.AsyncSaver | None = None
        self._last_path = ""

    @property
    def storage_options(self) -> dict[str, Any]:
        """For the filesystem of checkpoints' paths, credentials included: not for logs."""
        return dict(self._storage_options)

    def connect(self, site: Site, *, fitting: bool) -> None:
        """Told by the strategy at setup."""
        self._site = site
        self._fitting = fitting

    @property
    def under_way(self) -> str:
        """The path of the save that this rank writes in the background; empty where there is none."""
        return self._last_path if self._saver is not None and not self._saver.done() else ""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint; a collective call over all ranks where a strategy is connected.

        Raises:
            UnsupportedStateError: A value that JSON with tags can't hold; names its key and the way out.
            CheckpointError: It couldn't be written; the one that was at ``path`` before is still there.
        """
        if self._site is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigurationError(SEVERAL_RANKS)
        if self._site is None and self.exclude_frozen:
            raise ConfigurationError("exclude_frozen needs strategy='hybrid_shard', which knows what doesn't train.")
        rest = dict(checkpoint)
        state = rest.pop("state_dict", {})
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        extra = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
        named = "optimizer_states" in rest and self._site is not None
        optimizer, described = flatten_optimizer_states(rest.pop("optimizer_states")) if named else ({}, None)
        site = self._site
        if site is not None:
            extra = {name: value for part in site.gather_over_stages(extra) for name, value in part.items()}
            if described is not None:
                described = merge_stages(site.gather_over_stages(described), site.places)
        rest.pop("hparams_type", None)  # a class; its values are saved as plain ones
        rest, sharded = lift(rest, "state", with_siblings=True)
        if site is not None:
            rest = merge_over_stages(rest, site.gather_over_stages)
        if described is not None:
            rest["optimizer_states"] = described
        if extra:
            rest["extra_state"] = extra
        arguments: dict[str, Any] = {
            "optimizer": {**optimizer, **sharded},
            "trainer_state": rest,
            "rank_state": randomness.capture(site.device) if site else None,
            "mesh": site.mesh if site else None,
            "layout": site.layout.sizes if site else None,
            "storage_options": {**self._storage_options, **(storage_options or {})},
            "fsync": self._fsync,
            "digests": self._digests,
        }
        path = absolute(path)
        first, carry = path, None
        if self.local is not None:
            tier = LocalTier(self.local.root, arguments.pop("storage_options"))
            first, carry = tier.copy_of(path), partial(tier.carry, path, fsync=self._fsync)
        if self._asynchronous and self._fitting:
            if self._saver is None:
                self._saver = ckpt.AsyncSaver(timeout=site.timeout if site else None)
            with self._taken(path):
                self._saver.save(tensors, first, afterwards=carry, **arguments)
            self._last_path = path
        else:
            ckpt.save(tensors, first, group=site.host if site else None, **arguments)
            if carry is not None:
                carry(Ranks.of())
            if site is None:
                forget_listings(path, self._storage_options)  # Lightning's own callbacks ask which names are taken

    @contextlib.contextmanager
    def _taken(self, path: str) -> Iterator[None]:
        """Make a local checkpoint's folder at once, for Lightning's own callbacks, to whom a name is free without."""
        store = open_store(path, self._storage_options)
        if not (isinstance(store, LocalStore) and Ranks.of().first):
            yield
            return
        with contextlib.suppress(OSError):  # the save tells
            store.make(durable=self._fsync)
        try:
            yield
        except BaseException:
            store.remove_empty_folders()
            raise

    def wait(self) -> None:
        """Until a save that is being written in the background is committed; a collective call.

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
        """Lightning's checkpoint, or its ``.ckpt``, or a file of weights alone, with its tensors still in the store.

        ``together``: on all ranks, of which the first reads the manifest; a collective call. ``whole``: with frozen
        parameters that were left out, from where they came.

        ``"state_dict"`` holds :class:`~lightning_shard.checkpoint.StoredTensor`, ``"optimizer_tensors"`` those of
        ``"optimizer_states"``; ``"rank_state"`` this rank's generators, where the same layout saved them.
        """
        on_all_ranks = ckpt.all_or_none if together else contextlib.nullcontext
        with on_all_ranks():
            self.drain()
        source, options = str(path), self._storage_options
        if self.local is not None:
            found = self.local.source(source, Ranks.of() if together else Ranks(), fsync=self._fsync)
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
            return weights_alone(stored)
        loaded.pop(TRANSFORMERS_KEY, None)
        loaded["state_dict"] = {**stored, **loaded.pop("extra_state", {})}
        loaded["optimizer_tensors"] = dict(stored.optimizer)
        if self._site is not None and stored.manifest.layout == self._site.layout.sizes:
            loaded["rank_state"] = stored.rank_state(self._site.layout.rank)
        return loaded

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """The whole checkpoint in memory, as strategies that load on one process expect it.

        Optimizer states written by the strategy are named by parameter, which such strategies can't place: they are
        left out.
        """
        loaded = self.open_checkpoint(path, whole=True)
        loaded["state_dict"] = {
            name: value.full() if isinstance(value, ckpt.StoredTensor) else value
            for name, value in loaded["state_dict"].items()
        }
        if any(not name.startswith("state/") for name in loaded.pop("optimizer_tensors")):
            loaded.pop("optimizer_states", None)
            if loaded.get(WEIGHTS_ALONE):
                loaded["optimizer_states"] = []
        state_dict = loaded.pop("state_dict")
        rest, pairs = lay_out(loaded, {}, ())
        ckpt.load_tensors(pairs)
        return {"state_dict": state_dict, **rest}

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint; behind a save that is under way, and only if that succeeds, for it may replace it.

        Of its copies on machines' own disks the one of this machine: the others go when two newer ones are there.
        """

        path = absolute(path)

        def remove() -> None:
            if self.local is not None:
                self.local.remove(path)
            ckpt.remove(path, storage_options=self._storage_options)

        self.after_save(remove)

    def after_save(self, action: Callable[[], None]) -> None:
        """Do something behind a save that is under way, if that succeeds; now where none is. On this rank alone."""
        if self._saver is not None:
            self._saver.then(action)
        else:
            action()

    def teardown(self) -> None:
        """The end of a fit or an evaluation: what is under way is brought to its end."""
        saver, self._saver, self._fitting = self._saver, None, False
        if saver is not None:
            saver.close()
