"""Loads a sharded checkpoint into what ``Fabric.load`` and ``Fabric.load_raw`` are given, with strategies of Fabric."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_shard import checkpoint as ckpt
from lightning_shard.checkpoint.names import as_compiled
from lightning_shard.checkpoint.sharded_values import lay_out
from lightning_shard.plugin.saving.checkpoint_io import ShardedCheckpointIO
from lightning_shard.plugin.saving.other_files import WEIGHTS_ALONE


def load_into(strategy: Any, path: Any, state: Any, *, strict: bool) -> dict[str, Any]:
    """Fill a module, an optimizer, or a dict of these and of values, which are replaced in it.

    A Trainer's checkpoint holds ``"state_dict"``, ``"optimizer_states"`` and so on, another one what was its trainer
    state. Under other keys, the first module gets the model, and the first optimizers get the optimizers' states.

    Returns:
        What is left of the checkpoint; all of it without a state.

    Raises:
        KeyError: With ``strict``, the checkpoint has nothing for a key.
    """
    left = ShardedCheckpointIO().load_checkpoint(path)
    if left.get(WEIGHTS_ALONE):
        own, pairs = lay_out(ckpt.read(path).trainer_state(), {}, ())
        ckpt.load_tensors(pairs)
        left = {
            **(own if isinstance(own, dict) else {}),
            **{key: left[key] for key in ("state_dict", "optimizer_states")},
        }
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
            compiled = as_compiled(found, value.state_dict())
            found = {compiled.get(name, name): each for name, each in found.items()}
            strategy.load_module_state_dict(module=value, state_dict=found, strict=strict)
        elif hasattr(value, "load_state_dict"):
            value.load_state_dict(found)
        else:
            given[key] = found
    return left if isinstance(state, dict) else {}
