"""Sharded checkpoints: safetensors per rank and a manifest, written last.

Works with plain tensors or DTensors, with a process group or without; see ``docs/format.md`` for the bytes.
"""

from typing import TYPE_CHECKING, Any

from lightning_shard.checkpoint.background import AsyncSaver
from lightning_shard.checkpoint.codec import register_codec
from lightning_shard.checkpoint.commit import all_or_none, remove
from lightning_shard.checkpoint.diff import SECTIONS, Difference, DiffReport, diff
from lightning_shard.checkpoint.gather import Format, GatherReport, gather
from lightning_shard.checkpoint.inspect import InspectReport, inspect
from lightning_shard.checkpoint.loader import Pair, load, load_tensors, load_together
from lightning_shard.checkpoint.reader import Checkpoint, StoredTensor, exists, read, read_together
from lightning_shard.checkpoint.verify import Fault, VerifyReport, verify
from lightning_shard.checkpoint.writer import save

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
    "Fault",
    "Format",
    "GatherReport",
    "InspectReport",
    "Pair",
    "StoredTensor",
    "VerifyReport",
    "all_or_none",
    "diff",
    "exists",
    "gather",
    "inspect",
    "load",
    "load_tensors",
    "load_together",
    "read",
    "read_together",
    "register_codec",
    "remove",
    "save",
    "verify",
]


def __getattr__(name: str) -> Any:
    # importing torch.distributed.checkpoint costs time that only its users need spend
    if name in ("DcpReader", "DcpWriter"):
        from lightning_shard.checkpoint import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
