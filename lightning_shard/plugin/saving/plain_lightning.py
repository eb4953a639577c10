"""Opens sharded checkpoints for plain Lightning: ``load_from_checkpoint``, other strategies, Fabric and LightningCLI.

What calls it is installed by ``lightning_private.py``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.foreign.lightning_ckpt import OWN
from lightning_shard.checkpoint.optimizers.named import OPTIMIZER_STATES
from lightning_shard.checkpoint.sharded_values import lay_out
from lightning_shard.errors import CheckpointNotFoundError
from lightning_shard.plugin.saving.beside_tensors import find_types
from lightning_shard.plugin.saving.checkpoint_io import WEIGHTS_ALONE, ShardedCheckpointIO

FABRIC_KEYS = "fabric"
"""Under ``lightning_shard``, in what Fabric saved: which keys are modules', and which are optimizers', in order."""


def prefixes(keys: Collection[str]) -> dict[str, str]:
    """What comes before the names of each module's tensors, if Fabric saved them; nothing with a single one."""
    return {key: "" if len(keys) == 1 else f"{str(key).replace('.', '_')}." for key in keys}


def read(path: Any, map_location: Any) -> dict[str, Any] | None:
    """Lightning's dict, tensors on the CPU or on device ``map_location``; None if no sharded checkpoint is there."""
    try:
        loaded = ShardedCheckpointIO().load_checkpoint(path)
    except CheckpointNotFoundError:
        return None
    find_types(loaded)
    if isinstance(map_location, (str, torch.device)):
        state = loaded["state_dict"]
        loaded["state_dict"] = {k: v.to(map_location) if isinstance(v, Tensor) else v for k, v in state.items()}
    return loaded


def is_ours(path: Any) -> bool:
    try:
        return ckpt.exists(path)
    except Exception:  # whoever reads it meets the same
        return False


def replace_folder(path: str, write: Callable[[str], None]) -> None:
    """Write a file in place of a sharded checkpoint, which is removed once the file is whole."""
    written = f"{path}.new"
    write(written)
    shutil.rmtree(path)
    os.rename(written, path)


def hyperparameters(path: str) -> dict[str, Any] | None:
    """As LightningCLI takes them; None if no sharded checkpoint is there."""
    try:
        kept = dict(ShardedCheckpointIO().open_checkpoint(path).get("hyper_parameters", {}))
    except CheckpointNotFoundError:
        return None
    kept.pop("_instantiator", None)
    return {"class_path": kept.pop("_class_path"), "dict_kwargs": kept} if "_class_path" in kept else kept


def load_into(
    strategy: Any, path: Any, state: Any, *, strict: bool, io: ShardedCheckpointIO | None = None
) -> dict[str, Any]:
    """``Fabric.load`` and ``load_raw``: fill a module, an optimizer, or a dict of these and of values.

    Values are replaced in the dict. A Trainer's checkpoint holds ``"state_dict"``, ``"optimizer_states"`` and so on,
    Fabric's the keys that it was saved with, another one what was its trainer state. Under other keys, the first module
    gets the model, and the first optimizers get the optimizers' states.

    Returns:
        What is left of the checkpoint; all of it without a state.
    """
    io = io or ShardedCheckpointIO()
    left = io.load_checkpoint(path)
    if left.get(WEIGHTS_ALONE):
        own, pairs = lay_out(ckpt.read(path, storage_options=io.storage_options).trainer_state(), {}, ())
        ckpt.load_tensors(pairs)
        kept = {key: left[key] for key in ("state_dict", "optimizer_states")}
        left = {**(own if isinstance(own, dict) else {}), **kept}
    keys = left.get(OWN, {}).get(FABRIC_KEYS)
    if keys is not None and (not state or (isinstance(state, dict) and state.keys() & {*keys["modules"]})):
        left = _by_keys(left, **keys)
    if not state:
        return left
    given = state if isinstance(state, dict) else {None: state}
    for key, value in given.copy().items():
        if key not in left and isinstance(value, nn.Module) and "state_dict" in left:
            found = left.pop("state_dict")
        elif key not in left and isinstance(value, Optimizer) and left.get("optimizer_states"):
            found, *others = left.pop("optimizer_states")
            left |= {"optimizer_states": others} if others else {}
        elif key in left:
            found = left.pop(key)
        elif strict:
            raise KeyError(f"{path} has nothing for the key {key!r} of the state; it has {', '.join(map(str, left))}.")
        else:
            continue
        if isinstance(value, nn.Module):
            strategy.load_module_state_dict(module=value, state_dict=found, strict=strict)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(found)
        else:
            given[key] = found
    return left if isinstance(state, dict) else {}


def _by_keys(content: Mapping[str, Any], modules: Collection[str], optimizers: Collection[str]) -> dict[str, Any]:
    rest = {key: value for key, value in content.items() if key not in ("state_dict", OPTIMIZER_STATES, OWN)}
    for key, prefix in prefixes(modules).items():
        state = content["state_dict"].items()
        rest[key] = {name.removeprefix(prefix): value for name, value in state if name.startswith(prefix)}
    return rest | dict(zip(optimizers, content[OPTIMIZER_STATES]))
