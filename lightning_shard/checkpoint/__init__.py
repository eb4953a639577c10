"""Sharded checkpoints: one safetensors file per rank and section, and a manifest that is written last.

Works with plain tensors and DTensors, with a process group or without one. ``docs/format.md`` specifies the bytes.
"""

from typing import TYPE_CHECKING, Any

from lightning_shard.checkpoint.catalog import Entry, exists, latest, prune, remove
from lightning_shard.checkpoint.catalog import list_checkpoints as list
from lightning_shard.checkpoint.convert.gather import Format, GatherReport, gather
from lightning_shard.checkpoint.format.typed_json import register_codec
from lightning_shard.checkpoint.half_loaded import declare_filled
from lightning_shard.checkpoint.loading.load import LoadReport, Pair, load, load_tensors, load_together
from lightning_shard.checkpoint.loading.open import read, read_together
from lightning_shard.checkpoint.loading.stored import Checkpoint, StoredTensor
from lightning_shard.checkpoint.ranks import all_or_none
from lightning_shard.checkpoint.saving.background import AsyncSaver
from lightning_shard.checkpoint.saving.save import SaveReport, save
from lightning_shard.checkpoint.tools.diff import SECTIONS, Difference, DiffReport, diff
from lightning_shard.checkpoint.tools.inspect import InspectReport, inspect
from lightning_shard.checkpoint.tools.verify import Fault, VerifyReport, verify

if TYPE_CHECKING:
    from lightning_shard.checkpoint.dcp import DcpReader, DcpWriter

__all__ = [
    "SECTIONS",
    "AsyncSaver",
    "Checkpoint",
    "DcpReader",
    "DcpWriter",
    "DiffReport",
    "Difference",
    "Entry",
    "Fault",
    "Format",
    "GatherReport",
    "InspectReport",
    "LoadReport",
    "Pair",
    "SaveReport",
    "StoredTensor",
    "VerifyReport",
    "all_or_none",
    "declare_filled",
    "diff",
    "exists",
    "gather",
    "inspect",
    "latest",
    "list",
    "load",
    "load_tensors",
    "load_together",
    "prune",
    "read",
    "read_together",
    "register_codec",
    "remove",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    # lazy, since importing torch.distributed.checkpoint is slow
    if name in ("DcpReader", "DcpWriter"):
        from lightning_shard.checkpoint import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
