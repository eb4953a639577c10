"""All ranks or none: what every rank has written is collected, checked and made a checkpoint by one put.

A save talks twice: each rank's account (file digests and chunks, or its error) goes to the first rank, and that one's
verdict goes back to all. No rank can wait for one that has failed, since failing is an account too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from lightning_shard import errors
from lightning_shard.checkpoint.header import dtype_name
from lightning_shard.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    OWN_FILE,
    Chunk,
    FileEntry,
    Manifest,
    chunk_to_json,
    tensor_to_json,
)
from lightning_shard.checkpoint.plan import Box, coverage_fault
from lightning_shard.checkpoint.store import Store, open_store
from lightning_shard.checkpoint.transfer import Written
from lightning_shard.errors import CheckpointError, RankFailure


class RankCheckpointFailure(RankFailure, CheckpointError):
    """Another rank failed to save or load its part."""


# -- talking ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """The processes that save or load together; one alone where there is no process group."""

    rank: int = 0
    members: tuple[int, ...] = (0,)
    group: Any = None

    @classmethod
    def of(cls, group: Any = None) -> Ranks:
        """Those of ``group``, by default of the whole world."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        group = group if group is not None else dist.group.WORLD
        return cls(dist.get_rank(), tuple(dist.get_process_group_ranks(group)), group)

    @property
    def first(self) -> bool:
        return self.rank == self.members[0]

    @property
    def alone(self) -> bool:
        return len(self.members) == 1

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in order, on the first rank; elsewhere nothing."""
        if self.alone:
            return [value]
        values: list[Any] = [None] * len(self.members)
        dist.gather_object(value, values if self.first else None, dst=self.members[0], group=self.group)
        return values if self.first else []

    def broadcast(self, value: Any) -> Any:
        """The first rank's value."""
        if self.alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.members[0], group=self.group)
        return box[0]

    def any(self, *values: bool) -> list[bool]:
        """Of each value, whether it is true on some rank: one round, where objects take four."""
        if self.alone:
            return list(values)
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(self.group) == "nccl" else None
        flags = torch.tensor(values, dtype=torch.int32, device=device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in flags.tolist()]


@dataclass(frozen=True)
class Failure:
    """An error as it travels between ranks."""

    rank: int
    kind: str
    message: str
    files_stay: bool = False
    """Whether what was being committed may have become the checkpoint all the same."""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        return cls(rank, type(error).__name__, str(error) or type(error).__name__)

    def raise_here(self, rank: int) -> None:
        """Raise it on a rank that didn't fail itself: as the same error of ours, so that every rank can catch it."""
        kind = getattr(errors, self.kind, None)
        ours = isinstance(kind, type) and issubclass(kind, CheckpointError)
        text = self.message if ours else f"{self.kind}: {self.message}"
        prefix = f"rank {self.rank}: " if rank != self.rank else ""
        raise (kind if ours and kind is not None else RankCheckpointFailure)(prefix + text)


Result = TypeVar("Result")
Outcome = TypeVar("Outcome")


def exchange(
    ranks: Ranks, work: Callable[[], Result], decide: Callable[[list[Result]], Outcome]
) -> tuple[BaseException | None, Outcome | Failure]:
    """Do each rank's work, and on the first rank what follows from all their results; a collective call.

    Returns:
        This rank's own error, and on every rank what the first one decided, or what failed first.

    Raises:
        Exception: The ranks could not talk; what the others know is unknown then.
    """
    own: BaseException | None = None
    report: Any = None
    try:
        report = work()
    except BaseException as error:
        own = error
        report = Failure.of(ranks.rank, error)
    reports = ranks.gather(report)
    outcome: Any = None
    if ranks.first:
        outcome = next((report for report in reports if isinstance(report, Failure)), None)
        if outcome is None:
            try:
                outcome = decide(reports)
            except BaseException as error:
                own = error
                outcome = Failure.of(ranks.rank, error)
    return own, ranks.broadcast(outcome)


def together(ranks: Ranks, work: Callable[[], Result], decide: Callable[[list[Result]], Outcome]) -> Outcome:
    """The same, raising what failed: the ranks that failed raise their own error, the others that of the first one."""
    own, outcome = exchange(ranks, work, decide)
    if own is not None:
        raise own
    if isinstance(outcome, Failure):
        outcome.raise_here(ranks.rank)
    return outcome  # type: ignore[return-value]


@dataclass
class Vote:
    """``yes`` may be set on any rank while a block runs. If that succeeds, it is then true on all if it was on one."""

    yes: bool = False


@contextlib.contextmanager
def all_or_none(group: Any = None) -> Iterator[Vote]:
    """Run a block on every rank of a group; if it fails on one, every rank raises. A collective call.

    The failing ranks raise their own error; the others the one of the first rank that failed.
    """
    own: list[BaseException] = []
    vote = Vote()
    try:
        yield vote
    except BaseException as error:
        own.append(error)

    def fail() -> None:
        if own:
            raise own[0]

    ranks = Ranks.of(group)
    failed, vote.yes = ranks.any(bool(own), vote.yes)
    if failed:
        together(ranks, fail, lambda _: None)


def new_attempt() -> str:
    """Twelve hexadecimal digits that no other save of this directory has."""
    return secrets.token_hex(6)


# -- committing -------------------------------------------------------------------------------------------------------


WrittenChunk = tuple[str, str, tuple[int, ...], Chunk]
"""A chunk, and the name, dtype and shape of its tensor."""


@dataclass
class Account:
    """What one rank has written: per section (``model``, ``optimizer``, ``trainer``, ``rank``) its file and chunks."""

    rank: int
    mesh_ranks: tuple[int, ...]
    """The ranks that hold the same tensors as this one."""
    fingerprint: tuple[int, str] = (0, "")
    """The number of tensors and a hash of their names, dtypes and shapes."""
    written: dict[str, list[tuple[FileEntry, list[WrittenChunk]]]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    state_file: FileEntry | None = None

    def add(self, section: str, written: Written) -> None:
        chunks = [
            (piece.name, dtype_name(piece.data.dtype, piece.name), piece.shape, chunk)
            for piece, chunk in written.chunks
        ]
        self.written.setdefault(section, []).append((written.file, chunks))


def merge(accounts: list[Account], *, attempt: str, layout: Any, writer: str, digests: bool) -> Manifest:
    """The manifest of what all ranks have written.

    Raises:
        CheckpointError: Chunks of a tensor overlap or leave a gap: not all ranks that hold it wrote, or several did.
    """
    _check_agreement(accounts)
    files: list[FileEntry] = []
    raw: dict[str, Any] = {"model": {}, "optimizer": {}, "trainer": {}, "ranks": {}}
    state_file = None
    owners: dict[tuple[str, str], tuple[int, ...]] = {}
    boxes: dict[tuple[str, str], list[Box]] = {}
    for account in accounts:
        if account.state_file is not None:
            state_file = len(files)
            files.append(account.state_file)
        for section, written in account.written.items():
            target = raw["ranks"].setdefault(str(account.rank), {}) if section == "rank" else raw[section]
            for file, chunks in written:
                index = len(files)
                files.append(file)
                for name, dtype, shape, chunk in chunks:
                    holder = f"{section} {account.rank}" if section == "rank" else section
                    owner = owners.setdefault((holder, name), account.mesh_ranks)
                    if owner is not account.mesh_ranks and owner != account.mesh_ranks:
                        # two lists of tensors have this name, as both ends of a pipeline have tied embeddings
                        continue
                    entry = target.get(name)
                    if entry is None:
                        entry = target[name] = tensor_to_json(dtype, shape, [])
                        boxes[holder, name] = []
                    elif entry["dtype"] != dtype or tuple(entry["shape"]) != shape:
                        raise CheckpointError(
                            f"{name!r} is {dtype} {shape} on rank {account.rank}, and {entry['dtype']}"
                            f" {tuple(entry['shape'])} on a rank before it: ranks that hold one tensor must agree."
                        )
                    entry["chunks"].append(chunk_to_json(chunk, index))
                    boxes[holder, name].append(Box(chunk.offsets, chunk.sizes))
        for section, aliases in account.aliases.items():
            for name, target_name in aliases.items():
                raw[section].setdefault(name, {"same_as": target_name})
    for section in ("model", "optimizer"):
        for name, entry in raw[section].items():
            if "same_as" in entry:
                assert "chunks" in raw[section][entry["same_as"]], f"{name!r} is an alias of no tensor"
            else:
                _check_coverage(name, entry["shape"], boxes[section, name])
    return Manifest(
        attempt=attempt,
        files=files,
        layout=layout,
        world_size=len(accounts),
        writer=writer,
        block_bytes=BLOCK_BYTES if digests else 0,
        state_file=state_file,
        raw_sections=raw,
    )


def _check_agreement(accounts: list[Account]) -> None:
    """Ranks that share the writing of their tensors must hold the same ones: else some would be written by no one."""
    by_rank = {account.rank: account for account in accounts}
    for account in accounts:
        for rank in account.mesh_ranks:
            other = by_rank.get(rank)
            if other is None:
                raise CheckpointError(
                    f"Rank {account.rank} shares its tensors with rank {rank}, which isn't saving: save on all ranks of"
                    " the mesh."
                )
            if other.mesh_ranks != account.mesh_ranks or other.fingerprint != account.fingerprint:
                raise CheckpointError(
                    f"Rank {account.rank} ({account.fingerprint[0]} tensors) was to hold the same tensors as rank"
                    f" {rank} ({other.fingerprint[0]} tensors), and they differ in names, dtypes or shapes. Where ranks"
                    " hold different tensors, as pipeline stages do, pass mesh=, the mesh of those that hold the same."
                )


def _check_coverage(name: str, shape: list[int], boxes: list[Box]) -> None:
    fault = coverage_fault(shape, boxes)
    if fault is not None:
        raise CheckpointError(
            f"The ranks' parts of {name!r} of shape {tuple(shape)} don't make up the tensor: {fault}. Either a"
            " rank that holds a part of it isn't saving, or not all ranks that save together hold the same tensors (as"
            " with pipeline stages): then pass mesh=, the mesh of the ranks that do."
        )


def commit(store: Store, manifest: Manifest, *, durable: bool) -> None:
    """Put the manifest, which makes the attempt the checkpoint, then remove what earlier attempts left."""
    data = manifest.to_bytes()
    store.publish(MANIFEST_NAME, [memoryview(data)], len(data), durable=durable)
    keep = {file.path for file in manifest.files}
    remove_own_files(store, lambda name: name not in keep)


def remove(path: str | os.PathLike[str], *, storage_options: dict[str, Any] | None = None) -> None:
    """Remove a checkpoint: its manifest first, so that a half-removed one is none; nothing if none is there.

    Only files that this package wrote are removed, by their names, and folders that are empty then.
    """
    store = open_store(path, storage_options)
    store.remove(MANIFEST_NAME)
    remove_own_files(store, lambda name: True)
    store.remove_empty_folders()


def remove_own_files(store: Store, which: Callable[[str], bool]) -> None:
    """Remove files that have a name that only this package gives; a failure to is no failure of the checkpoint."""
    with contextlib.suppress(Exception):
        for name in store.names():
            if OWN_FILE.fullmatch(name) and which(name):
                with contextlib.suppress(Exception):
                    store.remove(name)
