"""``save``: plans this rank's part, writes its files, and commits together with the other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lightning_shard.checkpoint.catalog import Earlier, remove_files
from lightning_shard.checkpoint.content import content_sum
from lightning_shard.checkpoint.engine import collection_paused, each, files_at_once
from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, table_path
from lightning_shard.checkpoint.optimizers.taken import take_apart
from lightning_shard.checkpoint.ranks import Failure, Ranks, exchange
from lightning_shard.checkpoint.saving.accounts import Account, joined
from lightning_shard.checkpoint.saving.commit import check_files, commit, look_before_saving, new_attempt
from lightning_shard.checkpoint.saving.files import Written, file_metadata, write_file, write_json
from lightning_shard.checkpoint.saving.merge import Merged, Name, Sums
from lightning_shard.checkpoint.saving.part import PartFile, RankPart, plan_part
from lightning_shard.checkpoint.store import Store, open_store
from lightning_shard.checkpoint.store.calls import told_as
from lightning_shard.errors import UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclasses.dataclass(frozen=True)
class SaveReport:
    """The result of a save, on one rank.

    Attributes:
        path: The checkpoint's directory.
        attempt: The manifest's attempt id, which distinguishes this checkpoint from any other at the path.
        rank_bytes: Bytes that this rank wrote.
        bytes: Bytes that all ranks wrote, without the manifest.
        seconds: Wall time on this rank, including waiting for others.
    """

    path: str
    attempt: str
    rank_bytes: int
    bytes: int
    seconds: float


def save(
    state: Mapping[str, Any] | torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Any = None,
    trainer_state: Any = None,
    rank_state: Mapping[str, Tensor] | None = None,
    mesh: DeviceMesh | None = None,
    group: Any = None,
    layout: Any = None,
    storage_options: dict[str, Any] | None = None,
    fsync: bool = True,
    digests: bool = True,
    own_disks: bool = False,
) -> SaveReport:
    """Write a checkpoint. With a process group, a collective call: each rank writes its part.

    An earlier checkpoint in the directory stays valid until this one is complete, and is then replaced atomically. If
    any rank fails, every rank raises and the earlier checkpoint stays. A torn or empty ``manifest.json``, as a machine
    crash may leave without ``fsync``, is replaced; another program's isn't. Of several concurrent saves to one path,
    one wins.

    Args:
        state: Tensors and DTensors by name. Keys of nested dicts are joined by ``.``. A module stands for its state
            dict. Tensors that share all of their memory are written once. A tensor that isn't sharded must be equal on
            all ranks that hold it, and each writes a part of it; equality is checked on a sample of its elements, or on
            all if it is small. Replicas of shards (HSDP) aren't compared.
        path: A directory, new or with an earlier checkpoint; local, or any URL that fsspec knows.
        optimizer: A torch optimizer, its ``state_dict()``, that of ``torch.distributed.checkpoint``, or a list of
            these; their groups are kept in the trainer state, under ``optimizer_states``. Or tensors by name.
        trainer_state: Anything that :mod:`~lightning_shard.checkpoint.format.typed_json` supports; the first rank's is
            saved.
        rank_state: Tensors that belong to this rank alone, such as states of random generators.
        mesh: The ranks that hold this same list of tensors, such as the ranks of one pipeline stage; its axes must
            include those that the DTensors are sharded over. Default: all ranks of ``group``.
        group: The ranks that save. Default: all.
        layout: Recorded in the manifest for its readers: a dataclass or JSON.
        storage_options: For fsspec.
        fsync: Survive a crash of the machine; False for scratch.
        digests: Record a 128-bit hash of every block, so that a load detects damage.
        own_disks: Machines may have disks of their own at ``path``, each with its ranks' files, so only the rank that
            wrote a file checks that it is there. Such a checkpoint can't be loaded before it is carried to a place that
            all see. Else it is refused.

    Raises:
        UnsupportedStateError: The format can't hold a value; the error names its key.
        CheckpointConflictError: Another save has committed to the path since this one began; its checkpoint stays.
        CheckpointError: The ranks' parts don't cover their tensors; a rank couldn't write; a replicated tensor differs
            between ranks; a load into a tensor failed midway; ranks hold different tensors under one name; ``path`` is
            a symbolic link to a checkpoint, or has another program's manifest.
        RankFailure: A rank ended, was stopped or hangs, and the process group's timeout has expired.
    """
    ranks = Ranks.of(group)
    order = Order(path, storage_options, layout, fsync, digests, own_disks)
    optimizer, trainer_state = take_apart(optimizer, state, trainer_state, mesh, ranks)
    what = state, optimizer, trainer_state, rank_state
    return Saving(order, ranks, lambda: plan_part(*what, mesh=mesh, ranks=ranks, attempt=new_attempt())).run()


@dataclasses.dataclass(frozen=True)
class Order:
    """Where and how to write a checkpoint; see :func:`save` for the fields."""

    path: str | os.PathLike[str]
    """Checked when it is opened, where an error reaches every rank."""
    storage_options: dict[str, Any] | None = dataclasses.field(repr=False)  # may hold secrets
    layout: Any
    fsync: bool
    digests: bool
    own_disks: bool = False


@dataclasses.dataclass
class Saving:
    """One save on one rank; if any rank fails, in ``plan`` or after, :meth:`run` raises on every rank."""

    order: Order
    ranks: Ranks
    plan: Callable[[], RankPart]
    began_s: float = dataclasses.field(default_factory=time.monotonic)
    store: Store | None = None
    part: RankPart | None = None
    layout: Any = None
    # on the first rank only
    earlier: Earlier = dataclasses.field(default_factory=Earlier)
    merged: Merged | None = None

    def run(self) -> SaveReport:
        # If a collective fails, or this rank is interrupted, the first rank may still commit. So the files stay, and a
        # later save removes those that no manifest names.
        own, outcome = exchange(self.ranks, self._write, self._conclude, joined)
        if isinstance(outcome, list):
            own, outcome = exchange(self.ranks, partial(self._sums, outcome), self._settle)
        if not isinstance(outcome, SaveReport):
            assert isinstance(outcome, Failure)
            if self.store is not None and self.part is not None and not outcome.files_stay:
                table = [table_path(self.part.attempt)] if self.ranks.first else []
                abandon(self.store, [*self.part.paths(), *table])
            raise_cause(own, outcome, self.ranks.rank, self.order.path)
        assert self.part is not None
        rank_bytes = sum(file.bytes for file in self.part.account.files)
        own_path = os.fspath(self.order.path)  # not the first rank's: each may have its own folder
        seconds = time.monotonic() - self.began_s
        return dataclasses.replace(outcome, path=own_path, rank_bytes=rank_bytes, seconds=seconds)

    def _write(self) -> Account:
        order = self.order
        self.layout = plain(order.layout)
        self.store = open_store(order.path, order.storage_options)
        if self.ranks.first:
            self.earlier = look_before_saving(self.store)
        self.part = self.plan()
        return write_part(self.part, self.store, order)

    def _conclude(self, parts: list[Account]) -> SaveReport | list[Name]:
        """Commit, unless tensors that several meshes hold, cut into different chunks, have to be compared first."""
        with collection_paused():
            self.merged = Merged(parts)
        return self.merged.unsettled() or self._commit()

    def _sums(self, names: list[Name]) -> Sums:
        assert self.part is not None
        wanted, sums = set(names), Sums()
        for file in self.part.files:
            for piece, data in file.pieces():
                if (name := (file.section, piece.name)) in wanted:
                    sums[name] = sums.get(name, 0) + content_sum(data, piece.box, piece.shape)
        return sums

    def _settle(self, sums: list[Sums]) -> SaveReport:
        assert self.merged is not None
        self.merged.settle(sums)
        return self._commit()

    def _commit(self) -> SaveReport:
        assert self.store is not None
        assert self.part is not None
        assert self.merged is not None
        attempt, digests = self.part.attempt, self.order.digests
        with collection_paused():
            manifest = self.merged.manifest(attempt=attempt, layout=self.layout, digests=digests)
        if not self.order.own_disks:
            check_files(self.store, manifest.files, self.began_s)
        commit(self.store, manifest, self.earlier, durable=self.order.fsync)
        return SaveReport(os.fspath(self.order.path), attempt, 0, sum(file.bytes for file in manifest.files), 0.0)


def write_part(part: RankPart, store: Store, order: Order) -> Account:
    """Write a rank's files, then check that all of them exist and have their sizes."""
    account = part.account
    if part.state is not None:
        account.files.append(write_json(store, part.state_path, part.state, digests=order.digests, durable=order.fsync))
    stop = threading.Event()

    def write(file: PartFile) -> Written:
        metadata, how = file_metadata(part.attempt, file.section), {"digests": order.digests, "durable": order.fsync}
        return write_file(store, file.path, file.plan, file.data, metadata, **how, stop=stop)

    of_device = "cuda" in {data.device.type for file in part.files for data in file.data}
    threads = min(len(part.files), files_at_once(of_device=of_device))
    for file, written in each(write, part.files, threads, stop=stop):
        account.add(file.section, written)
    if order.fsync:
        store.sync(part.paths())
    check_files(store, account.files)
    return account


def plain(layout: Any) -> Any:
    """Convert a dataclass or JSON-like value to plain JSON values."""
    value = dataclasses.asdict(layout) if dataclasses.is_dataclass(layout) and not isinstance(layout, type) else layout
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(f"layout ({layout!r}) must be a dataclass or JSON: {error}.") from error


def raise_cause(own: BaseException | None, outcome: Failure, rank: int, path: object) -> NoReturn:
    """Raise the reason why nothing was committed: this rank's own error, or else that of the first failed rank."""
    if own is None:
        outcome.raise_here(rank)
    assert own is not None
    with told_as(f"The checkpoint {path} could not be written"):
        raise own


def abandon(store: Store, names: Iterable[str]) -> None:
    """Remove a rank's files of an attempt that failed."""
    remove_files(store, names)
    with contextlib.suppress(Exception):
        if not store.exists(MANIFEST_NAME):
            store.remove_empty_folders()
