"""All ranks or none: what every rank has written is collected, checked and made a checkpoint by one put.

A save talks twice: each rank's account (file digests and chunks, or its error) goes to the first rank, and that one's
verdict goes back to all. No rank can wait for one that has failed, since failing is an account too.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

from lightning_shard.checkpoint.boxes import Box, coverage_fault
from lightning_shard.checkpoint.folder import remove_own_files
from lightning_shard.checkpoint.format.blocks import BLOCK_BYTES
from lightning_shard.checkpoint.format.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    chunk_to_json,
    tensor_to_json,
)
from lightning_shard.checkpoint.saving.files import Written
from lightning_shard.checkpoint.saving.replicated import FINGERPRINT_BYTES
from lightning_shard.checkpoint.store import Store
from lightning_shard.errors import CheckpointError


def new_attempt() -> str:
    """Twelve hexadecimal digits that no other save of this directory has."""
    return secrets.token_hex(6)


@dataclass
class Account:
    """What one rank has written: per section (``model``, ``optimizer``, ``trainer``, ``rank``) its files."""

    rank: int
    mesh_ranks: tuple[int, ...]
    """The ranks that hold the same tensors as this one."""
    fingerprint: tuple[int, str] = (0, "")
    """The number of tensors and a hash of their names, dtypes and shapes."""
    written: dict[str, list[Written]] = field(default_factory=dict)
    aliases: dict[str, dict[str, str]] = field(default_factory=dict)
    state_file: FileEntry | None = None
    replicated: bytes = b""
    """Names of the tensors that all of ``mesh_ranks`` hold alike, one to a line."""
    contents: bytes = b""
    """A fingerprint of each."""

    def add(self, section: str, written: Written) -> None:
        self.written.setdefault(section, []).append(written)


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
        for section, of_section in account.written.items():
            target = raw["ranks"].setdefault(str(account.rank), {}) if section == "rank" else raw[section]
            for written in of_section:
                index = len(files)
                files.append(written.file)
                for name, dtype, shape, chunk in written.chunks():
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
        if account.mesh_ranks:
            _check_contents(account, by_rank[account.mesh_ranks[0]])


def _check_contents(account: Account, other: Account) -> None:
    """What two ranks hold alike, and each writes a part of, must be the same."""
    if account.contents == other.contents:
        return
    names = account.replicated.decode(errors="surrogatepass").split("\n")
    width = FINGERPRINT_BYTES
    for number, name in enumerate(names):
        if account.contents[number * width :][:width] != other.contents[number * width :][:width]:
            raise CheckpointError(
                f"{name!r} isn't sharded, and differs between rank {min(account.rank, other.rank)} and rank"
                f" {max(account.rank, other.rank)}: of which it should be saved isn't known. Give all ranks the same,"
                " as by a broadcast before saving, or pass what belongs to each rank in rank_state=."
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
