"""Makes ``LightningModule.load_from_checkpoint`` accept a sharded checkpoint by its directory, local or in any store.

Private in Lightning 2.6, replaced here: ``lightning.pytorch.core.saving.pl_load``, by which it reads a file. Files are
read as before. A path that isn't a file, which was an error, is tried as a sharded checkpoint.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

_READER = "lightning.pytorch.core.saving"


def take_over_reading() -> None:
    """Install the reader, once Lightning is imported; imports nothing."""
    saving: Any = sys.modules.get(_READER)
    if saving is None or getattr(saving.pl_load, "of_lightning_shard", False):
        return
    read_file = saving.pl_load

    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.path.basename(path) == "manifest.json":
            path = os.path.dirname(path) or "."  # a sharded checkpoint, by the path of its manifest
        try:
            return read_file(path, map_location=map_location, weights_only=weights_only)
        except OSError as error:  # a directory, or no file of exactly this name
            if not isinstance(path, (str, os.PathLike)):
                raise
            found = _read_ours(path, map_location)
            if found is None:
                raise error
            return found

    read.of_lightning_shard = True  # type: ignore[attr-defined]
    saving.pl_load = read


def take_over_command_line() -> None:
    """Make LightningCLI take hyperparameters from a sharded checkpoint as it does from a file; imports nothing.

    The strategy is imported where a command line is made: jsonargparse finds a class by its bare name, as in
    ``--trainer.strategy=HybridShardStrategy``, only among those that are imported.

    Private in Lightning 2.6: ``LightningCLI._parse_ckpt_path``, which handles files only.
    """
    cli: Any = sys.modules["lightning.pytorch.cli"].LightningCLI
    parse_file = cli._parse_ckpt_path

    def parse(self: Any) -> None:
        command = self.config.get("subcommand")
        path = self.config[command].get("ckpt_path") if command else None
        if not path or path in ("best", "last", "hpc", "registry") or os.path.isfile(path):
            return parse_file(self)
        from lightning_shard.errors import CheckpointNotFoundError
        from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO

        try:
            kept = dict(ShardedCheckpointIO().open_checkpoint(path).get("hyper_parameters", {}))
        except CheckpointNotFoundError:
            return parse_file(self)
        kept.pop("_instantiator", None)
        if "_class_path" in kept:
            kept = {"class_path": kept.pop("_class_path"), "dict_kwargs": kept}
        if kept:
            self.config = self.parser.parse_object({command: {"model": kept}}, self.config)
        return None

    set_up_parser = cli.setup_parser

    def set_up(self: Any, *args: Any, **kwargs: Any) -> None:
        importlib.import_module("lightning_shard.plugin.strategy")
        set_up_parser(self, *args, **kwargs)

    cli._parse_ckpt_path, cli.setup_parser = parse, set_up


def _read_ours(path: str | os.PathLike[str], map_location: Any) -> dict[str, Any] | None:
    """Lightning's dict, tensors on the CPU or on device ``map_location``; None if no sharded checkpoint is there."""
    import torch
    from torch import Tensor

    from lightning_shard.errors import CheckpointNotFoundError
    from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO
    from lightning_shard.plugin.saving.hyperparameters import find_types

    try:
        loaded = ShardedCheckpointIO().load_checkpoint(path)
    except CheckpointNotFoundError:
        return None
    find_types(loaded)
    if isinstance(map_location, (str, torch.device)):
        state = loaded["state_dict"]
        loaded["state_dict"] = {k: v.to(map_location) if isinstance(v, Tensor) else v for k, v in state.items()}
    return loaded
