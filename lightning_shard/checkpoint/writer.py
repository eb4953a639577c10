"""``save``: plan, write this rank's files, commit together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_shard.checkpoint import codec
from lightning_shard.checkpoint.commit import Account, Failure, Ranks, commit, merge, new_attempt
from lightning_shard.checkpoint.dtensor import Frame, Located, common_mesh, is_dtensor, local_tensor, locate
from lightning_shard.checkpoint.manifest import MANIFEST_NAME, FileEntry, digest
from lightning_shard.checkpoint.plan import Box, Shared, share
from lightning_shard.checkpoint.storable import check_storable
from lightning_shard.checkpoint.store import Store, open_store
from lightning_shard.checkpoint.transfer import Piece, write_file
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
            state dict. Tensors that share all of their memory are written once.
        path: A directory, new or holding an earlier checkpoint; local, or any URL that fsspec knows.
        optimizer: The optimizer's tensors by name.
        trainer_state: Anything that :mod:`~lightning_shard.checkpoint.codec` holds; the first rank's is saved.
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
        CheckpointError: The ranks' parts don't make up their tensors, or a rank couldn't write.
    """
    ranks = Ranks.of(group)
    attempt = ranks.broadcast(new_attempt() if ranks.first else None)
    account: Account | Failure
    own: BaseException | None = None
    store: Store | None = None
    names: list[str] = []
    try:
        store = open_store(path, storage_options)
        sections = {"model": flatten(state), "optimizer": flatten(optimizer or {})}
        for tensors in sections.values():
            for name, tensor in tensors.items():
                check_storable(name, tensor)
        frame = _frame({**sections["model"], **sections["optimizer"]}, mesh, ranks)
        account = Account(ranks.rank, frame.ranks if frame is not None else ranks.members, _fingerprint(sections))
        saver = _Saver(store, attempt, ranks.rank, digests, fsync, account, names)
        for section, tensors in sections.items():
            saver.section(section, tensors, frame)
        if ranks.first and trainer_state is not None:
            saver.trainer_state(trainer_state)
        if rank_state:
            saver.rank_state(flatten(rank_state))
        if fsync:
            store.sync(names)
    except BaseException as error:
        own = error
        account = Failure.of(ranks.rank, error)
    accounts = ranks.gather(account)
    verdict: Failure | None = None
    if ranks.first:
        verdict = next((a for a in accounts if isinstance(a, Failure)), None)
        if verdict is None:
            try:
                assert store is not None
                manifest = merge(accounts, attempt=attempt, layout=_plain(layout), writer=WRITER, digests=digests)
                commit(store, manifest, durable=fsync)
            except BaseException as error:
                own = error
                verdict = Failure.of(ranks.rank, error)
    verdict = ranks.broadcast(verdict)
    if verdict is not None:
        if store is not None:
            _abandon(store, names)
        _raise(own, verdict, path, ranks.rank)


def flatten(state: Mapping[str, Any] | torch.nn.Module) -> dict[str, Tensor]:
    """Nested dicts of tensors to one dict, names joined by ``.``.

    Raises:
        UnsupportedStateError: A leaf that isn't a tensor, or two tensors of one name.
    """
    flat: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Tensor):
            if name in flat:
                raise UnsupportedStateError(f"Two tensors are named {name!r} once nested dicts are joined by '.'.")
            flat[name] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(item, f"{name}.{key}" if name else str(key))
        else:
            raise UnsupportedStateError(
                f"{name!r} is a {type(value).__name__}, not a tensor: state= and optimizer= hold tensors only; pass"
                " anything else in trainer_state=."
            )

    walk(state.state_dict() if isinstance(state, torch.nn.Module) else state, "")
    return flat


def _frame(state: Mapping[str, Tensor], mesh: DeviceMesh | None, ranks: Ranks) -> Frame | None:
    if ranks.alone and mesh is None and not any(is_dtensor(tensor) for tensor in state.values()):
        return None
    return Frame.of(mesh if mesh is not None else common_mesh(state, ranks.members), ranks.members, ranks.rank)


@dataclasses.dataclass
class _Saver:
    """Writes one rank's files and keeps the account of them."""

    store: Store
    attempt: str
    rank: int
    digests: bool
    durable: bool
    account: Account
    names: list[str]
    """Filled in before each file is begun, so that all can be removed."""

    def section(self, section: str, tensors: Mapping[str, Tensor], frame: Frame | None) -> None:
        unique, aliases = _find_aliases(tensors)
        pieces = my_pieces([locate(name, tensor, frame) for name, tensor in sorted(unique.items())], self.rank)
        if pieces:
            self._write(section, f"{section}/rank-{self.rank:05d}-{self.attempt}.safetensors", pieces)
        if aliases:
            self.account.aliases[section] = aliases

    def trainer_state(self, state: Any) -> None:
        tree, tensors = codec.encode(state)
        path = f"trainer/state-{self.attempt}.json"
        data = json.dumps(tree, separators=(",", ":"), allow_nan=False).encode()
        self.names.append(path)
        self.store.write(path, [memoryview(data)], len(data), durable=self.durable)
        self.account.state_file = FileEntry(path, len(data), 0, digest(data) if self.digests else None)
        if tensors:
            self._write("trainer", f"trainer/state-{self.attempt}.safetensors", _whole(tensors))

    def rank_state(self, tensors: Mapping[str, Tensor]) -> None:
        self._write("rank", f"trainer/rank-{self.rank:05d}-{self.attempt}.safetensors", _whole(tensors))

    def _write(self, section: str, path: str, pieces: list[Piece]) -> None:
        metadata = {"format": "pt", "lightning_shard.attempt": self.attempt, "lightning_shard.section": section}
        self.names.append(path)
        written = write_file(self.store, path, pieces, metadata, digests=self.digests, durable=self.durable)
        self.account.add(section, written)


def _whole(tensors: Mapping[str, Tensor]) -> list[Piece]:
    for name, tensor in tensors.items():
        check_storable(name, tensor)
        if is_dtensor(tensor):
            raise UnsupportedStateError(f"{name!r} is a DTensor: pass it in state= or optimizer=.")
    return [
        Piece(name, tuple(tensor.shape), Box.whole(tensor.shape), tensor.detach()) for name, tensor in tensors.items()
    ]


def _find_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name without those that are the very memory of another, and the names of these to its name."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[Any, str] = {}
    for name, tensor in tensors.items():
        key = _identity(tensor)
        if key is not None and key in seen:
            aliases[name] = seen[key]
        else:
            unique[name] = tensor
            if key is not None:
                seen[key] = name
    return unique, aliases


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors that are the same memory; None where there is none to tell by.

    A rank whose shard is empty can't tell that two DTensors are one, and needn't: it writes nothing of either.
    """
    local = local_tensor(tensor)
    if local.numel() == 0 or local.layout is not torch.strided or local.device.type == "meta":
        return None
    memory = (local.device, local.untyped_storage().data_ptr(), local.storage_offset())
    return (
        *memory,
        tuple(tensor.shape),
        tuple(local.shape),
        local.stride(),
        local.dtype,
        local.is_conj(),
        local.is_neg(),
    )


def my_pieces(located: list[Located], rank: int) -> list[Piece]:
    """What this rank writes: all that it alone holds, and its share of what others hold too."""
    pieces: list[Piece] = []
    by_holders: dict[tuple[int, ...], list[tuple[Located, int]]] = {}
    for tensor in located:
        for number in range(len(tensor.boxes)):
            by_holders.setdefault(tensor.holders, []).append((tensor, number))
    for holders, items in by_holders.items():
        shared = [Shared(tensor.boxes[number].box, tensor.local.element_size()) for tensor, number in items]
        parts = share(shared, len(holders), holders.index(rank))
        for (tensor, number), part in zip(items, parts, strict=True):
            if part is None:
                continue
            place = tensor.boxes[number]
            data = tensor.local
            for dim, (offset, size) in enumerate(zip(part.within(place.box).offsets, part.sizes)):
                if size != data.shape[dim]:
                    data = data.narrow(dim, place.local_offsets[dim] + offset, size)
            pieces.append(Piece(tensor.name, tensor.shape, part, data))
    return pieces


def _fingerprint(sections: Mapping[str, Mapping[str, Tensor]]) -> tuple[int, str]:
    """How many tensors this rank holds, and a hash of what they are: ranks of one mesh must agree."""
    lines = [
        f"{section}\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}"
        for section, tensors in sections.items()
        for name, tensor in tensors.items()
    ]
    return len(lines), digest("\n".join(sorted(lines)).encode(errors="surrogatepass"))


def _plain(layout: Any) -> Any:
    """The layout as JSON."""
    value = dataclasses.asdict(layout) if dataclasses.is_dataclass(layout) and not isinstance(layout, type) else layout
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UnsupportedStateError(f"layout ({layout!r}) must be a dataclass or JSON: {error}.") from error


def _abandon(store: Store, names: list[str]) -> None:
    """Remove this rank's files of an attempt that came to nothing."""
    with contextlib.suppress(OSError):
        for name in names:
            store.remove(name)
        if not store.exists(MANIFEST_NAME):
            store.remove_empty_folders()


def _raise(own: BaseException | None, verdict: Failure, path: Any, rank: int) -> None:
    if own is None:
        verdict.raise_here(rank)
    assert own is not None
    if isinstance(own, OSError) and not isinstance(own, CheckpointError):
        raise CheckpointError(f"The checkpoint {os.fspath(path)} could not be written: {own}.") from own
    raise own
