"""Storage writer and reader for ``torch.distributed.checkpoint`` (DCP) in this package's format.

::

    dcp.save(state, storage_writer=checkpoint.DcpWriter(path))
    dcp.load(state, storage_reader=checkpoint.DcpReader(path))

DCP's planners decide which rank writes and reads what. Files, digests and the commit are those of
:func:`~lightning_shard.checkpoint.save`, so each can read what the other wrote. Names are DCP's: keys of nested states
are joined by ``.``, and map to this package's sections as follows.

========================================  ==================================================================
DCP's name                                here
========================================  ==================================================================
``optimizer.<name>``, a tensor            ``<name>`` in the optimizer's section
any other tensor                          the same name in the model's section
a value that isn't a tensor               a key of the trainer state, as typed JSON: nothing is pickled
========================================  ==================================================================

So ``{"layers.0.weight": …, "optimizer": {…}}``, as torchtitan saves, gives a model section with the model's own names.
For a checkpoint that Lightning wrote, the trainer state's top keys (``epoch``, ``global_step``, …) are values to DCP.

On failure DCP raises its ``CheckpointException`` on every rank; its ``failures`` have this package's error of each
failed rank. Nothing is committed then, and an earlier checkpoint stays.

Beside DCP's public storage API this uses, as of torch 2.11 to 2.14:

- ``DefaultLoadPlanner.load_bytes`` unpickles, so this reader sets values itself, at the same positions: by the
  planner's ``mappings`` and ``torch.distributed.checkpoint._traverse.set_element``, which is private.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from lightning_shard.checkpoint import half_loaded
from lightning_shard.checkpoint.boxes import Box
from lightning_shard.checkpoint.catalog import Earlier
from lightning_shard.checkpoint.format.chunks import TensorEntry
from lightning_shard.checkpoint.format.header import DTYPES
from lightning_shard.checkpoint.format.manifest import table_path
from lightning_shard.checkpoint.format.typed_json import TAG, decode, encode
from lightning_shard.checkpoint.loading.open import read
from lightning_shard.checkpoint.loading.ranges import Read
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
from lightning_shard.checkpoint.memory import settle
from lightning_shard.checkpoint.ranks import FILES_STAY
from lightning_shard.checkpoint.saving.accounts import Account
from lightning_shard.checkpoint.saving.commit import (
    check_files,
    commit,
    look_before_saving,
    new_attempt,
)
from lightning_shard.checkpoint.saving.files import Piece, arranged
from lightning_shard.checkpoint.saving.merge import Merged
from lightning_shard.checkpoint.saving.part import PartFile, RankPart
from lightning_shard.checkpoint.saving.save import Order, abandon, write_part
from lightning_shard.checkpoint.store import Store, as_path, open_store
from lightning_shard.checkpoint.store.calls import told_as
from lightning_shard.checkpoint.tensors import is_dtensor, locate
from lightning_shard.errors import CheckpointError, StateMismatchError, UnsupportedStateError

OPTIMIZER_PREFIX = "optimizer."


@dataclass
class _Part:
    """What one rank has written, as sent to the coordinator: its files and chunks, and its values as typed JSON."""

    account: Account
    values: dict[str, Any]


class _AtPath:
    """What DCP expects of both: ``checkpoint_id`` may be set or replaced later; plans stay as they are."""

    checkpoint_id: str | os.PathLike[str] | None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans


class DcpWriter(_AtPath, StorageWriter):
    """For ``dcp.save`` and ``dcp.async_save``: writes a checkpoint of this package's format.

    Tensors that share memory are written under each of their names, since DCP plans them so.

    Args:
        path: The directory, local or any URL that fsspec knows; or None, and DCP's ``checkpoint_id`` names it.
        storage_options: For fsspec.
        fsync: Survive a crash of the machine; False for scratch.
        digests: Record a 128-bit hash of every block.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage_options: dict[str, Any] | None = None,
        fsync: bool = True,
        digests: bool = True,
    ) -> None:
        self.checkpoint_id = path
        self._order = Order("", storage_options, None, fsync, digests)
        self._store: Store | None = None
        self._earlier = Earlier()
        self._attempt = ""
        self._began_s = 0.0

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False would have every rank commit a checkpoint of its own to one directory: leave it"
                " at True."
            )
        self._store = open_store(_path(self.checkpoint_id), self._order.storage_options)
        if is_coordinator:
            self._earlier = look_before_saving(self._store)
        self._attempt = new_attempt()
        self._began_s = time.monotonic()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert self._store is not None
        values: dict[str, Any] = {}
        sections: dict[str, list[tuple[Piece, Tensor]]] = {"model": [], "optimizer": []}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                values.update(_encoded(planner, item))
            else:
                for piece, data in _pieces(planner, item):
                    section = "optimizer" if piece.name.startswith(OPTIMIZER_PREFIX) else "model"
                    own = piece._replace(name=piece.name.removeprefix(OPTIMIZER_PREFIX))
                    sections[section].append((own, data))
        settle(data for pieces in sections.values() for _, data in pieces)
        name = f"rank-{_rank():05d}-{self._attempt}.safetensors"
        files = [PartFile(title, f"{title}/{name}", *arranged(own)) for title, own in sections.items() if own]
        part = RankPart(self._attempt, Account.of_rank(_rank(), ()), files)
        with told_as(f"The checkpoint {_path(self.checkpoint_id)} could not be written"):
            try:
                sent = _Part(write_part(part, self._store, self._order), values)
            except BaseException:
                abandon(self._store, part.paths())
                raise
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, _nbytes(item), sent) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that the ranks' parts cover every tensor, and commit.

        Raises:
            CheckpointError: They don't cover one, or the manifest couldn't be written.
        """
        assert self._store is not None
        parts: list[_Part] = [result[0].storage_data for result in results if result]
        values = {name: value for part in parts for name, value in part.values.items()}
        state = RankPart(self._attempt, Account.of_rank(_rank(), ()), state=values or None)
        names = [file.path for part in parts for file in part.account.files]
        names += [table_path(self._attempt), *state.paths()]
        with told_as(f"The checkpoint {_path(self.checkpoint_id)} could not be written"):
            try:
                accounts = [write_part(state, self._store, self._order), *(part.account for part in parts)]
                for account in accounts:
                    account.meshes = [tuple(account.ranks[0] for account in accounts)]
                manifest = Merged(accounts).manifest(attempt=self._attempt, layout=None, digests=self._order.digests)
                manifest.world_size = len(results)
                check_files(self._store, manifest.files, self._began_s)
                commit(self._store, manifest, self._earlier, durable=self._order.fsync)
            except BaseException as error:
                if not getattr(error, FILES_STAY, False):
                    abandon(self._store, names)
                raise


class DcpReader(_AtPath, StorageReader):
    """For ``dcp.load``: reads any checkpoint of this package's format, into any layout.

    As with DCP's own readers, elements are converted if a tensor of the state has another dtype.

    Args:
        path: The directory or its manifest, local or any URL that fsspec knows; or None, and DCP's ``checkpoint_id``
            names it.
        storage_options: For fsspec.
        verify: Check digests.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        storage_options: dict[str, Any] | None = None,
        verify: bool = True,
    ) -> None:
        self.checkpoint_id = path
        self.storage_options = storage_options
        self.verify = verify
        self._checkpoint: Checkpoint | None = None
        self._tensors: dict[str, StoredTensor] = {}
        self._values: dict[str, Any] = {}

    def read_metadata(self) -> Metadata:
        """The manifest as DCP's metadata.

        Raises:
            CheckpointNotFoundError, FormatVersionError, CorruptCheckpointError: As :func:`~.reader.read`.
        """
        self._checkpoint = read(_path(self.checkpoint_id), storage_options=self.storage_options, verify=self.verify)
        # a model may have a submodule named "optimizer": then the model's names take precedence
        self._tensors = {OPTIMIZER_PREFIX + name: stored for name, stored in self._checkpoint.optimizer.items()}
        self._tensors.update(self._checkpoint)
        tree = self._checkpoint.state_json()
        plain = isinstance(tree, dict) and TAG not in tree
        self._values = {name: value for name, value in tree.items() if name not in self._tensors} if plain else {}
        return Metadata(
            {name: _metadata(stored.entry) for name, stored in self._tensors.items()}
            | {name: BytesStorageMetadata() for name in self._values},
            planner_data={name: (name,) for name in (*self._tensors, *self._values)},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors and values of a plan.

        Raises:
            CorruptCheckpointError: As :func:`read`. Some of the tensors may have been written, so a save refuses them
                until a load into them succeeds.
            StateMismatchError: A tensor of the state hasn't the shape that the plan expects.
        """
        assert self._checkpoint is not None
        reads, targets = [], []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                self._load_value(planner, item)
                continue
            name, offset = item.storage_index.fqn, item.storage_index.offset
            assert offset is not None, f"the plan has no place for {name!r}"
            _check_place(planner, item.dest_index)
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                raise StateMismatchError(
                    f"{name!r}: the plan reads {tuple(item.lengths)} elements into {tuple(target.shape)}."
                )
            box = Box(tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True)), tuple(item.lengths))
            reads.append(Read(self._tensors[name], box, target))
            targets.append((item, target))
        changing = [locate(read.stored.name, read.target).local for read in reads]
        half_loaded.mark(changing)
        self._checkpoint.fetch(reads)
        half_loaded.clear(changing)
        for item, target in targets:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _load_value(self, planner: LoadPlanner, item: ReadItem) -> None:
        name = item.dest_index.fqn
        if not isinstance(planner, DefaultLoadPlanner) or (
            type(planner).load_bytes is not DefaultLoadPlanner.load_bytes
        ):
            raise UnsupportedStateError(
                f"{name!r} is stored as typed JSON, and {type(planner).__name__}.load_bytes expects bytes of its own"
                " kind: load it with DefaultLoadPlanner, or by checkpoint.read(path).trainer_state()."
            )
        assert self._checkpoint is not None
        trainer = self._checkpoint.trainer
        value = decode(self._values[item.storage_index.fqn], lambda key: trainer[key].full())
        if planner.flatten_state_dict:
            set_element(planner.original_state_dict, planner.mappings[name], value)
        else:
            planner.state_dict[name] = value


def _path(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        raise CheckpointError("There is no path: pass it to the writer or reader, or as checkpoint_id to DCP.")
    return as_path(path)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _pieces(planner: SavePlanner, item: WriteItem) -> list[tuple[Piece, Tensor]]:
    """The piece of a tensor to write; none for an empty part, unless the whole tensor is empty."""
    name, planned = item.index.fqn, item.tensor_data
    assert planned is not None, f"the plan has no place for {name!r}"
    shape, offsets, sizes = tuple(planned.size), tuple(planned.chunk.offsets), tuple(planned.chunk.sizes)
    tensor: Any = planner.resolve_data(item)
    half_loaded.refuse([locate(name, tensor, to_save=True)])
    if 0 in shape:
        whole = Piece(name, tensor.dtype, shape, Box.whole(shape)), tensor.new_empty(shape)
        return [] if any(offsets) else [whole]
    if 0 in sizes:
        return []
    _check_place(planner, item.index)
    if tuple(tensor.shape) != sizes:
        raise CheckpointError(
            f"{name!r}: DCP expects this rank's shard to have shape {sizes} at offset {offsets} of {shape}, but its"
            f" shape is {tuple(tensor.shape)}: save it with checkpoint.save, which knows such shards."
        )
    return [(Piece(name, tensor.dtype, shape, Box(offsets, sizes)), tensor.detach())]


def _check_place(planner: SavePlanner | LoadPlanner, index: MetadataIndex) -> None:
    """Check that DCP computes the same box for a DTensor's shard as we do.

    A strided shard may consist of several boxes, or of another one than DCP's, which would be other elements.
    """
    tensor = getattr(planner, "state_dict", {}).get(index.fqn)
    if tensor is None or not is_dtensor(tensor):
        return
    boxes = [place.box for place in locate(index.fqn, tensor).spread.boxes]
    if len(boxes) > 1 or any(box.offsets != index.offset for box in boxes):
        raise CheckpointError(
            f"{index.fqn!r} with placements {tensor.placements} consists of boxes at {[box.offsets for box in boxes]}"
            f" on this rank, but DCP expects one box at {tuple(index.offset or ())}: use checkpoint.save and"
            " checkpoint.load, which know such shards."
        )


def _encoded(planner: SavePlanner, item: WriteItem) -> dict[str, Any]:
    """A non-tensor value as typed JSON, in a dict by its name."""
    name = item.index.fqn
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise UnsupportedStateError(
            f"{name!r} isn't a tensor, and {type(planner).__name__} gives only pickled bytes of it, which the"
            " checkpoint can't hold: use a planner that derives from DefaultSavePlanner, or leave it out."
        )
    tree, tensors = encode({name: lookup(item.index)})
    if tensors or name == TAG:
        raise UnsupportedStateError(
            f"{name!r} isn't a tensor and holds tensors ({', '.join(tensors)}): keep them in dicts and lists, where DCP"
            " finds them."
            if tensors
            else f"{name!r} is no name for a value: rename it."
        )
    return tree


def _nbytes(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=DTYPES[entry.dtype]),
        torch.Size(entry.shape),
        [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks],
    )
