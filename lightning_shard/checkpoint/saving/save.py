"""``save``: plan, write this rank's files, commit together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from lightning_shard.checkpoint.ranks import Failure, Ranks, exchange
from lightning_shard.checkpoint.saving.commit import Account, commit, merge, new_attempt
from lightning_shard.checkpoint.saving.files import write_file, write_json
from lightning_shard.checkpoint.saving.part import RankPart, plan_part
from lightning_shard.checkpoint.store import LocalStore, Store, open_store
from lightning_shard.errors import CheckpointError, UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

WRITER = "lightning_shard 0.1.0"


def save(
    state: Mapping[str, Any] | torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    optimizer: Mapping[str, Any] | None = None,
    trainer_state: Any = None,
    rank_state: Mapping[str, Tensor] | None = None,
    mesh: DeviceMesh | None = None,
    group: Any = None,
    layout: Any = None,
    storage_options: dict[str, Any] | None = None,
    fsync: bool = True,
    digests: bool = True,
) -> None:
    """Write a checkpoint. With a process group, a collective call: each rank writes its part.

    The directory's earlier checkpoint, if any, stays valid until this one is complete, and is then replaced at once.
    If any rank fails, every rank raises and the earlier one stays.

    Args:
        state: Tensors and DTensors by name; nested dicts give names joined by ``.``; a module stands for its
            state dict. Tensors that share all of their memory are written once. A tensor that isn't sharded is the
            same on all ranks that hold it, and each writes a part: that they are the same is checked by a sample of
            its elements, and of all where they are few. Replicas of shards (HSDP) aren't compared.
        path: A directory, new or holding an earlier checkpoint; local, or any URL that fsspec knows.
        optimizer: The optimizer's tensors by name.
        trainer_state: Anything that :mod:`~lightning_shard.checkpoint.format.codec` holds; the first rank's is saved.
        rank_state: Tensors that belong to this rank alone, such as states of random generators.
        mesh: The ranks that hold this same list of tensors, as the ranks of one pipeline stage do, with the axes that
            its DTensors are sharded over among its own. Default: all ranks of ``group``.
        group: The ranks that save. Default: all.
        layout: Told to whoever reads the manifest: a dataclass or JSON.
        storage_options: For fsspec.
        fsync: Survive a crash of the machine; False for scratch.
        digests: Record a 128-bit hash of every block, so that damage is found on load.

    Raises:
        UnsupportedStateError: A value that the format can't hold; names its key.
        CheckpointError: The ranks' parts don't make up their tensors, a tensor that they hold alike differs between
            them, a load into a tensor has failed in its middle, or a rank couldn't write.
    """
    ranks = Ranks.of(group)
    attempt = ranks.broadcast(new_attempt() if ranks.first else None)

    def plan() -> RankPart:
        return plan_part(
            state,
            optimizer=optimizer,
            trainer_state=trainer_state,
            rank_state=rank_state,
            mesh=mesh,
            ranks=ranks,
            attempt=attempt,
        )

    write_together(Order(path, storage_options, layout, fsync, digests), ranks, plan)


@dataclasses.dataclass(frozen=True)
class Order:
    """Where and how a checkpoint is to be written; see :func:`save`."""

    path: str | os.PathLike[str]
    storage_options: dict[str, Any] | None
    layout: Any
    fsync: bool
    digests: bool


def write_together(order: Order, ranks: Ranks, plan: Callable[[], RankPart]) -> None:
    """Write each rank's part and commit; if any rank fails, in ``plan`` or after, every rank raises."""
    store: Store | None = None
    part: RankPart | None = None
    fault: BaseException | None = None

    def write() -> Account:
        nonlocal store, part
        store = open_store(order.path, order.storage_options)
        part = plan()
        return _write(part, store, order)

    def conclude(accounts: list[Account]) -> Failure | None:
        nonlocal fault
        assert store is not None
        assert part is not None
        layout = _plain(order.layout)
        manifest = merge(accounts, attempt=part.attempt, layout=layout, writer=WRITER, digests=order.digests)
        try:
            commit(store, manifest, durable=order.fsync)
        except BaseException as error:
            fault = error
            return dataclasses.replace(Failure.of(ranks.rank, error), files_stay=may_be_committed(store, part.attempt))
        return None

    # Where the ranks can't talk to the end, or this one is interrupted, the first may yet commit: then all files stay,
    # and the next save clears what no manifest names.
    own, outcome = exchange(ranks, write, conclude)
    if outcome is None:
        return
    if store is not None and part is not None and not outcome.files_stay:
        abandon(store, part.paths())
    error = own or fault
    if error is None:
        outcome.raise_here(ranks.rank)
    assert error is not None
    if isinstance(error, OSError) and not isinstance(error, CheckpointError):
        path = os.fspath(order.path)
        raise CheckpointError(f"The checkpoint {path} could not be written: {error}.") from error
    raise error


def may_be_committed(store: Store, attempt: str) -> bool:
    """After putting the manifest has failed: whether it is there all the same, or may yet come."""
    if not isinstance(store, LocalStore):
        return True  # the answer may have been lost, not the request
    try:
        return Manifest.from_bytes(store.read(MANIFEST_NAME)).attempt == attempt
    except FileNotFoundError:
        return False
    except Exception:
        return True


def _write(part: RankPart, store: Store, order: Order) -> Account:
    account = Account(
        part.rank,
        part.mesh_ranks,
        part.fingerprint,
        aliases=part.aliases,
        replicated=part.replicated,
        contents=part.contents,
    )
    if part.state is not None:
        account.state_file = write_json(store, part.state_path, part.state, digests=order.digests, durable=order.fsync)
    for file in part.files:
        metadata = {"format": "pt", "lightning_shard.attempt": part.attempt, "lightning_shard.section": file.section}
        account.add(
            file.section,
            write_file(store, file.path, file.plan, file.data, metadata, digests=order.digests, durable=order.fsync),
        )
    if order.fsync:
        store.sync(part.paths())
    return account


def _plain(layout: Any) -> Any:
    """The layout as JSON."""
    value = dataclasses.asdict(layout) if dataclasses.is_dataclass(layout) and not isinstance(layout, type) else layout
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(f"layout ({layout!r}) must be a dataclass or JSON: {error}.") from error


def abandon(store: Store, names: Iterable[str]) -> None:
    """Remove a rank's files of an attempt that came to nothing."""
    with contextlib.suppress(Exception):
        for name in names:
            store.remove(name)
        if not store.exists(MANIFEST_NAME):
            store.remove_empty_folders()
