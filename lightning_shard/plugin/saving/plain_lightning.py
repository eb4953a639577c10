"""Has ``load_from_checkpoint``, other strategies and Fabric open sharded checkpoints by their folders, in any store.

Replaced in Lightning 2.6:

- ``pl_load`` (private), by which ``load_from_checkpoint`` and ``TorchCheckpointIO`` read a file. Files are read as
  before. A path that isn't a file, which was an error, is tried as a sharded checkpoint.
- ``_atomic_save`` (private), by which ``TorchCheckpointIO`` writes one: over a directory, it moves the file into it.
- Fabric's ``Strategy.load_checkpoint``, which knows no names of ours.
- ``LightningModule.load_state_dict``: parts that were compiled on one side only are matched.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any


def take_over_reading() -> None:
    """Install the readers, once ``LightningModule`` has been imported, and so all of these; imports nothing."""
    modules: Any = (
        sys.modules[f"lightning.{name}"]
        for name in ("pytorch.core.module", "pytorch.core.saving", "fabric.plugins.io.torch_io", "fabric.strategies")
    )
    module, saving, files, strategies = modules
    saving.pl_load = files.pl_load = _reading(files.pl_load)
    files._atomic_save = _writing(files._atomic_save)
    strategies.Strategy.load_checkpoint = _loading_into(strategies.Strategy.load_checkpoint)
    module.LightningModule.load_state_dict = _matching(module.LightningModule.load_state_dict)


def _reading(read_file: Callable[..., Any]) -> Callable[..., Any]:
    def read(path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.path.basename(path) == "manifest.json":
            path = os.path.dirname(path) or "."  # a sharded checkpoint, by the path of its manifest
        try:
            return read_file(path, map_location=map_location, weights_only=weights_only)
        except (OSError, EOFError) as error:  # a directory, which stores may open as an empty file; or no such file
            if not isinstance(path, (str, os.PathLike)):
                raise
            found = _read_ours(path, map_location)
            if found is None:
                raise error
            return found

    return read


def _writing(write_file: Callable[..., Any]) -> Callable[..., Any]:
    def write(checkpoint: dict[str, Any], filepath: Any) -> None:
        with _out_of_the_way(os.fspath(filepath).removeprefix("file://")):
            write_file(checkpoint, filepath)

    return write


@contextlib.contextmanager
def _out_of_the_way(path: str) -> Iterator[None]:
    """Context: a sharded checkpoint at a local path is called its next version, and is removed at the end."""
    if not (os.path.isdir(path) and _is_ours(path)):
        yield
        return
    from lightning_shard.plugin.saving.local_folders import next_version, remove_folder

    aside = next_version(path)
    os.rename(path, aside)
    try:
        yield
    except BaseException:
        os.rename(aside, path)
        raise
    remove_folder(aside)


def _loading_into(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def load_checkpoint(
        self: Any, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not _is_ours(path):
            return load(self, path, state, strict, weights_only)  # type: ignore[no-any-return]
        from lightning_shard.plugin.saving.fabric import load_into

        return load_into(self, path, state, strict=strict)

    return load_checkpoint


def _is_ours(path: Any) -> bool:
    from lightning_shard import checkpoint

    try:
        return not os.path.isfile(path) and checkpoint.exists(path)
    except Exception:  # whoever reads it meets the same
        return False


def _matching(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def load_state_dict(self: Any, state_dict: Any, *arguments: Any, **named: Any) -> Any:
        from lightning_shard.checkpoint.names import COMPILED, as_compiled

        if any(COMPILED in f"{name}." for name in (*state_dict, *(name for name, _ in self.named_modules()))):
            found = as_compiled(state_dict, self.state_dict())
            if found:
                state_dict = {found.get(name, name): value for name, value in state_dict.items()}
        return load(self, state_dict, *arguments, **named)

    return load_state_dict


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
